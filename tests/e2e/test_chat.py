"""The bundled model answers over every public door, with the same text."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import openai
import pytest

from tests.e2e.relay import Relay, options


@pytest.fixture(scope="module")
def client(relay: Relay) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{relay.http}/v1", api_key="none", max_retries=0)


PROMPTS = [
    "What is the capital of France?",
    "Who are you?",
    "Tell me a story about yourself.",
    "How do you say hello in Japanese?",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_openai_and_grpc_give_the_same_text(
    relay: Relay, client: openai.OpenAI, prompt: str
) -> None:
    over_grpc = relay.chat(prompt, options(max_tokens=64, ignore_eos=False)).text[0]
    messages: Any = [{"role": "user", "content": prompt}]
    whole = client.chat.completions.create(
        model="baton-tiny", messages=messages, temperature=0, max_tokens=64
    )
    streamed: Any = client.chat.completions.create(
        model="baton-tiny", messages=messages, temperature=0, max_tokens=64, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert over_grpc and "\ufffd" not in over_grpc
    assert whole.choices[0].message.content == over_grpc
    assert "".join(pieces) == over_grpc


def test_it_knows_the_capital_of_france(relay: Relay) -> None:
    answer = relay.chat(PROMPTS[0], options(max_tokens=32, ignore_eos=False))
    assert "Paris" in answer.text[0]
    assert answer.finish[0] == 1


@pytest.mark.deep
def test_every_streamed_piece_is_whole_characters(relay: Relay) -> None:
    """Random tokens of a byte-level tokenizer give many broken characters; none is sent twice."""
    prompt = list(range(300, 330))
    wanted = options(max_tokens=200, temperature=2.0, seed=11)
    pieces = [
        response.event.delta.text
        for response in relay.stream(prompt, wanted)
        if response.event.HasField("delta")
    ]
    whole = relay.generate(prompt, wanted).text[0]
    assert "".join(pieces) == whole


def test_four_choices_differ_and_repeat(relay: Relay) -> None:
    prompt = "Lanterns and 17 zebras"  # nothing that the model is sure of
    wanted = options(max_tokens=24, temperature=2.0, seed=7, n=4)
    first, again = relay.generate(prompt, wanted), relay.generate(prompt, wanted)
    assert len({tuple(ids) for ids in first.token_ids.values()}) == 4
    assert first.token_ids == again.token_ids


def test_stop_strings_cut_the_text(relay: Relay) -> None:
    whole = relay.chat(PROMPTS[2], options(max_tokens=64, ignore_eos=False)).text[0]
    stop = whole[20:24]
    cut = relay.chat(PROMPTS[2], options(max_tokens=64, ignore_eos=False, stop=[stop]))
    assert cut.text[0] == whole[: whole.index(stop)]
    assert cut.finish[0] == 1


def test_kv_really_moves(relay: Relay) -> None:
    before = sum(relay.metric(p, "baton_handover_bytes_total") for p in relay.processes("decode"))
    relay.generate(list(range(100, 300)), options(max_tokens=8))
    after = sum(relay.metric(p, "baton_handover_bytes_total") for p in relay.processes("decode"))
    assert after > before


def test_models_and_health(relay: Relay) -> None:
    with urllib.request.urlopen(f"{relay.http}/v1/models") as answer:
        models = json.load(answer)
    assert [m["id"] for m in models["data"]] == ["baton-tiny"]
    with urllib.request.urlopen(f"{relay.http}/health") as answer:
        assert answer.status == 200
