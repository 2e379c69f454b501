"""The OpenAPI document says what is so: answers are held against it, and it against the routes."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec
import pytest

from batonlm.core.errors import Overloaded
from batonlm.router.api.http import answer_schema as answers
from tests.core.test_request_history import record
from tests.services.router_http.scripted import MODEL, Scripted

CHAT = {"messages": [{"role": "user", "content": "ab"}]}
ALL = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "n": 2}
CALLS: list[tuple[str, dict[str, Any], type]] = [
    ("/v1/chat/completions", CHAT, answers.ChatCompletion),
    ("/v1/chat/completions", CHAT | ALL, answers.ChatCompletion),
    ("/v1/completions", {"prompt": "ab"}, answers.TextCompletion),
    (
        "/v1/completions",
        {"prompt": ["ab", "c"], "echo": True, **ALL, "logprobs": 2},
        answers.TextCompletion,
    ),
    ("/tokenize", {"prompt": "ab", "return_token_strs": True}, answers.Tokenized),
    ("/tokenize", CHAT, answers.Tokenized),
    ("/detokenize", {"tokens": [97]}, answers.Detokenized),
]


@pytest.mark.parametrize(("path", "body", "kind"), CALLS)
async def test_answers_have_no_other_fields(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], kind: type
) -> None:
    response = await http.post(path, json=body)
    msgspec.json.decode(response.content, type=kind)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT | ALL, answers.ChatCompletionChunk),
        ("/v1/completions", {"prompt": "ab", **ALL, "logprobs": 2}, answers.TextCompletion),
    ],
)
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
async def test_chunks_have_no_other_fields(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], kind: type, options: Any
) -> None:
    asked = body | {"stream": True, "stream_options": options, "prompt_logprobs": None}
    text = (await http.post(path, json=asked)).text
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert chunks
    for chunk in chunks:
        msgspec.json.decode(chunk.removeprefix("data: "), type=kind)


async def test_what_is_told_of_the_server(http: httpx.AsyncClient) -> None:
    for path, kind in (
        ("/v1/models", answers.ModelList),
        (f"/v1/models/{MODEL.name}", answers.ModelAnswer),
        ("/version", answers.Version),
    ):
        msgspec.json.decode((await http.get(path)).content, type=kind)


async def test_errors(http: httpx.AsyncClient, frontend: Scripted) -> None:
    frontend.refusal = Overloaded("busy", retry_after_s=2.0)
    for path, body in (("/v1/nothing", {}), ("/v1/completions", {}), ("/v1/completions", CHAT)):
        refused = await http.post(path, json=body)
        msgspec.json.decode(refused.content, type=answers.ErrorAnswer)
    busy = await http.post("/v1/completions", json={"prompt": "x"})
    msgspec.json.decode(busy.content, type=answers.ErrorAnswer)


async def test_every_path_is_served_and_every_reference_leads_somewhere(
    http: httpx.AsyncClient, frontend: Scripted
) -> None:
    frontend.record = record("known")
    text = (await http.get("/openapi.json")).text
    document = json.loads(text)
    assert document["openapi"].startswith("3.1")
    for path, verbs in document["paths"].items():
        for verb in verbs.keys() & {"get", "post"}:
            path = path.replace("{model}", MODEL.name).replace("{id}", frontend.record.request_id)
            response = await http.request(verb, path, json={})
            # Scripted answers keep no streams, and there are no responses.
            stored = path.startswith(("/v1/streams/", "/v1/responses/")) and "tokens" not in path
            fine = (404,) if stored else (200, 400)
            assert response.status_code in fine, path
            assert "there is no route" not in response.text
    for reference in re.findall(r'"#/([^"]+)"', text):
        found = document
        for part in reference.split("/"):
            found = found[part]
    names = [
        op["operationId"]
        for v in document["paths"].values()
        for op in v.values()
        if "operationId" in op
    ]
    assert len(set(names)) == len(names) == 34


async def test_the_page_needs_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    response = await http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", response.text)
