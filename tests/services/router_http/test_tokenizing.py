"""/tokenize and /detokenize as vLLM words them, and paths with and without the version."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from batonlm.core.request.request import ChatPrompt, TextPrompt, TokenPrompt
from tests.services.router_http.scripted import MODEL, Scripted


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_a_text_as_tokens(http: httpx.AsyncClient, frontend: Scripted, path: str) -> None:
    body = {"model": MODEL.name, "prompt": "ab", "add_special_tokens": False}
    answer = await http.post(path, json=body)
    assert answer.json() == {
        "count": 2,
        "max_model_len": MODEL.max_model_len,
        "tokens": [97, 98],
        "token_strs": None,
    }
    named = await http.post(path, json=body | {"return_token_strs": True, "extra": 1})
    assert named.json()["token_strs"] == ["<97>", "<98>"]
    assert named.headers["x-baton-ignored-params"] == "extra"
    assert frontend.seen[0].prompt == TextPrompt("ab", add_special_tokens=False)


async def test_a_conversation_as_tokens(http: httpx.AsyncClient, frontend: Scripted) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = await http.post("/tokenize", json=body)
    assert bytes(answer.json()["tokens"]).decode() == "<user>hi"
    prompt = frontend.seen[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert not prompt.add_generation_prompt
    assert prompt.template_kwargs == '{"enable_thinking":false}'


async def test_tokens_as_text(http: httpx.AsyncClient, frontend: Scripted) -> None:
    answer = await http.post("/detokenize", json={"model": MODEL.name, "tokens": [97, 98]})
    assert answer.json() == {"prompt": "ab"}
    assert frontend.seen[0].prompt == TokenPrompt((97, 98))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "m" * 300}, "model"),
    ],
)
async def test_bad_input_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param) or param == "prompt"


async def test_paths_with_and_without_the_version(http: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (("chat/completions", chat), ("completions", {"prompt": "x"})):
        answers = [await http.post(prefix + path, json=body) for prefix in ("/v1/", "/")]
        texts = [answer.json()["choices"] for answer in answers]
        assert texts[0] == texts[1]
    for path in ("models", f"models/{MODEL.name}"):
        told = [(await http.get(prefix + path)).json() for prefix in ("/v1/", "/")]
        assert told[0] == told[1]


@pytest.mark.parametrize(
    "path", ["/metrics", "/health", "/version", "/v1/models", "/docs", "/openapi.json"]
)
async def test_head(http: httpx.AsyncClient, path: str) -> None:
    head, whole = await http.head(path), await http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
