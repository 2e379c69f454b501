"""Input that no one should send: each is a client error that names the field, and costs nothing."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batonlm.router.api.http.schema import REFUSED, ChatBody, CompletionBody
from tests.services.router_http.scripted import MODEL, Scripted

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hello"}
JSON = {"content-type": "application/json"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", **fields}).encode()


async def refusal(http: httpx.AsyncClient, path: str, body: bytes) -> tuple[int, str | None]:
    """Status and param; every error has the four fields of OpenAI's errors and an id."""
    response = await http.post(path, content=body, headers=JSON)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "retryable"}
    assert error["retryable"] is False
    assert error["message"] and error["type"]
    assert response.headers["x-request-id"]
    if error["param"]:
        assert error["message"].startswith(error["param"]) or error["code"]
    return response.status_code, error["param"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "messages"),
        (chat(messages=[]), "messages"),
        (chat(messages=None), "messages"),
        (chat(messages="hello"), "messages"),
        (chat(messages=[1]), "messages[0]"),
        (chat(messages=[{"content": "x"}]), "messages[0].role"),
        (chat(messages=[USER, {"role": "wizard", "content": "x"}]), "messages[1].role"),
        (chat(messages=[{"role": "user"}]), "messages[0].content"),
        (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content[0]",
        ),
        (
            chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]),
            "messages[0].tool_calls[0].id",
        ),
        (chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
        (chat(temperature=-1), "temperature"),
        (chat(temperature="hot"), "temperature"),
        (chat(temperature=float("nan")), "temperature"),
        (chat(top_p=float("inf")), "top_p"),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":1e400}', "temperature"),
        (chat(logit_bias={"5": float("-inf")}), "logit_bias"),
        (chat(logit_bias={"x": 1}), "logit_bias"),
        (chat(logit_bias={"5": 101}), "logit_bias"),
        (chat(logit_bias={"-5": 1}), "logit_bias"),
        (chat(n=10_000), "n"),
        (chat(n=0), "n"),
        (chat(n=1.5), "n"),
        (chat(n=True), "n"),
        (chat(n=10**30), "n"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens="9"), "max_tokens"),
        (chat(max_completion_tokens=-1), "max_completion_tokens"),
        (chat(min_tokens=5, max_tokens=4), "min_tokens"),
        (chat(top_k=-2), "top_k"),
        (chat(min_p=2), "min_p"),
        (chat(seed=2**64), "seed"),
        (chat(seed=-(2**63) - 1), "seed"),
        (chat(stop=["x"] * 9), "stop"),
        (chat(stop=""), "stop"),
        (chat(stop=[1]), "stop[0]"),
        (chat(stop_token_ids=[-1]), "stop_token_ids"),
        (chat(logprobs=1), "logprobs"),
        (chat(top_logprobs=3), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={}), "stream_options"),
        (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (chat(continue_final_message=True), "continue_final_message"),
        (chat(model=5), "model"),
        (chat(model="m" * 300), "model"),
        (chat(cache_salt="s" * 2000), "cache_salt"),
        (chat(speculation="perhaps"), "speculation"),
        (chat(echo=True), "echo"),
        (chat(prompt_logprobs=21), "prompt_logprobs"),
        (chat(prompt_logprobs=1, stream=True), "prompt_logprobs"),
        (chat(chat_template="x" * 70_000), "chat_template"),
        (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
        (chat(allowed_token_ids=[-1]), "allowed_token_ids"),
        (chat(bad_words=["x"]), "bad_words"),
        (chat(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (chat(truncation_side="top"), "truncation_side"),
        (chat(request_id="two words"), "request_id"),
        (chat(tools=[{"type": "function"}]), "tools[0].function"),
        (chat(tools=[{"type": "custom", "function": {"name": "f"}}]), "tools[0].type"),
        (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].name"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(tool_choice="sometimes"), "tool_choice"),
        (chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
        (chat(tool_choice={"type": "allowed_tools"}), "tool_choice"),
        (chat(functions=[{"name": "f"}]), "functions"),
        (chat(function_call={"name": "f"}), "function_call"),
        (chat(response_format={"type": "yaml"}), "response_format.type"),
        (chat(response_format={}), "response_format.type"),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
        (
            chat(response_format={"type": "json_schema", "json_schema": {"schema": "no"}}),
            "response_format.json_schema.schema",
        ),
        (
            chat(response_format={"type": "json_schema", "json_schema": {"schema": "s" * 200_000}}),
            "response_format.json_schema.schema",
        ),
        (chat(structured_outputs={"json": "[1"}), "structured_outputs.json"),
        (chat(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
        (chat(structured_outputs={"regex": ""}), "structured_outputs.regex"),
        (chat(structured_outputs={"choice": []}), "structured_outputs.choice"),
        (chat(structured_outputs={"choice": ["a", ""]}), "structured_outputs.choice"),
        (chat(structured_outputs={"structural_tag": "{}"}), "structured_outputs"),
    ],
)
async def test_chat_names_the_field(
    http: httpx.AsyncClient, frontend: Scripted, body: bytes, param: str
) -> None:
    assert await refusal(http, CHAT, body) == (400, param)
    assert frontend.seen == []


@pytest.mark.deep
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "prompt"),
        (completion(prompt=""), "prompt"),
        (completion(prompt=[]), "prompt"),
        (completion(prompt=[[]]), "prompt"),
        (completion(prompt=["x", ""]), "prompt"),
        (completion(prompt=None), "prompt"),
        (completion(prompt=5), "prompt"),
        (completion(prompt={"text": "x"}), "prompt"),
        (completion(prompt=["x", 5]), "prompt"),
        (completion(prompt=[[1], "x"]), "prompt"),
        (completion(prompt=[1, -1]), "prompt"),
        (completion(prompt=[[2**31]]), "prompt"),
        (completion(prompt=[[1, "x"]]), "prompt[0][1]"),
        (completion(prompt=["x"] * 129), "prompt"),
        (completion(prompt=["x"] * 16, n=9), "prompt"),
        (completion(max_tokens=0), "max_tokens"),
        (completion(echo=1), "echo"),
        (completion(echo=True, logprobs=21), "logprobs"),
        (completion(suffix="end"), "suffix"),
        (completion(best_of=2), "best_of"),
        (completion(logprobs=-1), "logprobs"),
        (completion(logprobs=21), "logprobs"),
        (completion(logprobs=True), "logprobs"),
        (completion(use_beam_search=True), "use_beam_search"),
        (completion(prompt_logprobs=-1), "prompt_logprobs"),
    ],
)
async def test_completions_name_the_field(
    http: httpx.AsyncClient, frontend: Scripted, body: bytes, param: str
) -> None:
    assert await refusal(http, COMPLETIONS, body) == (400, param)
    assert frontend.seen == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'messages': []}",
        b"null",
        b"[]",
        b'"x"',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"extra": NaN' + b"[" * 100_000,
        b'{"\\ud800": NaN}',
        b'{"messages": []} trailing',
        b"\x00" * 100,
    ],
)
async def test_what_is_no_json_object_names_no_field(
    http: httpx.AsyncClient, frontend: Scripted, body: bytes
) -> None:
    assert await refusal(http, CHAT, body) == (400, None)
    assert frontend.seen == []


