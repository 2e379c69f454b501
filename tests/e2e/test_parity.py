"""Greedy output over five real processes equals `transformers` greedy generate, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batonlm.core.kvcache.prefix import UNIT_TOKENS
from tests import depth, leaks
from tests.e2e.relay import PATIENCE_S, Relay, eventually, options
from tests.engine.tiny_models import ARCHS, OWN, save_tiny_model
from tests.greedy import greedy_tokens

# The workers need the cores; torch here would spin on all of them.
torch.set_num_threads(1)

NEW_TOKENS = 24
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 64, 65, 100, 129, 255, 257, 400, 600)
BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"

MODES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "nixl": (("--transport", "nixl"), {}),
    "nixl, chunks of 37": (("--transport", "nixl"), {"BATON_STEP_TOKENS": "37"}),
    "loopback": (("--transport", "loopback"), {}),
    "loopback, chunks of 37": (("--transport", "loopback"), {"BATON_STEP_TOKENS": "37"}),
    "local prefill": (("--prefill", "0"), {}),
    "drafts": (("--speculation", "ngram"), {}),
    "draft model": (("--speculation", "draft", "--draft-model", str(BUNDLED)), {}),
}
DEFAULT = ("bundled", "nixl")
DEEP = [
    ("gemma3", "loopback, chunks of 37"),
    ("qwen3_moe", "local prefill"),
    ("deepseek_v3", "nixl, chunks of 37"),
    ("bundled", "drafts"),
    ("bundled", "draft model"),
]
# What an architecture can get wrong on its way through the processes is its KV's shape and which
# positions are read, so each meets the odd chunks over NIXL and one other way.
WHOLE = [
    (arch, mode)
    for arch in ("bundled", *ARCHS, *OWN)
    for mode in ("nixl, chunks of 37", "loopback", "local prefill")
]


def prompts(vocab: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, vocab) for _ in range(length)] for length in LENGTHS]


def expected(model: Path, asked: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [greedy_tokens(network, prompt, new_tokens) for prompt in asked]


@pytest.fixture(
    scope="module",
    params=[
        DEFAULT,
        *(pytest.param(case, marks=pytest.mark.deep) for case in DEEP),
        *(pytest.param(case, marks=pytest.mark.slow) for case in WHOLE),
    ],
    ids=lambda case: ", ".join(case),
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Relay, Path, str]]:
    arch, mode = request.param
    if request.param == DEFAULT and not depth.DEEP:
        # One Baton fewer to start.
        relay = request.getfixturevalue("relay")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(leaks.SHARED, "running", relay)
            yield relay, BUNDLED, mode
        return
    flags, variables = MODES[mode]
    folder = tmp_path_factory.mktemp("parity")
    model = BUNDLED if arch == "bundled" else save_tiny_model(arch, folder / arch)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        relay = Relay(folder, "--model", str(model), *flags)
    yield relay, model, mode
    relay.close()


def test_sixteen_at_once(running: tuple[Relay, Path, str]) -> None:
    relay, model, mode = running
    asked = prompts(400)
    right = expected(model, asked)
    router = relay.processes("router")[0]
    before = relay.metric(router, "baton_kv_bytes_total")
    retried = relay.metric(router, "baton_retries_total")

    def ask(prompt: list[int]) -> list[int]:
        return relay.generate(prompt, options(max_tokens=NEW_TOKENS)).token_ids[0]

    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(ask, asked)) == right
        # Once more: now every prompt is in the prefix caches.
        assert list(pool.map(ask, asked)) == right
    moved = relay.metric(router, "baton_kv_bytes_total") - before
    assert (moved > 0) == (mode != "local prefill")
    assert relay.metric(router, "baton_retries_total") == retried
    assert relay.generate(asked[-1], options(max_tokens=1)).finished is not None


def test_a_prefix_hit_is_reported(running: tuple[Relay, Path, str]) -> None:
    relay, _, _ = running
    prompt = prompts(400)[-1]
    wanted = options(max_tokens=4)
    relay.generate(prompt, wanted)
    finished = relay.generate(prompt, wanted).finished
    assert finished is not None
    assert finished.cached_tokens >= 512


def test_what_decode_has_of_a_prompt_is_not_prefilled_elsewhere(
    running: tuple[Relay, Path, str],
) -> None:
    """The router knows it by decode's own events, under the hashes that the tokenizer made."""
    relay, _, _ = running
    router = relay.processes("router")[0]
    prompt = prompts(400)[-1]
    relay.generate(prompt, options(max_tokens=2))
    units = len(prompt) // UNIT_TOKENS

    def known() -> bool:
        return relay.metric(router, "baton_prefix_index_units", role="decode") >= units

    eventually(known, PATIENCE_S, "the router hears of what decode has cached")
    local = relay.metric(router, "baton_local_prefill_total")
    finished = relay.generate(
        [*prompt[: units * UNIT_TOKENS], *range(5, 15)], options(max_tokens=2)
    ).finished
    assert finished is not None
    assert finished.cached_tokens >= units * UNIT_TOKENS
    assert relay.metric(router, "baton_local_prefill_total") == local + 1


def test_prompts_own_log_probabilities(running: tuple[Relay, Path, str]) -> None:
    """As evaluation harnesses ask for them; the numbers are transformers' own, also of prompts that
    are in the prefix caches by now."""
    relay, model, _ = running
    asked = [prompt for prompt in prompts(400) if 1 < len(prompt) < 500]
    body = {"prompt": asked, "echo": True, "logprobs": 2, "temperature": 0, "seed": 1}
    told = []
    for max_tokens in (1, 0):
        answer = relay.client.post("/v1/completions", json=body | {"max_tokens": max_tokens})
        assert answer.status_code == 200, answer.text
        told.append([choice["logprobs"] for choice in answer.json()["choices"]])
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, generated, alone in zip(asked, *told, strict=True):
        with torch.inference_mode():
            scores = torch.log_softmax(network(torch.tensor([prompt])).logits[0, :-1], 1)
        own = scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        first, *numbers = alone["token_logprobs"]
        assert first is None and len(generated["tokens"]) == len(prompt) + 1
        assert generated["token_logprobs"][:-1] == alone["token_logprobs"]
        torch.testing.assert_close(torch.tensor(numbers), own, rtol=1e-4, atol=1e-4)
        best = [max(each.values()) for each in alone["top_logprobs"][1:]]
        torch.testing.assert_close(torch.tensor(best), scores.max(1).values, rtol=1e-4, atol=1e-4)
