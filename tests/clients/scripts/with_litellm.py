"""What a program does with litellm; prints what it got as JSON."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import litellm

MESSAGES = [{"role": "user", "content": "Who are you?"}]
BASE = os.environ["OPENAI_BASE_URL"]
key = os.environ["OPENAI_API_KEY"]
asked = {"api_base": BASE, "api_key": key, "max_tokens": 12, "temperature": 0}
model = "hosted_vllm/" + os.environ["MODEL"]


# litellm's own way to ask again: its router heeds Retry-After.
tight = {**asked, "model": model, "api_key": os.environ["TIGHT_KEY"]}
router = litellm.Router([{"model_name": "tight", "litellm_params": tight}], num_retries=3)


def failure(**wrong):
    try:
        litellm.completion(**{**asked, "model": model, "messages": MESSAGES, **wrong})
    except litellm.exceptions.APIError as error:
        return [type(error).__name__, error.status_code]
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", 0)]


chat = litellm.completion(model=model, messages=MESSAGES, **asked)
chunks = list(litellm.completion(model=model, messages=MESSAGES, stream=True, **asked))
text = litellm.text_completion(
    model="text-completion-openai/" + os.environ["MODEL"], prompt="The capital of France", **asked
)
respond = {**asked, "model": "openai/" + os.environ["MODEL"], "input": "Who are you?"}
# It asks for 16 at least, as OpenAI does.
respond["max_output_tokens"] = respond.pop("max_tokens") + 4
response = litellm.responses(**respond)
pieces = [getattr(event, "delta", "") for event in litellm.responses(**respond, stream=True)]


def limited_chat(_):
    answer = router.completion(model="tight", messages=MESSAGES)
    return answer.choices[0].message.content


# At once, so that one of them is refused however slow this machine is.
with ThreadPoolExecutor(3) as pool:
    retried = [*pool.map(limited_chat, range(3)), limited_chat(3)]
print(
    json.dumps(
        {
            "response": response.output[0].content[0].text,
            "response_streamed": "".join(pieces),
            "chat": chat.choices[0].message.content,
            "chat_streamed": "".join(c.choices[0].delta.content or "" for c in chunks),
            "completion": text.choices[0].text,
            "errors": [failure(model="hosted_vllm/other"), failure(temperature=-1)],
            "retried": retried,
        }
    )
)