async def test_deep_nesting_is_refused(http: httpx.AsyncClient, frontend: Scripted) -> None:
    """How deep a parser follows depends on the interpreter; only then does the field get a name."""
    body = b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
    status, param = await refusal(http, CHAT, body)
    assert status == 400
    assert param in (None, "messages[0]")
    assert frontend.seen == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_of_two_megabytes(http: httpx.AsyncClient, path: str) -> None:
    body = chat(messages=[{"role": "user", "content": "x" * (2 << 20)}])
    assert await refusal(http, path, body) == (413, None)


async def test_a_body_of_two_megabytes_without_a_length(http: httpx.AsyncClient) -> None:
    async def pieces() -> Any:
        for _ in range(32):
            yield b" " * (64 << 10)

    response = await http.post(CHAT, content=pieces(), headers=JSON)
    assert response.status_code == 413


async def test_a_body_just_within_the_limit_passes(http: httpx.AsyncClient) -> None:
    body = chat(max_tokens=1)
    padded = body + b" " * ((1 << 20) - len(body))
    assert (await http.post(CHAT, content=padded, headers=JSON)).status_code == 200
    assert (await http.post(CHAT, content=padded + b" ", headers=JSON)).status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({}, 200),
    ],
)
async def test_content_types(http: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    response = await http.post(CHAT, content=chat(), headers=headers)
    assert response.status_code == status


async def test_unknown_routes_and_methods(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "no route /v1/nothing;" in missing.json()["error"]["message"]
    near = await http.post("/v1/chat/completion", content=b"{}", headers=JSON)
    assert "no route /v1/chat/completion; the nearest is /v1/chat/completions" in near.text
    wrong = await http.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]
    assert "does not take GET; it takes POST" in wrong.text
    assert (await http.post("/v1/models")).status_code == 405


async def test_null_means_absent_for_every_parameter(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    for path, body, kind in ((CHAT, chat, ChatBody), (COMPLETIONS, completion, CompletionBody)):
        names = {*kind.__struct_encode_fields__, *REFUSED} - {"messages", "prompt"}
        response = await http.post(path, content=body(**dict.fromkeys(names)), headers=JSON)
        assert response.status_code == 200
        assert "x-baton-ignored-params" not in response.headers
        plain = await http.post(path, content=body(), headers=JSON)
        assert plain.status_code == 200
    assert frontend.seen[0] == frontend.seen[1] and frontend.seen[2] == frontend.seen[3]


async def test_parameters_without_effect_are_named(http: httpx.AsyncClient) -> None:
    body = chat(user="me", metadata={"a": 1}, kv_transfer_params={"x": 1}, tools=[], store=None)
    response = await http.post(CHAT, content=body, headers=JSON)
    assert response.headers["x-baton-ignored-params"] == "kv_transfer_params, metadata, user"


async def test_names_of_parameters_cannot_forge_headers(http: httpx.AsyncClient) -> None:
    names = {"a\r\nx-evil": 1, "é": 1, "": 1, "x" * 65: 1, "fine": 1}
    response = await http.post(CHAT, content=chat(**names), headers=JSON)
    assert response.headers["x-baton-ignored-params"] == "fine, and 4 more"
    many = chat(**{f"p{i:04}": 1 for i in range(5000)})
    response = await http.post(CHAT, content=many, headers=JSON)
    assert response.headers["x-baton-ignored-params"].endswith("p0031, and 4968 more")


numbers = st.integers() | st.floats() | st.integers(-2, 20) | st.floats(-2, 2)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=20) | st.just(MODEL.name)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5"]), inner)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": values}),
    max_size=3,
)
names = st.sampled_from(
    sorted(
        {
            *ChatBody.__struct_encode_fields__,
            *CompletionBody.__struct_encode_fields__,
            *REFUSED,
            "user",
        }
    )
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(names, values, max_size=6),
    start=st.fixed_dictionaries({"messages": messages, "prompt": values}),
    path=st.sampled_from([CHAT, COMPLETIONS]),
)
async def test_any_json_object_gets_an_answer_or_a_client_error(
    http: httpx.AsyncClient, fields: dict[str, Any], start: dict[str, Any], path: str
) -> None:
    body = json.dumps(start | fields).encode()
    response = await http.post(path, content=body, headers=JSON)
    assert response.status_code == 200 or 400 <= response.status_code < 500
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json().keys() & {"choices", "error"}


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=200))
async def test_any_bytes_get_a_client_error(http: httpx.AsyncClient, body: bytes) -> None:
    status, _ = await refusal(http, CHAT, body)
    assert 400 <= status < 500
