"""What a program does with the Responses of the openai package; prints what it got as JSON."""

import json
import os
import time

import openai
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
WHO = "Who are you?"
client = openai.OpenAI()
ask = client.responses.create
asked = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}


class Person(BaseModel):
    name: str
    age: int


def failure(what, *args, **wrong):
    try:
        what(*args, **wrong)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.param]


whole = ask(input=WHO, **asked)
events = list(ask(input=WHO, stream=True, **asked))
deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
with client.responses.stream(model=MODEL, input=WHO, temperature=0) as stream:
    final = stream.get_final_response()

# Two turns, by the store and by what the client keeps.
turns = [{"role": "user", "content": WHO}, *whole.output, {"role": "user", "content": "Why?"}]
continued = [
    ask(input="Why?", previous_response_id=whole.id, **asked).output_text,
    ask(input=turns, store=False, **asked).output_text,
]
retrieved = client.responses.retrieve(whole.id)
(item,) = client.responses.input_items.list(whole.id)
client.responses.delete(whole.id)

parsed = client.responses.parse(
    model=MODEL,
    input="Ada is 36 years old.",
    text_format=Person,
    temperature=0,
    max_output_tokens=60,
)

begun = ask(input=WHO, background=True, **asked)
while (background := client.responses.retrieve(begun.id)).status == "in_progress":
    time.sleep(0.1)
again = list(client.responses.retrieve(begun.id, stream=True, starting_after=2))
long = ask(model=MODEL, input="Tell me a story.", background=True)
cancelled = client.responses.cancel(long.id)

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def agent():
    called, given = [], [{"role": "user", "content": "What is the weather in Paris?"}]
    for _ in range(4):
        answer = ask(model=MODEL, input=given, tools=[TOOL], temperature=0)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return [called, answer.output_text]
        given += answer.output
        for call in calls:
            called.append([call.name, json.loads(call.arguments)])
            output = "It is sunny and 21 degrees."
            given.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )


print(
    json.dumps(
        {
            "chat": whole.output_text,
            "chat_streamed": "".join(deltas),
            "final": final.output_text,
            "events": [events[0].type, events[-1].type],
            "status": [whole.status, whole.incomplete_details.reason],
            "usage": [whole.usage.output_tokens, events[-1].response.usage.output_tokens],
            "continued": continued,
            "retrieved": retrieved.output_text,
            "item": item.content[0].text,
            "parsed": sorted(parsed.output_parsed.model_dump()),
            "background": [begun.status, background.status, background.output_text],
            "again": [again[0].sequence_number, again[-1].type],
            "cancelled": cancelled.status,
            "agent": agent(),
            "errors": [
                failure(client.responses.retrieve, whole.id),
                failure(ask, **{**asked, "model": "other"}, input=WHO),
                failure(ask, input=WHO, tools=[{"type": "web_search"}], **asked),
            ],
        }
    )
)
