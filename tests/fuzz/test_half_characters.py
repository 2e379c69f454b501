"""Half a character (a lone surrogate), spelled as an escape wherever a client's text is JSON or is
read as JSON later: refused as the client's fault, or of no effect, and never a fault of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from batonlm.rpc.address import split
from batonlm.v1 import inference_pb2, tokenizer_pb2, types_pb2
from tests.e2e.relay import PATIENCE_S
from tests.fuzz.calls import check, send
from tests.fuzz.http_requests import HEADERS, Sent, exchange, request
from tests.fuzz.rpcs import all_rpcs
from tests.fuzz.target import Target
from tests.fuzz.test_http import check as check_answer

pytestmark = pytest.mark.deep

HALF = "\ud800"
ESCAPE = r"\ud800"
"""As characters of their own: what a JSON text spells half a character with."""
NESTED = json.dumps({"a": [{"b": HALF}]})
USER = {"role": "user", "content": "hi"}
SHOWS_ALL = (
    "{{ messages | map(attribute='content') | join }}"
    "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    "{{ tools | tojson }}"
)
CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"

CHATS: Mapping[str, Mapping[str, Any]] = {
    "a message's role": {"messages": [{**USER, "role": HALF}]},
    "a message": {"messages": [{**USER, "content": HALF}]},
    "a part of a message": {
        "messages": [{**USER, "content": [{"type": "text", "text": f"a{HALF}"}]}]
    },
    "a speaker's name": {"messages": [{**USER, "name": HALF}]},
    "what an assistant thought": {
        "messages": [{"role": "assistant", "content": "a", "reasoning_content": HALF}, USER]
    },
    "the same by its other name": {
        "messages": [{"role": "assistant", "content": "a", "reasoning": HALF}, USER]
    },
    "the id of a call": {
        "messages": [USER, {"role": "tool", "tool_call_id": HALF, "content": "1"}]
    },
    "a key of a message that nobody knows": {"messages": [{**USER, "x": HALF, HALF: 1}]},
    "a template": {"chat_template": HALF},
    "a literal of a template": {"chat_template": '{{ "' + ESCAPE + '" }}'},
    "a template's own number of a character": {"chat_template": '{{ "%c" | format(55296) }}'},
    "a template's variable": {"chat_template_kwargs": {"a": HALF}},
    "deep in a template's variable": {"chat_template_kwargs": {"a": [{"b": HALF}]}},
    "the name of a template's variable": {"chat_template_kwargs": {HALF: 1}},
    "a tool's name": {"tools": [{"type": "function", "function": {"name": HALF}}]},
    "a tool's type": {"tools": [{"type": HALF, "function": {"name": "f"}}]},
    "a tool's description": {
        "tools": [{"type": "function", "function": {"name": "f", "description": HALF}}]
    },
    "a value in a tool's schema": {
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {"a": {"const": HALF}}}},
            }
        ]
    },
    "a key in a tool's schema": {
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {HALF: {}}}},
            }
        ]
    },
    "a choice of a tool": {"tool_choice": HALF},
    "a choice by name": {"tool_choice": {"type": "function", "function": {"name": HALF}}},
    "the model": {"model": HALF},
    "a user": {"user": HALF},
    "metadata": {"metadata": {"a": HALF, HALF: "a"}},
    "a name that nobody knows": {HALF: 1},
    "a stop string": {"stop": HALF},
    "one of the stop strings": {"stop": ["a", HALF]},
    "a salt": {"cache_salt": HALF},
    "a request's id": {"request_id": HALF},
    "a bias": {"logit_bias": {HALF: 1.0}},
    "the side of truncation": {"truncation_side": HALF},
    "a form's type": {"response_format": {"type": HALF}},
    "a schema's name": {
        "response_format": {"type": "json_schema", "json_schema": {"name": HALF, "schema": {}}}
    },
    "a schema's description": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "description": HALF, "schema": {}},
        }
    },
    "a value in a schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": HALF}}}
    },
    "a key in a schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"properties": {HALF: {}}}},
        }
    },
    "a schema as text": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": json.dumps({"const": HALF})},
        }
    },
    "vLLM's schema": {"structured_outputs": {"json": {"enum": [HALF]}}},
    "vLLM's schema as text": {"structured_outputs": {"json": json.dumps({"enum": [HALF]})}},
    "a regular expression": {"structured_outputs": {"regex": HALF}},
    "half a character in words of regular expressions": {
        "structured_outputs": {"regex": r"\x{D800}"}
    },
    "a text to choose": {"structured_outputs": {"choice": [HALF]}},
    "a grammar": {"structured_outputs": {"grammar": f'start: "{HALF}"'}},
    "a literal of a grammar": {"structured_outputs": {"grammar": f'start: "{ESCAPE}"'}},
    "a schema in a grammar": {
        "structured_outputs": {"grammar": f'start: %json {{"const": "{ESCAPE}"}}'}
    },
}


def calling(name: str = "f", arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


CALLS = {
    "its id": calling(call_id=HALF),
    "its name": calling(name=HALF),
    "its arguments": calling(arguments=HALF),
    "arguments that are a text": calling(arguments=json.dumps(HALF)),
    "deep in its arguments": calling(arguments=NESTED),
    "a key of its arguments": calling(arguments=json.dumps({HALF: 1})),
    "the other half": calling(arguments=json.dumps({"a": "\udfff"})),
    "halves the wrong way round": calling(arguments=json.dumps({"a": "\ude00\ud83d"})),
}


@pytest.fixture(scope="module", autouse=True)
def unharmed(target: Target) -> Iterator[None]:
    """Once for the whole table: no traceback was logged, nobody died, nothing is held."""
    yield
    target.check()


def posted(target: Target, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    address = split(target.relay.http.removeprefix("http://"), "http")
    raw = json.dumps(body).encode()
    (answer,) = exchange(address, Sent(request(b"POST", path, HEADERS[:1], raw), whole=True))
    check_answer(answer)
    document: dict[str, Any] = json.loads(answer.body)
    return answer.status, document.get("error", {})


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
@pytest.mark.parametrize("where", CHATS)
def test_in_a_chat(target: Target, path: str, where: str) -> None:
    body = {"messages": [USER], "chat_template": SHOWS_ALL, "max_tokens": 1, **CHATS[where]}
    status, _ = posted(target, path, body)
    assert status == 400 or path == TOKENIZE


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
@pytest.mark.parametrize("where", CALLS)
def test_in_a_call_that_was_made(target: Target, path: str, where: str) -> None:
    body = {"messages": [USER, CALLS[where], USER], "chat_template": SHOWS_ALL, "max_tokens": 1}
    status, error = posted(target, path, body)
    assert status == 400
    if HALF not in json.dumps(CALLS[where], ensure_ascii=False):  # the body itself is JSON
        assert error["param"] == "messages[1].tool_calls[0].arguments"


@pytest.mark.parametrize("prompt", [HALF, ["a", HALF]])
def test_in_a_prompt(target: Target, prompt: str | list[str]) -> None:
    assert posted(target, TEXT, {"prompt": prompt, "max_tokens": 1})[0] == 400
    assert posted(target, TOKENIZE, {"prompt": prompt})[0] == 400


def rpc_message(form: Mapping[str, Any] = {}, **parts: Any) -> inference_pb2.ChatRequest:
    messages = [tokenizer_pb2.ChatMessage(role="user", content="hi")]
    options = inference_pb2.GenerationOptions(
        stop=types_pb2.StopParams(max_tokens=1),
        structured_output=inference_pb2.StructuredOutput(**form),
    )
    return inference_pb2.ChatRequest(
        messages=parts.pop("messages", messages), options=options, **parts
    )


CALLED = types_pb2.ToolCall(id="c1", name="f", arguments=NESTED)
TOOL = types_pb2.Tool(name="f", parameters=json.dumps({"properties": {"a": {"const": HALF}}}))
KEYED = types_pb2.Tool(name="f", parameters=json.dumps({"properties": {HALF: {}}}))
REQUIRED = inference_pb2.ToolChoice(use=inference_pb2.ToolChoice.USE_REQUIRED)
CHAT_OF_CALLS = [
    tokenizer_pb2.ChatMessage(role="user", content="hi"),
    tokenizer_pb2.ChatMessage(role="assistant", tool_calls=[CALLED]),
]
INFERENCE = "/baton.v1.Inference/Chat"
ENCODE = "/baton.v1.Tokenizer/Encode"


def encoding(chat: tokenizer_pb2.Chat) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(inputs=[tokenizer_pb2.EncodeInput(chat=chat)])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (INFERENCE, rpc_message(messages=CHAT_OF_CALLS)),
        (INFERENCE, rpc_message(tools=[TOOL])),
        (INFERENCE, rpc_message(tools=[KEYED], tool_choice=REQUIRED)),
        (INFERENCE, rpc_message({"json_schema": json.dumps({"const": HALF})})),
        (INFERENCE, rpc_message({"json_schema": json.dumps({"properties": {HALF: {}}})})),
        (INFERENCE, rpc_message({"regex": r"\x{D800}"})),
        (INFERENCE, rpc_message({"lark": f'start: "{ESCAPE}"'})),
        (INFERENCE, rpc_message({"lark": f'start: %json {{"const": "{ESCAPE}"}}'})),
        (INFERENCE, rpc_message({"gbnf": f'root ::= "{ESCAPE}"'})),
    ],
)
def test_over_grpc(target: Target, path: str, message: Message) -> None:
    assert sent(target, path, message) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "chat",
    [
        tokenizer_pb2.Chat(messages=CHAT_OF_CALLS, template=SHOWS_ALL),
        tokenizer_pb2.Chat(messages=CHAT_OF_CALLS[:1], tools=[TOOL, KEYED], template=SHOWS_ALL),
        tokenizer_pb2.Chat(messages=CHAT_OF_CALLS, template_kwargs=NESTED),
    ],
)
def test_a_tokenizer_asked_directly(target: Target, chat: tokenizer_pb2.Chat) -> None:
    """What a router checks before it asks: a tokenizer takes no router's word for it."""
    assert sent(target, ENCODE, encoding(chat)) is grpc.StatusCode.OK


def sent(target: Target, path: str, message: Message) -> grpc.StatusCode:
    rpc = next(rpc for rpc in all_rpcs() if rpc.path == path)
    channel = target.serving(rpc.service)[0].channel
    outcome = send(channel, rpc, [message.SerializeToString()], PATIENCE_S)
    check(rpc, outcome)
    return outcome.code
