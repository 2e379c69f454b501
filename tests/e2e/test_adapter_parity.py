"""Adapters over real processes: each request gets the tokens that transformers gives with its own
adapter, unmerged, a hundred adapters at once, handed over, and across the death of a decode worker;
and in one process those of the servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batonlm import LLM
from batonlm.client import Client
from batonlm.core.errors import InvalidArgument, ModelNotFound
from tests.e2e.adapters_at_once import ARCH, NAMES, NEW, ask_all, save_all, serving
from tests.e2e.relay import PATIENCE_S, Relay
from tests.engine.adapters import adapted, wrong_tokens
from tests.engine.tiny_models import build

torch.set_num_threads(1)
pytestmark = pytest.mark.deep

PROMPT = list(range(20, 84))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_all(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("running")


@pytest.fixture(scope="module")
def relay(adapters: dict[str, Path], folder: Path) -> Iterator[Relay]:
    with serving(adapters, folder) as running:
        yield running


@pytest.mark.timeout(1800)
def test_a_hundred_at_once_equal_transformers(relay: Relay, adapters: dict[str, Path]) -> None:
    found = ask_all(relay)
    assert found.keys() == adapters.keys()
    for name, answers in found.items():
        assert not wrong_tokens(adapted(build(ARCH), adapters[name]), answers), name
    alone = build(ARCH)
    assert all(wrong_tokens(alone, answers) for answers in found.values()), (
        "adapters that do nothing"
    )


def test_prefixes_of_each_adapter_are_its_own(relay: Relay, adapters: dict[str, Path]) -> None:
    """Asked twice, so that the second answer comes from cached KV: never another adapter's."""
    with Client(relay.description["grpc"], timeout_s=PATIENCE_S) as client:
        answers = [
            client.generate(
                PROMPT, model=name, max_tokens=NEW, temperature=0.0, return_token_ids=True,
                ignore_eos=True,
            ).read()
            for _ in range(2)
            for name in ("", *NAMES[:6])
        ]  # fmt: skip
    tokens = [tuple(answer.choices[0].token_ids) for answer in answers]
    assert tokens[:7] == tokens[7:] and len(set(tokens)) == 7
    assert all(answer.finished.cached_tokens for answer in answers[7:])
    for name, found in zip(NAMES[:6], tokens[1:7], strict=True):
        network = adapted(build(ARCH), adapters[name])
        assert not wrong_tokens(network, [(PROMPT, list(found))]), name


def test_one_process_gives_the_tokens_of_the_servers(
    relay: Relay, adapters: dict[str, Path], folder: Path
) -> None:
    """Each request of a call with its own adapter."""
    model = str(folder / "tiny")
    names = ["", *NAMES[:8], f"tiny:{NAMES[8]}"]
    options: dict[str, Any] = {
        "max_tokens": 40,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    sampled = {**options, "temperature": 1.0, "seed": 5}
    with Client(relay.description["grpc"], timeout_s=PATIENCE_S) as client:
        right = [
            client.generate(PROMPT, model=name, **given).read()
            for given in (options, sampled)
            for name in names
        ]
    given = {name: adapters[name] for name in NAMES[:10]}
    with LLM(model, kv_memory_mib=32, threads=1, adapters=given, adapter_memory_mib=1) as llm:
        requests = [
            llm.request(PROMPT, model=name, **each) for each in (options, sampled) for name in names
        ]
        found = list(llm.answers(requests))
        assert [answer.accepted.model for answer in found] == [
            answer.accepted.model for answer in right
        ]
        assert [tuple(answer.choices[0].token_ids) for answer in found] == [
            tuple(answer.choices[0].token_ids) for answer in right
        ]
        (one,) = llm.generate([PROMPT], model=names[1], **options)
        assert tuple(one.choices[0].token_ids) == tuple(right[1].choices[0].token_ids)
        for wrong in (NAMES[20], f"other:{NAMES[0]}", "tiny:", ":"):
            with pytest.raises(ModelNotFound, match="a0"):
                llm.generate("a", model=wrong)
    with pytest.raises(InvalidArgument, match="nowhere") as refused:
        LLM(model, kv_memory_mib=32, threads=1, adapters={"a": folder / "nowhere"})
    assert refused.value.field == "adapters"
