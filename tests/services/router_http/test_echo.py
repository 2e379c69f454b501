"""Prompts in answers: echoed texts, their tokens' log-probabilities, and nothing generated."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from batonlm.core.request.request import TokenPrompt
from tests.services.router_http.scripted import Scripted, whole_answer

COMPLETIONS = "/v1/completions"
ANSWER = whole_answer("ab", 0)


async def completion(http: httpx.AsyncClient, **fields: Any) -> Any:
    response = await http.post(COMPLETIONS, json={"prompt": "ab", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_echo_alone_is_text(http: httpx.AsyncClient, frontend: Scripted) -> None:
    answer = await completion(http, prompt=["ab", "cd"], echo=True, max_tokens=2, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["ab0:", "ab1:", "cd0:", "cd1:"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert all(request.prompt_logprobs is None for request in frontend.seen)


async def test_what_evaluation_harnesses_send(http: httpx.AsyncClient, frontend: Scripted) -> None:
    answer = await completion(
        http, prompt=[[97, 98]], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1
    )
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "ab0"
    assert logprobs["tokens"] == ["a", "b", "0"]
    assert logprobs["token_logprobs"] == [None, -0.98, -0.48]
    assert logprobs["top_logprobs"] == [None, {"A": -0.5, "b": -0.98}, {"A": -0.5, "0": -0.48}]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert "prompt_logprobs" not in choice
    (request,) = frontend.seen
    assert request.prompt == TokenPrompt((97, 98))
    assert (request.prompt_logprobs, request.max_tokens) == (1, 1)


async def test_nothing_is_generated_where_that_is_asked(http: httpx.AsyncClient) -> None:
    answer = await completion(http, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.98]
    assert answer["usage"]["completion_tokens"] == 0
    plain = await completion(http, echo=True, max_tokens=0)
    assert plain["choices"][0]["text"] == "ab"


async def test_an_echo_is_streamed_first(http: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "stream": True, "n": 2}
    text = (await http.post(COMPLETIONS, json=body)).text
    chunks = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
    whole: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        whole[choice["index"]].append(choice)
    for index, choices in whole.items():
        answer = whole_answer("ab", index)
        assert "".join(choice["text"] for choice in choices) == "ab" + answer[:14]
        assert choices[0]["finish_reason"] is None
        assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.98]
        offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets) and offsets[:3] == [0, 1, 2]


async def test_vllms_prompt_logprobs(http: httpx.AsyncClient, frontend: Scripted) -> None:
    answer = await completion(http, prompt_logprobs=2)
    told = answer["choices"][0]["prompt_logprobs"]
    assert told == [
        None,
        {
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"},
            "98": {"logprob": -0.98, "rank": None, "decoded_token": "b"},
        },
    ]
    body = {"messages": [{"role": "user", "content": "é"}], "prompt_logprobs": 0}
    chat = (await http.post("/v1/chat/completions", json=body)).json()
    assert chat["prompt_logprobs"][1] == {
        "117": {"logprob": -1.17, "rank": None, "decoded_token": "u"}
    }
    both = await completion(http, prompt_logprobs=1, echo=True, logprobs=3)
    assert len(both["choices"][0]["prompt_logprobs"][1]) == 2
    assert len(both["choices"][0]["logprobs"]["top_logprobs"][1]) == 4
    assert frontend.seen[-1].prompt_logprobs == 3


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_tokens_can_be_named_by_their_ids(http: httpx.AsyncClient, path: str) -> None:
    chat = path.endswith("chat/completions")
    body: dict[str, Any] = {"max_tokens": 1, "return_tokens_as_token_ids": True, "top_logprobs": 1}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    body |= {"logprobs": True if chat else 1}
    logprobs = (await http.post(path, json=body)).json()["choices"][0]["logprobs"]
    names = [entry["token"] for entry in logprobs["content"]] if chat else logprobs["tokens"]
    assert names == ["token_id:48"]


async def test_a_clients_own_request_id(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, json={"prompt": "ab", "request_id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-baton-request-id"] == "00000001"
    assert response.json()["id"] == "cmpl-00000001"
