"""What a program does with the anthropic package; prints what it got as JSON."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import anthropic

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "Who are you?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
# Newer versions of the package have no parameter for the temperature.
asked = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}}
client = anthropic.Anthropic(base_url=os.environ["HTTP"], api_key=os.environ["OPENAI_API_KEY"])


def failure(**wrong):
    try:
        client.messages.create(**{**asked, "messages": MESSAGES, **wrong})
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.type, bool(error.request_id)]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def agent(question):
    """Calls tools until the model answers, over streams."""
    messages, called = [{"role": "user", "content": question}], []
    while True:
        more = {**asked, "max_tokens": 20_000, "tools": [WEATHER], "messages": messages}
        with client.messages.stream(**more) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return [called, text_of(message), message.stop_reason]
        results = []
        for block in message.content:
            if block.type == "tool_use":
                called.append([block.name, block.input])
                result = "It is sunny and 21 degrees."
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        messages.append({"role": "user", "content": results})


shown = client.models.retrieve(MODEL)
chat = client.messages.create(messages=MESSAGES, **asked)
with client.messages.stream(messages=MESSAGES, **asked) as stream:
    pieces = list(stream.text_stream)
    streamed = stream.get_final_message()
with_token = anthropic.Anthropic(
    base_url=os.environ["HTTP"], api_key=None, auth_token=os.environ["OPENAI_API_KEY"]
)
limited = anthropic.Anthropic(base_url=os.environ["HTTP"], api_key=os.environ["TIGHT_KEY"])


def limited_chat(_):
    return text_of(limited.messages.create(messages=MESSAGES, **asked))


# At once, so that one of them is refused however slow this machine is.
with ThreadPoolExecutor(3) as pool:
    retried = [*pool.map(limited_chat, range(3)), limited_chat(3)]
print(
    json.dumps(
        {
            "models": [[model.type, model.id] for model in client.models.list()],
            "shown": [shown.id, shown.display_name, shown.created_at <= datetime.now(UTC)],
            "chat": text_of(chat),
            "chat_streamed": "".join(pieces),
            "with_token": text_of(with_token.messages.create(messages=MESSAGES, **asked)),
            "stop_reasons": [chat.stop_reason, streamed.stop_reason],
            "usage": [chat.usage.output_tokens, streamed.usage.output_tokens],
            "counted": [
                client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens,
                chat.usage.input_tokens + chat.usage.cache_read_input_tokens,
            ],
            "agent": agent("What is the weather in Paris?"),
            "errors": [failure(model="other"), failure(extra_body={"temperature": -1})],
            "retried": retried,
        }
    )
)
