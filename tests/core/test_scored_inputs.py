"""Inputs whose own tokens are scored: whole, however they are cut, and never from the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.prompt_logprobs import MAX_BYTES, PromptLogprobs, entries_bytes
from batonlm.core.scheduler.events import Event, FirstTokens, KvComplete
from batonlm.core.scheduler.plan import Chunk
from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy
from tests.core.attempts import VOCAB_SIZE, attempt, decode_loop, prefill_loop, run, run_out


def scored(request_id: str, *, size: int = 60, num_top: int = 2) -> Attempt:
    return replace(attempt(request_id, size=size, max_tokens=1), prompt_logprobs=num_top)


def told(events: list[Event]) -> dict[str, PromptLogprobs | None]:
    kinds = (FirstTokens, KvComplete)
    return {e.key.request_id: e.prompt_logprobs for e in events if isinstance(e, kinds)}


def test_the_numbers_are_the_same_however_the_input_is_cut() -> None:
    one = scored("r")
    answers = []
    for budget in (4, 12, 100):
        loop = prefill_loop(policy=replace(PREFILL, token_budget=budget))
        loop.scheduler.add(one, 0.0, keep=False)
        answers.append(told(run_out(loop))["r"])
    for budget in (8, 300):
        for depth in (1, 2):
            policy = SchedulerPolicy(
                max_sequences=4, headroom=8, token_budget=budget, prefill_budget=4
            )
            decode = decode_loop(policy=policy, depth=depth)
            decode.scheduler.add(one, 0.0)
            answers.append(told(run_out(decode))["r"])
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] is not None
    assert (len(answers[0]), answers[0].num_top) == (59, 2)


def test_nothing_of_it_comes_from_the_cache_and_all_of_it_goes_there() -> None:
    loop = prefill_loop()
    loop.scheduler.add(attempt("before"), 0.0, keep=False)
    run_out(loop)
    loop.scheduler.add(scored("scored"), 0.0, keep=False)
    events = run_out(loop)
    assert told(events)["scored"] == told(fresh("scored"))["scored"]
    assert [e.cached_tokens for e in events if isinstance(e, FirstTokens)] == [0]
    loop.scheduler.add(attempt("after", size=60), 0.0, keep=False)
    assert [e.cached_tokens for e in run_out(loop) if isinstance(e, FirstTokens)] == [56]


def fresh(request_id: str) -> list[Event]:
    loop = prefill_loop()
    loop.scheduler.add(scored(request_id), 0.0, keep=False)
    return run_out(loop)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_scores_one_input(role: str) -> None:
    policy = replace(PREFILL, token_budget=1000, batch_window_s=0.0)
    loop = prefill_loop(policy=policy) if role == "prefill" else decode_loop()
    for name in ("a", "b", "plain"):
        one = scored(name) if name != "plain" else attempt(name, max_tokens=1)
        loop.scheduler.add(one, 0.0)
    chunks: list[list[Chunk]] = []
    events: list[Event] = []
    while (plan := loop.plan(1.0)) is not None:
        chunks.append([chunk for chunk in plan.chunks if chunk.scored is not None])
        assert plan.scores == bool(chunks[-1])
        events += loop.apply(run(loop, plan), 1.0)
        loop.idle_check()
    assert [len(each) for each in chunks] == [1, 1]
    assert all(told(events)[name] is not None for name in "ab")
    assert told(events)["plain"] is None


@pytest.mark.parametrize("num_top", [VOCAB_SIZE + 1, 10_000])
def test_more_than_a_message_takes_is_refused(num_top: int) -> None:
    loop = prefill_loop()
    with pytest.raises(InvalidArgument) as caught:
        loop.scheduler.add(scored("r", num_top=num_top), 0.0, keep=False)
    assert caught.value.field == "prompt_logprobs"
    assert entries_bytes(60, VOCAB_SIZE) < MAX_BYTES
    assert not loop.scheduler.has_work
