"""Calls in the formats of several families, over each API that has tools, through real processes.

The bundled model knows one format only: the others are forced. Each router speaks another one with
the same workers.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import validate

import batonlm
from tests.e2e.relay import PATIENCE_S, Relay, eventually

MODEL = Path(batonlm.__file__).parent / "models" / "baton-tiny"
QUESTION = [{"role": "user", "content": "Take a note, please."}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["big", "small"]},
        "copies": {"type": "integer", "enum": [1, 2]},
        "urgent": {"type": "boolean"},
    },
    "required": ["kind", "copies", "urgent"],
    "additionalProperties": False,
}
"""Of few values: greedily, the model writes some texts and numbers without end."""
NAME, DESCRIPTION = "take_note", "Takes a note."
NEVER = {"const": 88_888_888}
"""What the model does not say while it may say something else."""
MOST = 300


@dataclass
class Said:
    """What an answer comes to, in the words of no API."""

    thoughts: str
    content: str
    calls: list[tuple[str, Any]]
    """Names and arguments."""
    end: str


Api = Callable[[httpx.Client, bool], Said]


def chat(client: httpx.Client, stream: bool) -> Said:
    function = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
    asked = {
        "messages": QUESTION,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": MOST,
    }
    if not stream:
        (choice,) = post(client, "/v1/chat/completions", asked).json()["choices"]
        pieces, end = [choice["message"]], choice["finish_reason"]
    else:
        lines = post(client, "/v1/chat/completions", asked | {"stream": True}).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        pieces = [chunk["choices"][0]["delta"] for chunk in chunks]
        end = chunks[-1]["choices"][0]["finish_reason"]
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        for call in piece.get("tool_calls") or ():
            whole = calls.setdefault(call.get("index", 0), ["", ""])
            whole[0] += call["function"].get("name") or ""
            whole[1] += call["function"]["arguments"]
    return Said(
        "".join(piece.get("reasoning") or "" for piece in pieces),
        "".join(piece.get("content") or "" for piece in pieces),
        [(name, json.loads(arguments)) for name, arguments in calls.values()],
        end,
    )


def responses(client: httpx.Client, stream: bool) -> Said:
    asked = {
        "input": QUESTION,
        "tools": [
            {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": MOST,
    }
    if not stream:
        response = post(client, "/v1/responses", asked).json()
    else:
        events = events_of(post(client, "/v1/responses", asked | {"stream": True}).text)
        response = events[-1]["response"]
        kind = "response.function_call_arguments.delta"
        deltas = "".join(event["delta"] for event in events if event["type"] == kind)
        assert deltas == response["output"][-1]["arguments"]
    said = Said("", "", [], response["status"])
    for item in response["output"]:
        match item["type"]:
            case "reasoning":
                said.thoughts += item["content"][0]["text"]
            case "message":
                said.content += item["content"][0]["text"]
            case "function_call":
                said.calls.append((item["name"], json.loads(item["arguments"])))
    return said


def messages(client: httpx.Client, stream: bool) -> Said:
    asked = {
        "messages": QUESTION,
        "tools": [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "temperature": 0,
        "max_tokens": MOST,
    }
    if not stream:
        message = post(client, "/v1/messages", asked).json()
        blocks, end = message["content"], message["stop_reason"]
    else:
        events = events_of(post(client, "/v1/messages", asked | {"stream": True}).text)
        blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        for event in events:
            if event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for key in ("text", "thinking"):
                    block[key] = block.get(key, "") + delta.get(key, "")
                block["json"] = block.get("json", "") + delta.get("partial_json", "")
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"])
        assert events[-1]["type"] == "message_stop", events[-1]
        end = events[-2]["delta"]["stop_reason"]
    return Said(
        "".join(block.get("thinking", "") for block in blocks),
        "".join(block.get("text", "") for block in blocks),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        end,
    )


def ollama(client: httpx.Client, stream: bool) -> Said:
    """This API cannot require a call: here the model may give an answer of a format instead."""
    function = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
    asked = {
        "messages": QUESTION,
        "tools": [{"type": "function", "function": function}],
        "format": NEVER,
        "stream": stream,
        "options": {"temperature": 0, "num_predict": MOST},
    }
    lines = [json.loads(line) for line in post(client, "/api/chat", asked).text.splitlines()]
    said = Said("", "", [], lines[-1]["done_reason"])
    for line in lines:
        said.thoughts += line["message"].get("thinking", "")
        said.content += line["message"]["content"]
        calls = [call["function"] for call in line["message"].get("tool_calls", ())]
        said.calls += [(call["name"], call["arguments"]) for call in calls]
    return said


APIS: list[tuple[Api, str]] = [
    (chat, "tool_calls"),
    (responses, "completed"),
    (messages, "tool_use"),
    (ollama, "stop"),
]
"""With what each says of an answer that ends with calls."""


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def events_of(text: str) -> list[Any]:
    return [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n")[:-1]]


@contextmanager
def speaking(relay: Relay, *flags: str) -> Iterator[httpx.Client]:
    """A client of one more router over the same workers."""
    roles = ("tokenizer", "prefill", "decode", "detokenizer")
    known = {role: [each["grpc"] for each in relay.processes(role)] for role in roles}
    token = json.loads(relay.state_file.read_text())["token"]
    listen = ("--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, "-m", "batonlm.router", "--log-level", "error", *listen, *flags]
        + [part for role, found in known.items() for part in (f"--{role}s", ",".join(found))],
        env=relay.environment | {"BATON_PEER_TOKEN": token},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        base = f"http://{json.loads(process.stdout.readline())['http']}"
        with httpx.Client(base_url=base, timeout=PATIENCE_S, trust_env=False) as client:
            eventually(lambda: client.get("/health").is_success, PATIENCE_S, "the router is ready")
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        process.stdout.close()


def check(client: httpx.Client, *, thinks: bool) -> None:
    found = []
    for api, end in APIS:
        whole, streamed = api(client, False), api(client, True)
        assert whole == streamed, api.__name__
        name, arguments = whole.calls[0]
        assert name == NAME
        validate(arguments, PARAMETERS)
        # Where it cannot be bound to one call, the model may go on until the answer is full.
        if len(whole.calls) == 1 or api is not ollama:
            assert whole.end == end and len(whole.calls) == 1 and not whole.content.strip()
        assert bool(whole.thoughts) is thinks
        found.append((whole.thoughts, whole.calls))
    # The same prompt, greedily followed by the same grammar.
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "form",
    [
        *("qwen3_coder", "llama3_json"),
        *(pytest.param(form, marks=pytest.mark.deep) for form in ("deepseek_v31", "harmony")),
    ],
)
def test_a_call_over_every_api(relay: Relay, form: str) -> None:
    with speaking(relay, "--tool-format", form) as client:
        check(client, thinks=False)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """A model that reasons: the bundled one, whose answers begin and end with other tokens."""
    folder = tmp_path_factory.mktemp("thinking")
    model = folder / "baton-tiny-thinking"
    shutil.copytree(MODEL, model)
    for file, changes in {
        "tokenizer.json": [('"<|assistant|>"', '"<think>"'), ('"<|end|>"', '"</think>"')],
        "tokenizer_config.json": [('"<|end|>"', '"<pad>"')],
        "config.json": [('"eos_token_id": 2', '"eos_token_id": 0')],
        "generation_config.json": [('"eos_token_id": 2', '"eos_token_id": 0')],
        "chat_template.jinja": [("'<|assistant|>'", "'<think>'"), ("eos_token", "'</think>'")],
    }.items():
        text = (model / file).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (model / file).write_text(text)
    relay = Relay(folder, "--model", str(model))
    yield relay
    relay.close()


@pytest.mark.deep
@pytest.mark.parametrize("form", ["glm45", "deepseek_v3", "kimi_k2"])
def test_a_call_after_reasoning_over_every_api(thinking: Relay, form: str) -> None:
    with speaking(thinking, "--tool-format", form) as client:
        check(client, thinks=True)
