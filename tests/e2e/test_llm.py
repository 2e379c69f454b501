"""`batonlm.LLM` gives the answers of `baton up` to the same requests, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from batonlm import LLM
from batonlm.client import Answer, Client
from batonlm.core.request.request import Delta, Tool
from tests.e2e.relay import Relay

# The workers need the cores, too.
torch.set_num_threads(1)

PROMPTS: list[str | list[int]] = [
    "The capital of France is",
    "Once upon a time",
    "1 + 1 =",
    [5, 6, 7],
    [3 + i % 400 for i in range(70)],
    [3 + i % 400 for i in range(600)],
]
SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"integer","minimum":0,"maximum":99},'
    '"b":{"enum":["x","y"]}},"required":["a","b"],"additionalProperties":false}'
)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "top_p": 0.95, "top_k": 40, "seed": 7},
    "two choices": {"temperature": 1.0, "seed": 2**60 + 1, "n": 2},
    "log-probabilities": {"temperature": 0.8, "seed": 3, "top_logprobs": 2},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "logit_bias": {19: -5.0},
    },
    "stop strings": {"temperature": 0.9, "seed": 5, "stop": ["e", " th", "a t"], "n": 2},
    "a stop string that stays": {
        "temperature": 0.9,
        "seed": 6,
        "stop": "e",
        "include_stop_string": True,
        "min_tokens": 6,
        "top_logprobs": 0,
    },
    "stop tokens": {"temperature": 1.0, "seed": 8, "stop_token_ids": list(range(280, 344))},
    "all tokens in text": {"temperature": 0.0, "keep_special_tokens": True},
    "a schema": {"temperature": 1.0, "seed": 9, "json_schema": SCHEMA},
    "a regular expression": {"temperature": 1.0, "seed": 10, "regex": "[a-f]{3,9}-[0-9]+"},
}
OFTEN = {"greedy", "two choices", "stop strings", "a schema"}
"""Cases of the default tests."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory_mib=64, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(relay: Relay) -> Iterator[Client]:
    with Client(relay.description["grpc"], timeout_s=120) as opened:
        yield opened


def content(answer: Answer) -> tuple[list[Delta], int, int, int]:
    """What does not depend on where it ran. A drawn seed does, where none was given."""
    choices = [replace(choice, token_ids=tuple(choice.token_ids)) for choice in answer.choices]
    finished = answer.finished
    return (
        choices,
        answer.accepted.prompt_tokens,
        finished.completion_tokens,
        finished.reasoning_tokens,
    )


@pytest.mark.parametrize(
    "case",
    [case if case in OFTEN else pytest.param(case, marks=pytest.mark.deep) for case in CASES],
)
def test_generate(llm: LLM, client: Client, case: str) -> None:
    options: Any = {"max_tokens": 40, "return_token_ids": True, **CASES[case]}
    if "stop" in options:
        # Where the text ends must not depend on the model's own end.
        options["ignore_eos"] = True

    def ask(prompt: str | list[int]) -> Answer:
        return client.generate(prompt, **options).read()

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        right = [content(answer) for answer in pool.map(ask, PROMPTS)]
    assert [content(answer) for answer in llm.generate(PROMPTS, **options)] == right
    # Once more: now every prompt is in the prefix cache.
    again = llm.generate(PROMPTS, **options)
    assert [content(answer) for answer in again] == right
    assert again[-1].finished.cached_tokens >= 512
    if "stop" in options:
        assert any(choice.stop_string for choices, *_ in right for choice in choices)


def test_chat(llm: LLM, client: Client) -> None:
    questions = ["What is the capital of France?", "Who are you?", "What is 2 + 2?"]
    options: Any = {"max_tokens": 40, "return_token_ids": True, "temperature": 0.7, "seed": 11}
    right = [content(client.chat(question, **options).read()) for question in questions]
    assert [content(answer) for answer in llm.chat(questions, **options)] == right


def test_chat_with_tools(llm: LLM, client: Client) -> None:
    weather = Tool(
        "get_weather",
        "The weather in a city.",
        '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}',
    )
    options: Any = {"max_tokens": 60, "return_token_ids": True, "temperature": 0.0}
    for question in ("What is the weather in Paris?", "Hello"):
        right = client.chat(question, tools=[weather], **options).read()
        (answer,) = llm.chat(question, tools=[weather], **options)
        # The ids of calls depend on the seed, which is drawn.
        given = llm.chat_request(question, tools=[weather], **options)
        (seeded,) = llm.answers([replace(given, seed=right.accepted.seed)])
        assert content(seeded) == content(right)
        assert answer.choices[0].token_ids == tuple(right.choices[0].token_ids)
