"""Adapters over real processes: each request gets the tokens that transformers gives with its own
adapter, unmerged, many of them at once, handed over, and across the death of a decode worker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from batonlm.v1 import inference_pb2
from tests.e2e.relay import (
    PATIENCE_S,
    Answer,
    Relay,
    eventually,
    happens,
    options,
    until_it_comes_about,
)
from tests.e2e.test_parity import prompts
from tests.engine.adapters import expected, save_adapter
from tests.engine.tiny_models import save_tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.deep

ARCH = "llama"
GIVEN, LATER = ("a0", "a1"), ("a2", "a3", "a4", "a5")
SHORT, LONG = 24, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(GIVEN + LATER, 1):
        save_adapter(ARCH, made / name, seed=seed, rank=4 * seed)
    return made


@pytest.fixture(scope="module")
def relay(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    model = save_tiny_model(ARCH, tmp_path_factory.mktemp("model") / "tiny")
    given = [f"{name}={folder / name}" for name in GIVEN]
    running = Relay(
        tmp_path_factory.mktemp("running"),
        *("--model", str(model), "--decode", "2", "--kv-memory-mib", "64", "--prefer-split"),
        *("--adapter", *given, "--adapters-folder", str(folder)),
    )
    for name in LATER:
        body = {"lora_name": name, "lora_path": name}
        route = f"{running.http}/v1/load_lora_adapter"
        answer = httpx.post(route, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
    yield running
    running.close()


def generate(relay: Relay, model: str, prompt: list[int], max_tokens: int) -> list[int]:
    request = inference_pb2.GenerateRequest(model=model, options=options(max_tokens=max_tokens))
    request.token_ids.ids.extend(prompt)
    answer = Answer()
    for response in relay.stub.Generate(request, timeout=PATIENCE_S):
        answer.take(response.event)
    return answer.token_ids[0]


def test_many_at_once_equal_transformers(relay: Relay, folder: Path) -> None:
    asked = prompts(400)[5::3]
    work = [(name, index) for index in range(len(asked)) for name in ("", *GIVEN, *LATER)]
    right = {
        name: expected(ARCH, folder / name if name else None, asked, SHORT)
        for name in ("", *GIVEN, *LATER)
    }
    assert len({str(tokens) for tokens in right.values()}) == len(right)
    # Twice: the second time prefixes are cached, of each adapter its own.
    for _ in range(2):
        with ThreadPoolExecutor(len(work)) as pool:
            found = pool.map(lambda it: generate(relay, it[0], asked[it[1]], SHORT), work)
            for (name, index), tokens in zip(work, found, strict=True):
                assert tokens == right[name][index], (name, index)
    assert relay.metric(relay.router, "baton_kv_bytes_total") > 0


def test_a_killed_worker_changes_no_token(relay: Relay, folder: Path) -> None:
    (prompt,) = prompts(400)[10:11]
    names = (*GIVEN, *LATER)
    right = {name: expected(ARCH, folder / name, [prompt], LONG)[0] for name in names}

    def killed() -> bool:
        before = relay.lost_attempts()
        with ThreadPoolExecutor(2 * len(names)) as pool:
            runs = [(n, pool.submit(generate, relay, n, prompt, LONG)) for n in names * 2]
            happens(lambda: sum(relay.running("decode").values()) > 2, PATIENCE_S)
            victim = relay.busiest("decode")
            relay.kill(victim)
            for name, running in runs:
                assert running.result() == right[name], name
        relay.wait_for_all(gone=victim["pid"])
        workers = relay.processes("decode")
        eventually(
            lambda: all(relay.metric(w, "baton_adapters") == len(names) for w in workers),
            PATIENCE_S,
            "the new worker has all adapters",
        )
        return relay.lost_attempts() > before

    until_it_comes_about(killed, "streams lost their worker")
