"""Adapters that requests name are loaded from their folder then, and make room for others: many
more than a worker holds, over real processes with a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.relay import PATIENCE_S, Relay, eventually
from tests.engine.adapters import expected, save_adapter
from tests.engine.tiny_models import save_tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.deep

ARCH = "llama"
MANY, MOST = 100, 2000
PROMPT = list(range(10, 60))
COUNT = 6


def make_many(folder: Path, number: int) -> None:
    """Adapters that differ in one matrix, which is enough for other tokens."""
    first = save_adapter(ARCH, folder / "n0", seed=1, rank=4)
    stored = load_file(first / "adapter_model.safetensors")
    settings = (first / "adapter_config.json").read_bytes()
    name = next(name for name in stored if name.endswith("down_proj.lora_B.weight"))
    generator = torch.Generator().manual_seed(2)
    for index in range(1, number):
        (folder / f"n{index}").mkdir()
        changed = torch.randn(stored[name].shape, generator=generator)
        save_file(stored | {name: changed}, folder / f"n{index}" / "adapter_model.safetensors")
        (folder / f"n{index}" / "adapter_config.json").write_bytes(settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters") / "adapters"
    make_many(made, MANY)
    outside = save_adapter(ARCH, made.parent / "outside", seed=3)
    (made / "link").symlink_to(outside)
    bad = save_adapter(ARCH, made / "bad", seed=4)
    settings = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    return made


@pytest.fixture(scope="module")
def relay(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    model = save_tiny_model(ARCH, tmp_path_factory.mktemp("model") / "tiny")
    running = Relay(
        tmp_path_factory.mktemp("running"),
        *("--model", str(model), "--decode", "1", "--kv-memory-mib", "64", "--prefer-split"),
        *("--adapters-folder", str(folder), "--adapters-on-use"),
        environment={"BATON_ADAPTER_MEMORY_MIB": "1"},
    )
    yield running
    running.close()


def ask(relay: Relay, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0.0}
    return httpx.post(
        f"{relay.http}/v1/completions",
        json=body | {"ignore_eos": True, "return_token_ids": True},
        timeout=PATIENCE_S,
    )


def tokens(relay: Relay, model: str) -> list[int]:
    answer = ask(relay, model)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def loads(relay: Relay, adapter: str) -> int:
    """How often workers have read it."""
    return relay.log.read_text().count(f"adapter {adapter}: ")


def held(relay: Relay) -> float:
    (decode,) = relay.processes("decode")
    return relay.metric(decode, "baton_adapters")


def test_a_request_brings_what_it_names(relay: Relay, folder: Path) -> None:
    base = tokens(relay, "tiny")
    for name, model in (("n0", "n0"), ("n1", "tiny:n1")):
        (right,) = expected(ARCH, folder / name, [PROMPT], COUNT)
        assert tokens(relay, model) == right != base
    listed = httpx.get(f"{relay.http}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert {each["id"] for each in listed} >= {"tiny", "n0", "n1"}


def test_requests_that_come_at_once_load_it_once(relay: Relay, folder: Path) -> None:
    (right,) = expected(ARCH, folder / "n2", [PROMPT], COUNT)
    assert loads(relay, "n2") == 0
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: tokens(relay, "n2"), range(16))) == [right] * 16
    workers = len(relay.processes("decode")) + len(relay.processes("prefill"))
    # The log is written a moment later.
    eventually(lambda: loads(relay, "n2") > 0, PATIENCE_S, "the log says that it was loaded")
    assert loads(relay, "n2") <= workers


def test_what_is_not_there_is_a_404_and_what_is_refused_says_why(relay: Relay) -> None:
    for name in (
        "none",
        "tiny:none",
        "../outside",
        "n1/../n2",
        "link",
        "n0/adapter_config.json",
        ".",
    ):
        answer = ask(relay, name)
        assert answer.status_code == 404, (name, answer.text)
    for _ in range(3):
        answer = ask(relay, "bad")
        assert answer.status_code == 400 and "DoRA" in answer.json()["error"]["message"]


def test_many_more_than_a_worker_holds(relay: Relay, folder: Path) -> None:
    check_many(relay, folder, MANY)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_on_a_worker_that_holds_twenty(relay: Relay, folder: Path) -> None:
    more = folder.parent / "more"
    make_many(more, MOST)
    for path in more.iterdir():
        if not (folder / path.name).exists():
            path.rename(folder / path.name)
    check_many(relay, folder, MOST)


def check_many(relay: Relay, folder: Path, number: int) -> None:
    some = [0, 7, number // 2, number - 1]
    right = {f"n{i}": expected(ARCH, folder / f"n{i}", [PROMPT], COUNT)[0] for i in some}
    with ThreadPoolExecutor(8) as pool:
        once = list(pool.map(lambda i: tokens(relay, f"n{i}"), range(number)))
        assert 2 < held(relay) < number / 2
        # Those that made room come back, and are what they were.
        again = list(pool.map(lambda i: tokens(relay, f"n{i}"), range(0, number, 5)))
    assert again == once[::5]
    assert len({tuple(each) for each in once}) > number / 2
    assert {name: once[int(name[1:])] for name in right} == right
