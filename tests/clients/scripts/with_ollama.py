"""What a program does with the ollama package; prints what it got as JSON."""

import json
import os

import ollama

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "Who are you?"}]
asked = {"model": MODEL, "options": {"temperature": 0, "num_predict": 12}}
client = ollama.Client(
    host=os.environ["HTTP"], headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
)


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: its name
    """
    return "It is sunny and 21 degrees."


def failure(work, **wrong):
    try:
        work(**wrong)
    except ollama.ResponseError as error:
        return [error.status_code, error.error]


def agent(question):
    """Calls tools until the model answers, over streams."""
    messages, called = [{"role": "user", "content": question}], []
    while True:
        text, calls = "", []
        stream = client.chat(
            model=MODEL,
            messages=messages,
            tools=[get_weather],
            options={"temperature": 0},
            stream=True,
        )
        for part in stream:
            text += part.message.content or ""
            calls += part.message.tool_calls or []
        if not calls:
            return [called, text]
        messages.append({"role": "assistant", "content": text, "tool_calls": calls})
        for call in calls:
            called.append([call.function.name, dict(call.function.arguments)])
            result = get_weather(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})


loaded = client.generate(model=MODEL, keep_alive="5m")
chat = client.chat(messages=MESSAGES, **asked)
pieces = list(client.chat(messages=MESSAGES, stream=True, **asked))
text = client.generate(prompt="Who are you?", **asked)
print(
    json.dumps(
        {
            "models": [model.model for model in client.list().models],
            "running": [model.model for model in client.ps().models],
            "capabilities": client.show(MODEL).capabilities,
            "loaded": [loaded.done, loaded.done_reason, loaded.response],
            "chat": chat.message.content,
            "chat_streamed": "".join(part.message.content for part in pieces),
            "generated": text.response,
            "done": [chat.done_reason, pieces[-1].done_reason, text.done_reason],
            "counts": [chat.eval_count, pieces[-1].eval_count],
            "agent": agent("What is the weather in Paris?"),
            "errors": [
                failure(client.chat, model="other", messages=MESSAGES),
                failure(client.pull, model="other"),
            ],
        }
    )
)
