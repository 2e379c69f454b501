"""`x-baton-timings: true`: where the time went, for those who ask, and nothing for others."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.model import WorkerIdentity
from tests.services.router_http.scripted import Scripted

ASK = {"x-baton-timings": "true"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
WORKERS = (
    WorkerIdentity("prefill", "ab" * 16, "10.0.0.1:7000"),
    WorkerIdentity("decode", "cd" * 16, "10.0.0.2:7000"),
)
TIMES = StageTimes(
    tokenize_s=0.001, prefill_s=0.02, decode_s=0.5, first_token_s=0.03, total_s=0.521,
    prefill_cached_tokens=64, decode_cached_tokens=128, kv_bytes=4096, attempts=1, workers=WORKERS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def timed(frontend: Scripted) -> None:
    frontend.stages = TIMES


def chunks(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def check(told: Any) -> None:
    assert told["stages"] == {
        "tokenize_s": 0.001,
        "turn_s": 0.0,
        "prefill_queue_s": 0.0,
        "prefill_s": 0.02,
        "network_s": 0.0,
        "hand_over_s": 0.0,
        "decode_s": 0.5,
        "detokenize_s": 0.0,
    }
    assert (told["first_token_s"], told["total_s"]) == (0.03, 0.521)
    assert told["cached_tokens"] == {"prefill": 64, "decode": 128}
    assert (told["kv_bytes"], told["attempts"], told["moves"]) == (4096, 1, 0)
    assert told["workers"] == [
        {"role": "prefill", "instance_id": "abababab", "address": "10.0.0.1:7000"},
        {"role": "decode", "instance_id": "cdcdcdcd", "address": "10.0.0.2:7000"},
    ]


async def test_in_one_document(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT, headers=ASK)
    check(answer.json()["baton"])
    timing = answer.headers["server-timing"]
    assert timing.startswith("tokenize;dur=1.000, turn;dur=0.000")
    assert timing.endswith("total;dur=521.000")


@pytest.mark.parametrize("usage", [False, True])
async def test_in_a_stream_it_comes_last(http: httpx.AsyncClient, usage: bool) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": usage}}
    answer = await http.post("/v1/chat/completions", json=body, headers=ASK)
    *others, last = chunks(answer.text)
    check(last["baton"])
    assert last["choices"] == []
    assert bool(last.get("usage")) is usage
    assert not any("baton" in chunk for chunk in others)


async def test_completions_have_one_entry_a_prompt(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": ["a", "b"]}
    answer = await http.post("/v1/completions", json=body, headers=ASK)
    for told in answer.json()["baton"]:
        check(told)
    assert len(answer.json()["baton"]) == 2
    assert "server-timing" not in answer.headers
    streamed = await http.post("/v1/completions", json=body | {"stream": True}, headers=ASK)
    assert len(chunks(streamed.text)[-1]["baton"]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_does_not_ask_gets_nothing(http: httpx.AsyncClient, stream: bool) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert '"baton"' not in answer.text
    assert "server-timing" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_told_against_the_operators_will(
    http: httpx.AsyncClient, frontend: Scripted, stream: bool
) -> None:
    frontend.stages = None
    answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=ASK)
    assert answer.status_code == 200
    assert '"baton"' not in answer.text
