"""Scheduler, sequences whose router is gone: what they still get, and who goes on with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import NotFound
from batonlm.core.request.attempt import Attempt, Logprobs, SequenceKey
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler import scheduler as scheduler_module
from batonlm.core.scheduler.events import Adopted, AttemptFailed, Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.sequence import SequenceState
from tests.core.attempts import Outputs, attempt, decode_loop, expected, run_out

KEY = SequenceKey("r", 0, 0)


def begun(loop: EngineLoop, one: Attempt, steps: int = 5) -> Outputs:
    loop.scheduler.add(one, 0.0)
    outputs = Outputs()
    for _ in range(steps):
        outputs.take(loop.step(0.0))
    return outputs


def adopting(one: Attempt, choice: int = 0) -> Attempt:
    return replace(one, request_id="new", choices=(choice,))


def adopt(loop: EngineLoop, one: Attempt, outputs: Outputs, key: SequenceKey = KEY) -> Attempt:
    """It has all tokens that were reported, and those that follow."""
    new = adopting(one, key.choice)
    loop.scheduler.adopt(key, new)
    (adopted,) = (e for e in loop.scheduler.take_events() if isinstance(e, Adopted))
    assert list(adopted.tokens.token_ids) == outputs.tokens[key]
    outputs.tokens[adopted.tokens.key] = list(adopted.tokens.token_ids)
    return new


def failed(events: list[Event]) -> list[str]:
    return [event.key.request_id for event in events if isinstance(event, AttemptFailed)]


def state(loop: EngineLoop, key: SequenceKey = KEY) -> SequenceState | None:
    sequence = loop.scheduler.sequences.find(key)
    return None if sequence is None else sequence.state


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("orphaned", [False, True])
def test_another_request_goes_on_with_a_choice(depth: int, orphaned: bool) -> None:
    loop = decode_loop(256, depth=depth)
    one = attempt(n=2, max_tokens=30, sampling=SamplingParams(seed=3, top_logprobs=1))
    outputs = begun(loop, one)
    if orphaned:
        loop.scheduler.orphan(one.keys())
        assert not loop.scheduler.take_events()
    new = adopt(loop, one, outputs, SequenceKey("r", 1, 0))
    assert state(loop, SequenceKey("r", 1, 0)) is None
    outputs.take(run_out(loop))
    assert outputs.of(new) == {1: expected(one)[1]}
    assert outputs.tokens[KEY] == expected(one)[0]
    loop.idle_check()


def test_it_gets_a_few_tokens_more_until_somebody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "ORPHAN_TOKENS", 7)
    loop = decode_loop()
    one = attempt(max_tokens=40, ignore_eos=True)
    outputs = begun(loop, one)
    had = len(outputs.tokens[KEY])
    loop.scheduler.orphan([KEY])
    for _ in range(30):
        outputs.take(loop.step(0.0))
    assert had < len(outputs.tokens[KEY]) <= had + 8
    new = adopt(loop, one, outputs)
    assert outputs.take(run_out(loop)).of(new) == expected(one)


def test_it_has_its_log_probabilities_from_the_first_on() -> None:
    loop = decode_loop()
    one = attempt(max_tokens=30, sampling=SamplingParams(seed=3, top_logprobs=1))
    outputs = begun(loop, one)
    loop.scheduler.adopt(KEY, adopting(one))
    (adopted,) = (e for e in loop.scheduler.take_events() if isinstance(e, Adopted))
    assert len(adopted.tokens.logprobs) == len(outputs.tokens[KEY]) > 1
    run_out(loop)


def test_those_of_its_input_come_from_its_attempt() -> None:
    loop = decode_loop()
    one = attempt(max_tokens=30, sampling=SamplingParams(seed=3, top_logprobs=1))
    tokens = expected(one)[0]
    earlier = [Logprobs(-float(place)) for place in range(4)]
    loop.scheduler.add(replace(one, token_ids=(*one.token_ids, *tokens[:4])), 0.0)
    for _ in range(5):
        loop.step(0.0)
    loop.scheduler.adopt(KEY, adopting(one), earlier)
    (adopted,) = (e for e in loop.scheduler.take_events() if isinstance(e, Adopted))
    count = len(adopted.tokens.token_ids)
    assert count > 5 and list(adopted.tokens.token_ids) == tokens[:count]
    assert list(adopted.tokens.logprobs[:4]) == earlier
    assert len(adopted.tokens.logprobs) == count
    run_out(loop)


@pytest.mark.parametrize("swap", [0, 40])
def test_one_that_was_preempted_goes_on_as_another_request(swap: int) -> None:
    policy = SchedulerPolicy(headroom=1)
    loop = decode_loop(20, policy, num_swap_blocks=(swap, 0))
    many = [attempt(f"r{i}", size=22, seed=i, max_tokens=30, ignore_eos=True) for i in range(3)]
    for one in many:
        loop.scheduler.add(one, 0.0)
    outputs, victim = Outputs(), None
    while victim is None:
        outputs.take(loop.step(0.0))
        victim = next(
            (
                (one, key)
                for one in many
                for key in one.keys()  # noqa: SIM118
                if state(loop, key) in (SequenceState.SWAPPED, SequenceState.QUEUED)
                and outputs.tokens.get(key)
            ),
            None,
        )
    one, key = victim
    new = adopt(loop, one, outputs, key)
    outputs.take(run_out(loop))
    assert outputs.of(new) == expected(one)
    loop.idle_check()


def test_others_get_its_room_first_whatever_its_priority() -> None:
    loop = decode_loop(20, SchedulerPolicy(headroom=1))
    orphan = attempt("r", size=4, max_tokens=4, priority=0, ignore_eos=True)
    begun(loop, orphan, 2)
    loop.scheduler.orphan([KEY])
    assert not loop.scheduler.take_events()
    low = attempt("low", size=76, seed=1, max_tokens=4, priority=9, ignore_eos=True)
    loop.scheduler.add(low, 0.0)
    events: list[Event] = []
    while state(loop) is not None:
        events += loop.step(0.0)
    assert failed(events) == ["r"] and not loop.scheduler.preemptions
    outputs = Outputs().take(events + run_out(loop))
    assert outputs.of(low) == expected(low)
    loop.idle_check()


def test_together_they_need_a_tenth_of_the_blocks() -> None:
    """Of 64; each of 10 + 6 positions needs four."""
    loop = decode_loop()
    many = [attempt(f"r{i}", seed=i, max_tokens=7, ignore_eos=True) for i in range(3)]
    for one in many:
        loop.scheduler.add(one, 0.0)
    loop.step(0.0)
    keys = [key for one in many for key in one.keys()]  # noqa: SIM118
    loop.scheduler.orphan(keys[:1])
    assert not loop.scheduler.take_events()
    loop.scheduler.orphan(keys[1:])
    assert failed(loop.scheduler.take_events()) == ["r1", "r2"]
    run_out(loop)
    loop.idle_check()


def test_what_has_not_begun_or_is_held_is_nobody_elses() -> None:
    loop = decode_loop()
    one = attempt(max_tokens=30, ignore_eos=True)
    with pytest.raises(NotFound):
        loop.scheduler.adopt(KEY, adopting(one))
    loop.scheduler.add(one, 0.0)
    with pytest.raises(NotFound):
        loop.scheduler.adopt(KEY, adopting(one))
    for _ in range(3):
        loop.step(0.0)
    assert loop.scheduler.hold(KEY)
    with pytest.raises(NotFound):
        loop.scheduler.adopt(KEY, adopting(one))
    loop.scheduler.cancel(one.key)
    loop.idle_check()
