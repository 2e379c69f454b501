"""LoRA adapters in the scheduler, in the keys of prefixes, and in a router's registry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.core.kvcache.prefix import prefix_hashes
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.model import AdapterDescription
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.request.validation import check_adapter_name
from batonlm.core.routing.adapters import MAX_MODELS, AdapterRegistry
from batonlm.core.scheduler.events import NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.testing.fake_runner import FakeRunner
from batonlm.worker.engine import engine_loop

PROMPT = tuple(range(5, 105))


def made(name: str, digest: str, path: str = "p") -> AdapterDescription:
    return AdapterDescription(name, digest, 8, 100, path)


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text(name)
    return folder


def attempt(request_id: str, adapter: str = "", max_tokens: int = 20) -> Attempt:
    return Attempt(
        request_id, 0, (0,), PROMPT, len(PROMPT), SamplingParams(temperature=0.0),
        StopParams(max_tokens=max_tokens, ignore_eos=True), adapter=adapter,
    )  # fmt: skip


def loop() -> EngineLoop:
    return engine_loop(FakeRunner(delay_steps=1), SchedulerPolicy())


def run(loop: EngineLoop, steps: int = 200) -> dict[str, list[int]]:
    """Steps until nothing runs; the tokens by request."""
    found: dict[str, list[int]] = {}
    for step in range(steps):
        for event in loop.step(float(step)):
            if isinstance(event, NewTokens):
                for tokens in event.tokens:
                    found.setdefault(tokens.key.request_id, []).extend(tokens.token_ids)
        if not loop.scheduler.has_work and not loop.in_flight:
            return found
    raise AssertionError("it still runs")


def test_one_batch_has_many_and_each_computes_what_it_does_alone(tmp_path: Path) -> None:
    together = loop()
    digests = [""]
    for name in ("one", "two"):
        digest = together.runner.load_adapter(folder_of(tmp_path, name)).digest
        together.add_adapter(digest)
        digests.append(digest)
    alone = []
    for digest in digests:
        single = loop()
        for name in ("one", "two"):
            single.add_adapter(single.runner.load_adapter(tmp_path / name).digest)
        single.scheduler.add(attempt("it", digest), 0.0)
        alone.append(run(single)["it"])
    assert len({tuple(tokens) for tokens in alone}) == 3
    # The second one of each finds its own prefix in the cache, and no other's.
    for again in "ab":
        for digest in digests:
            together.scheduler.add(attempt(f"{again}{digest}", digest), 0.0)
        found = run(together)
        assert [found[f"{again}{digest}"] for digest in digests] == alone


def test_what_runs_goes_on_after_its_adapter_is_dropped_and_memory_follows(tmp_path: Path) -> None:
    here = loop()
    digest = here.runner.load_adapter(folder_of(tmp_path, "one")).digest
    with pytest.raises(Unavailable):
        here.scheduler.add(attempt("early", digest), 0.0)
    here.add_adapter(digest)
    here.scheduler.add(attempt("it", digest), 0.0)
    for step in range(5):
        here.step(float(step))
    here.drop_adapter(digest)
    with pytest.raises(Unavailable):
        here.scheduler.add(attempt("late", digest), 5.0)
    assert here.scheduler.uses_adapter(digest)
    assert len(run(here)["it"]) > 10
    here.plan(300.0)
    assert not here.scheduler.uses_adapter(digest)
    with pytest.raises(Exception, match="no such adapter"):
        here.runner.unload_adapter(digest)


def test_a_cancelled_sequence_keeps_its_adapter_until_its_steps_are_done(tmp_path: Path) -> None:
    here = loop()
    digest = here.runner.load_adapter(folder_of(tmp_path, "one")).digest
    here.add_adapter(digest)
    one = attempt("it", digest)
    here.scheduler.add(one, 0.0)
    plan = here.plan(0.0)
    assert plan is not None
    here.submit(plan)
    here.scheduler.cancel(one.key)
    here.drop_adapter(digest)
    assert here.plan(1.0) is None
    # The fake runner computes it only now, and would find no adapter.
    here.apply(here.collect()[1], 1.0)
    assert here.plan(2.0) is None
    assert not here.scheduler.uses_adapter(digest)


def test_nothing_is_freed_while_something_is_loaded(tmp_path: Path) -> None:
    here = loop()
    folder = folder_of(tmp_path, "one")
    digest = here.runner.load_adapter(folder).digest
    here.add_adapter(digest)
    here.begin_loading()
    here.drop_adapter(digest)
    assert here.plan(0.0) is None
    # Loaded again meanwhile: there is nothing to read, and it stays.
    assert here.runner.load_adapter(folder).digest == digest
    here.add_adapter(digest)
    here.end_loading()
    assert here.plan(1.0) is None
    here.scheduler.add(attempt("it", digest), 2.0)
    assert len(run(here)["it"]) == 20


def test_prefixes_of_adapters_are_apart_and_those_of_the_model_stay_as_they_were() -> None:
    plain = prefix_hashes(PROMPT, b"salt", "t")
    assert plain == prefix_hashes(PROMPT, b"salt", "t", "")
    assert len({plain, *(prefix_hashes(PROMPT, b"salt", "t", d) for d in ("a", "b"))}) == 3


@pytest.mark.parametrize("name", ["", "a:b", "-a", ".a", "a b", "a\n", "é", "a" * 201, "../a"])
def test_names_that_could_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_adapter_name(name)
    assert caught.value.field == "name"


def test_a_registry_learns_from_lists_and_forgets_only_what_a_known_worker_lost() -> None:
    registry, a, b = AdapterRegistry(), made("a", "1"), made("b", "2")
    registry.met("m", [a])
    registry.changed("m", [a], [a, b])
    # A worker that restarted has nothing, which means nothing.
    registry.met("m", [])
    assert registry.missing("m", []) == [a, b]
    registry.changed("m", [a, b], [b])
    assert registry.missing("m", []) == [b]
    # One that was out of reach still has it.
    registry.met("m", [a, b])
    assert registry.named("m", "a") is None
    assert registry.unwanted("m", [a, b]) == [a]
    # It is loaded again.
    registry.changed("m", [b], [b, a])
    assert registry.named("m", "a") == a and not registry.unwanted("m", [a, b])
    assert registry.named("other", "a") is None


def test_a_replaced_adapter_is_what_its_name_means_everywhere() -> None:
    registry, old, new = AdapterRegistry(), made("a", "1"), made("a", "2")
    registry.met("m", [old])
    registry.changed("m", [old], [new])
    assert registry.named("m", "a") == new
    assert registry.missing("m", [old]) == [new] and registry.unwanted("m", [old]) == [old]
    registry.changed("m", [old], [new])
    assert registry.named("m", "a") == new


def test_what_lies_nowhere_that_workers_share_is_loaded_by_nobody_else() -> None:
    registry, own = AdapterRegistry(), made("a", "1", path="")
    registry.met("m", [own])
    assert registry.named("m", "a") == own
    assert registry.missing("m", []) == []


def test_a_name_stands_for_what_workers_were_started_with_when_the_rest_is_lost() -> None:
    registry, old, new = AdapterRegistry(), made("a", "1"), made("a", "2")
    registry.met("m", [old])
    registry.met("m", [new])
    assert registry.named("m", "a") == old
    registry.lost("m", new)
    assert registry.named("m", "a") == new and registry.missing("m", [new]) == []
    # What an operator unloaded stays so.
    registry.changed("m", [new], [old])
    registry.lost("m", new)
    assert registry.named("m", "a") == old


def test_what_requests_brought_is_no_operators_wish() -> None:
    registry, used = AdapterRegistry(), replace(made("used", "u1"), on_use=True)
    registry.met("m", [used, made("wanted", "w1")])
    registry.changed("m", [used, made("wanted", "w1")], [made("wanted", "w1")])
    registry.changed("m", [made("wanted", "w1")], [used, made("wanted", "w1")])
    assert [each.name for each in registry.of("m")] == ["wanted"]
    assert not registry.unwanted("m", [used]) and not registry.wants("u1")
    registry.changed("m", [used], [replace(used, on_use=False)])
    assert registry.named("m", "used") is not None, "an operator loaded it, too"


def test_a_load_that_ends_behind_an_unload_elsewhere_brings_nothing_back() -> None:
    registry, adapter = AdapterRegistry(), made("a", "d1")
    with registry.loading("m", "a") as called_off:
        registry.changed("m", [], [adapter])
        assert not called_off("d1")
        registry.changed("m", [adapter], [])
        assert called_off("d1") and not called_off("d2")
        registry.changed("m", [], [adapter])
        assert registry.named("m", "a") is None and registry.unwanted("m", [adapter])
    with registry.loading("m", "a") as called_off:
        registry.changed("m", [], [adapter])
        assert not called_off("d1") and registry.named("m", "a") == adapter


def test_models_that_are_gone_are_forgotten_the_oldest_first() -> None:
    registry = AdapterRegistry()
    for index in range(2 * MAX_MODELS):
        registry.met(f"m{index}", [made("a", "d")])
        registry.met("kept", [made("b", "e")])
    assert registry.named("m0", "a") is None and registry.named("kept", "b") is not None
    assert registry.named(f"m{2 * MAX_MODELS - 1}", "a") is not None


def test_the_one_that_none_named_for_the_longest_time_makes_room(tmp_path: Path) -> None:
    engine = loop()
    digests = [
        engine.runner.load_adapter(folder_of(tmp_path, name)).digest for name in ("a", "b", "c")
    ]
    for digest in digests:
        engine.add_adapter(digest)
    engine.scheduler.add(attempt("r", digests[0]), 0.0)
    engine.step(1.0)
    assert engine.evict_adapter(digests) == digests[1]
    assert engine.evict_adapter(digests[:1]) == "", "a sequence uses it"
    engine.begin_loading()
    assert engine.evict_adapter(digests) == ""
    engine.end_loading()
    run(engine)
    assert engine.evict_adapter(digests) == digests[2]
    assert engine.evict_adapter(digests) == digests[0]
    with pytest.raises(Unavailable):
        engine.scheduler.add(attempt("s", digests[0]), 300.0)
