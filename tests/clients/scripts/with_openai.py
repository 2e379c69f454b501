"""What a program does with the openai package; prints what it got as JSON."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import openai

MESSAGES = [{"role": "user", "content": "Who are you?"}]
MODEL = os.environ["MODEL"]
client = openai.OpenAI()
asked = {"model": MODEL, "max_tokens": 12, "temperature": 0}


def failure(**wrong):
    try:
        client.chat.completions.create(**{**asked, "messages": MESSAGES, **wrong})
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.param, bool(error.request_id)]


chat = client.chat.completions.create(messages=MESSAGES, **asked)
chunks = list(
    client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked
    )
)
completion = client.completions.create(prompt="The capital of France", **asked)
pieces = list(client.completions.create(prompt="The capital of France", stream=True, **asked))
limited = openai.OpenAI(api_key=os.environ["TIGHT_KEY"])


def limited_chat(_):
    answer = limited.chat.completions.create(messages=MESSAGES, **asked)
    return answer.choices[0].message.content


# At once, so that one of them is refused however slow this machine is.
with ThreadPoolExecutor(3) as pool:
    retried = [*pool.map(limited_chat, range(3)), limited_chat(3)]
print(
    json.dumps(
        {
            "models": [model.id for model in client.models.list()],
            "chat": chat.choices[0].message.content,
            "chat_streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "usage": [chat.usage.completion_tokens, chunks[-1].usage.completion_tokens],
            "completion": completion.choices[0].text,
            "completion_streamed": "".join(c.choices[0].text for c in pieces if c.choices),
            "errors": [failure(model="other"), failure(temperature=-1)],
            "retried": retried,
        }
    )
)
