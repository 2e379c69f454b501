"""Of two models of one name a request gets one that can serve it, and not always the same one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerLoad, WorkerSnapshot, WorkerState
from batonlm.core.routing.routing import model_for, models_of, replacement_model

OLD = ModelDescription("m", "d1", 1000, 100, (2,), tokenizer_digest="t1")
NEW = replace(OLD, digest="d2", tokenizer_digest="t2")
ALL = {"t1", "t2"}


def worker(model: ModelDescription, state: WorkerState = WorkerState.SERVING) -> WorkerSnapshot:
    identity = WorkerIdentity("decode", f"{model.digest} {state}", "")
    return WorkerSnapshot(identity=identity, model=model, load=WorkerLoad(state), layout=None)


def picks(
    workers: list[WorkerSnapshot], tokenizers: set[str] = ALL, detokenizers: set[str] = ALL
) -> list[str]:
    """How often each digest is picked for some requests, as a sorted list."""
    found = [model_for(str(i), "m", workers, tokenizers, detokenizers) for i in range(400)]
    return sorted(model.digest if model else "" for model in found)


def test_each_version_gets_requests_by_its_workers() -> None:
    found = picks([worker(OLD), worker(NEW), worker(NEW), worker(NEW)])
    assert 40 < found.count("d1") < 160 and found.count("d1") + found.count("d2") == 400


@pytest.mark.parametrize("order", [1, -1])
def test_a_version_that_leaves_gets_none(order: int) -> None:
    workers = [worker(OLD, WorkerState.DRAINING), worker(NEW)][::order]
    assert set(picks(workers)) == {"d2"}
    assert [model.digest for model in models_of(workers)] == ["d2"]


@pytest.mark.parametrize(("tokenizers", "detokenizers"), [({"t1"}, ALL), (ALL, {"t1"})])
def test_a_version_without_its_texts_gets_none(
    tokenizers: set[str], detokenizers: set[str]
) -> None:
    assert set(picks([worker(OLD), worker(NEW)], tokenizers, detokenizers)) == {"d1"}
    assert set(picks([worker(OLD), worker(NEW)], {""}, {""})) == {"d1", "d2"}


def test_one_is_named_where_none_can_serve_it_now() -> None:
    """A request waits for it then, as it would for a model with one version."""
    assert set(picks([worker(OLD), worker(NEW)], set(), set())) == {"d1", "d2"}
    assert set(picks([worker(OLD, WorkerState.DRAINING)])) == {"d1"}
    assert set(picks([worker(replace(OLD, name="other"))])) == {""}


def test_a_request_without_a_token_may_go_to_an_replacement_that_reads_its_prompt_alike() -> None:
    replacement = replace(OLD, digest="d2")
    left = worker(OLD, WorkerState.DRAINING)
    assert replacement_model(OLD, [left, worker(replacement)]) == replacement
    assert replacement_model(OLD, [worker(replacement), worker(OLD)]) == OLD
    assert replacement_model(OLD, [left]) == OLD
    for other in (
        NEW,
        replace(replacement, name="other"),
        replace(replacement, vocab_size=99),
        replace(replacement, max_model_len=999),
    ):
        assert replacement_model(OLD, [left, worker(other)]) == OLD
    assert replacement_model(OLD, [worker(replacement, WorkerState.STARTING)]) == OLD


def test_models_are_listed_once() -> None:
    other = worker(replace(OLD, name="a"))
    listed = models_of([worker(OLD), other, worker(NEW, WorkerState.DRAINING), worker(OLD)])
    assert [(model.name, model.digest) for model in listed] == [("a", "d1"), ("m", "d1")]
