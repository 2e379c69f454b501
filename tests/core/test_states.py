"""Sequences of models that keep a state: each has its own, wherever it goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.core.errors import ContextLengthExceeded, Internal, InvalidArgument
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.kvcache.cache_events import Change
from batonlm.core.kvcache.prefix import PrefixChain, namespace
from batonlm.core.request.attempt import Attempt, AttemptKey, SequenceKey
from batonlm.core.scheduler.events import KvComplete
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import Chunk, StateCopy, StepPlan
from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from tests.core.attempts import (
    BLOCK_SIZE,
    Outputs,
    attempt,
    decode_loop,
    expected,
    fill_in,
    handed_over,
    packed,
    pool_of,
    prefill_loop,
    run_out,
    runner,
    unpacked,
)

STATE, STATE_BLOCKS = 6, 2


def stepped(loop: EngineLoop, tokens: int) -> Outputs:
    """Adds an attempt and steps until it has so many tokens, one step at a time."""
    outputs = Outputs()
    loop.scheduler.add(attempt(max_tokens=20), 0.0)
    key = SequenceKey("r", 0, 0)
    while len(outputs.tokens.get(key, ())) < tokens:
        outputs.take(loop.step(0.0))
    return outputs


@pytest.mark.parametrize("wrong", ["none", "stale", "another one's"])
def test_the_runner_of_tests_tells_a_wrong_state(wrong: str) -> None:
    """So that all that the other tests with it find is worth something."""
    loop = decode_loop(state_positions=STATE)
    outputs, engine = stepped(loop, 4), loop.runner
    (sequence,) = loop.scheduler.sequences.running.values()
    assert sequence.table is not None
    extents, end = sequence.table.extents, sequence.num_computed_tokens
    kv, state = packed(engine, extents, 0, end)
    outputs.take(loop.step(0.0))
    kv = packed(engine, extents, 0, end + 1)[0]
    other = bytes(reversed(state))
    states = {"none": b"\xff" * len(state), "stale": state, "another one's": other}
    unpacked(engine, extents, 0, end + 1, (kv, states[wrong]))
    outputs.take(run_out(loop))
    whole = expected(attempt(max_tokens=20), 0, STATE)[0]
    found = outputs.tokens[SequenceKey("r", 0, 0)]
    assert found[:5] == whole[:5] and found[5:] != whole[5:]


def test_a_runner_refuses_chunks_that_share_a_state_or_have_no_room_for_it() -> None:
    engine = runner(16, state_positions=STATE)

    def chunk(number: int, *extents: tuple[int, int]) -> Chunk:
        return Chunk(number, (5,) * BLOCK_SIZE, 0, extents)

    with pytest.raises(Internal, match="into the same block"):
        engine.submit(StepPlan(1, (chunk(0, (0, 3)), chunk(1, (0, 2), (5, 1)))))
    with pytest.raises(Internal, match="extents cover"):
        engine.submit(StepPlan(1, (chunk(0, (0, STATE_BLOCKS)),)))
    engine.submit(StepPlan(1, (chunk(0, (0, 3)), chunk(1, (3, 3)))))


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_go_on_from_copies_of_the_prompts_state(depth: int) -> None:
    one = attempt(n=3, max_tokens=20)
    loop = decode_loop(depth=depth, state_positions=STATE)
    loop.scheduler.add(one, 0.0)
    assert Outputs().take(run_out(loop)).of(one) == expected(one, 0, STATE)
    assert loop.scheduler.load.free_blocks == 64


@pytest.mark.parametrize("depth", [1, 2])
def test_a_choice_that_must_wait_has_its_copy_before_another_goes_on(depth: int) -> None:
    """Choice 0 rewrites the state that choice 1 begins with, long before that runs."""
    one = attempt(n=2, max_tokens=9)
    first, second = one.keys()
    loop = decode_loop(depth=depth, state_positions=STATE)
    loop.scheduler.add(one, 0.0, max_unconfirmed=1)
    outputs = Outputs()
    while len(outputs.tokens.get(first, ())) < 9:
        outputs.take(loop.step(0.0))
        loop.scheduler.confirm(first, len(outputs.tokens.get(first, ())))
        loop.idle_check()
    assert len(outputs.tokens[second]) == 1
    while loop.scheduler.has_work:
        loop.scheduler.confirm(second, len(outputs.tokens[second]))
        outputs.take(loop.step(0.0))
    assert outputs.of(one) == expected(one, 0, STATE)


def test_a_choice_is_not_handed_over_while_its_copy_is_being_made() -> None:
    one = attempt(n=2, max_tokens=9)
    first, second = one.keys()
    loop = decode_loop(state_positions=STATE)
    loop.scheduler.add(one, 0.0, max_unconfirmed=1)
    loop.step(0.0)
    assert not loop.scheduler.hold(second), "it has nothing of its own yet"
    loop.scheduler.confirm(first, 1)
    plan = loop.plan(0.0)
    assert plan is not None and len(plan.chunks) == 1
    assert [copy.num_positions for copy in plan.copies] == [BLOCK_SIZE, 2, 2]
    assert not loop.scheduler.hold(second), "the step copies it, and computes nothing for it"
    loop.submit(plan)
    loop.apply(loop.collect()[1], 0.0)
    assert loop.scheduler.hold(second)
    loop.scheduler.cancel(one.key)
    loop.idle_check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("swap", "lost", "kinds"),
    [
        ((0, 0), (), {"recompute"}),
        ((60, 0), (), {"swap_host"}),
        ((0, 60), (), {"swap_disk"}),
        ((60, 0), range(STATE_BLOCKS), {"swap_host", "recompute"}),
    ],
    ids=["recompute", "host", "disk", "lost"],
)
def test_a_preempted_sequence_goes_on_with_its_state(
    swap: tuple[int, int], lost: range, kinds: set[str], depth: int
) -> None:
    loop = decode_loop(
        28,
        SchedulerPolicy(headroom=4),
        num_swap_blocks=swap,
        lost_swap_blocks=lost,
        depth=depth,
        state_positions=STATE,
    )
    many = [attempt(f"r{i}", size=22, seed=i, max_tokens=30) for i in range(3)]
    for one in many:
        loop.scheduler.add(one, 0.0)
    outputs = Outputs().take(run_out(loop))
    assert {kind for kind, count in loop.scheduler.preemptions.items() if count} == kinds
    for one in many:
        assert outputs.of(one) == expected(one, 0, STATE)
    assert loop.scheduler.load.free_blocks == 28


def cached(loop: EngineLoop, one: Attempt) -> int:
    """Runs an attempt, whose tokens must be right; returns how many positions were found."""
    loop.scheduler.add(one, 0.0)
    events = run_out(loop)
    assert Outputs().take(events).of(one) == expected(replace(one, request_id="r"), 0, STATE)
    (complete,) = [event for event in events if isinstance(event, KvComplete)]
    return complete.cached_tokens


def parting(request_id: str, shared: int, seed: int) -> Attempt:
    """An input of 30 tokens that begins with so many of seed 0's."""
    one, other = attempt(size=30), attempt(request_id, size=30, seed=seed)
    return replace(other, token_ids=(*one.token_ids[:shared], *other.token_ids[shared:]))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_is_found_where_the_state_behind_it_is_kept(depth: int) -> None:
    loop = decode_loop(128, depth=depth, state_positions=STATE)
    assert cached(loop, attempt("first", size=30)) == 0
    assert cached(loop, attempt("same", size=30)) == 28
    assert cached(loop, attempt("longer", size=35)) == 28
    assert cached(loop, attempt("another's", size=30, salt=b"tenant")) == 0
    assert cached(loop, attempt("shorter", size=15)) == 0, "no state was kept inside of it"
    # Where an input parts from what is known, a state is kept: others may part there, too.
    assert cached(loop, parting("parts", 19, seed=1)) == 12
    assert cached(loop, parting("parts, too", 18, seed=2)) == 16


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_of_a_conversation_goes_on_from_the_last_ones_end(depth: int) -> None:
    """In the cache of the worker that decoded it, also if that got the first turn from another."""
    one = attempt(size=10, max_tokens=16)
    first, kv = handed_over(one, 0, STATE)
    loop = decode_loop(128, depth=depth, state_positions=STATE)
    assert loop.scheduler.reserve(one, 0.0) == 0
    fill_in(loop, one, 0, kv)
    loop.scheduler.admit(one.key, first.tokens, 0.0)
    answer = Outputs().take(run_out(loop)).of(one)[0]
    assert answer == expected(one, 0, STATE)[0]
    turns = (*one.token_ids, *answer)
    following = replace(attempt("next"), token_ids=(*turns, 9, 8, 7), num_prompt_tokens=29)
    assert cached(loop, following) == 24, "the last of the 26 is never computed"
    assert loop.scheduler.load.free_blocks == 128


def test_kv_is_found_without_a_state_where_the_state_is_handed_over() -> None:
    """Another worker's state takes the place of what a prefix lacks here."""
    loop = decode_loop(128, state_positions=STATE)
    assert cached(loop, attempt("first", size=30)) == 0
    one = attempt("second", size=18)
    first, kv = handed_over(replace(one, request_id="r"), 0, STATE)
    assert loop.scheduler.reserve(one, 0.0) == 16
    fill_in(loop, one, 16, kv)
    tokens = [each._replace(key=each.key._replace(request_id="second")) for each in first.tokens]
    loop.scheduler.admit(one.key, tokens, 0.0)
    made = Outputs().take(run_out(loop)).of(one)
    assert made == expected(replace(one, request_id="r"), 0, STATE)


def test_the_cache_tells_the_ends_behind_which_it_has_a_state() -> None:
    changes: list[Change] = []
    engine = runner(128, state_positions=STATE)
    pool = BlockPool(128, BLOCK_SIZE, changes.append, state_positions=STATE)
    loop = EngineLoop(engine, Scheduler(pool, SchedulerPolicy(), engine.model))
    namespaces = namespace(b"", engine.model.digest), namespace(b"", engine.model.tokenizer_digest)
    chain = PrefixChain(*namespaces, BLOCK_SIZE)
    chain.extend(attempt(size=70).token_ids, 16)
    assert cached(loop, attempt("short", size=64)) == 0
    assert not changes, "the state behind 64 is that of one position more than is computed first"
    assert cached(loop, attempt("long", size=70)) == 0
    assert changes == [(chain.links[-1].units[-1], True)]
    assert cached(loop, attempt("again", size=70)) == 64
    # What needs all of the pool takes the snapshot's blocks, and they are no prefix any more.
    table = pool.allocate(128)
    assert table is not None and changes[1:] == [(changes[0][0], False)]
    pool.release(table)
    loop.idle_check()


def test_an_input_that_needs_the_whole_pool_does_without_what_it_would_find() -> None:
    blocks = STATE_BLOCKS + 9
    loop = decode_loop(blocks, SchedulerPolicy(headroom=1), state_positions=STATE)
    assert cached(loop, attempt("first", size=30, max_tokens=4)) == 0
    assert loop.scheduler.sequences.load.free_blocks == blocks
    assert cached(loop, attempt("second", size=32, max_tokens=4)) == 0


def test_states_are_kept_within_a_share_of_the_pool() -> None:
    engine = runner(64, state_positions=STATE)
    pool = pool_of(engine)
    loop = EngineLoop(engine, Scheduler(pool, SchedulerPolicy(headroom=8), engine.model))
    for number in range(20):
        assert cached(loop, attempt(f"r{number}", size=10, seed=number)) == 0
        assert pool.num_snapshots * STATE_BLOCKS <= 16
    assert cached(loop, attempt("newest", size=10, seed=19)) == 8
    assert cached(loop, attempt("oldest", size=10, seed=0)) == 0


def test_what_is_computed_position_by_position_is_worth_less() -> None:
    """Of models that take up a state only so, a prefix is used where little follows it."""
    engine = runner(128, state_positions=STATE)
    pool = BlockPool(
        128, BLOCK_SIZE, state_positions=STATE, snapshot_positions=BLOCK_SIZE, stepwise=True
    )
    loop = EngineLoop(engine, Scheduler(pool, SchedulerPolicy(), engine.model))
    assert cached(loop, attempt("first", size=30, max_tokens=1)) == 0
    assert cached(loop, attempt("a little", size=35, max_tokens=1)) == 28
    assert cached(loop, attempt("much", size=60, max_tokens=1)) == 0


def test_a_state_that_is_copied_in_the_wrong_place_is_refused() -> None:
    engine = runner(16, state_positions=STATE)

    def copying(*copies: StateCopy) -> StepPlan:
        return StepPlan(1, (Chunk(0, (5,) * 8, 0, ((0, 4),), state_copies=copies),))

    for wrong in (
        (StateCopy(0, ((4, 2),)),),
        (StateCopy(9, ((4, 2),)),),
        (StateCopy(8, ((4, 2),)), StateCopy(4, ((6, 2),))),
        (StateCopy(4, ((4, 1),)),),
        (StateCopy(4, ((3, 2),)),),
        (StateCopy(4, ((4, 2),)), StateCopy(8, ((5, 2),))),
    ):
        with pytest.raises(Internal):
            engine.submit(copying(*wrong))
    engine.submit(copying(StateCopy(4, ((4, 2),)), StateCopy(8, ((6, 2),))))


def test_what_fits_a_pool_is_what_its_states_leave() -> None:
    """The longest input and all that can follow it are served; what is longer is refused."""
    blocks = STATE_BLOCKS + 5
    loop, whole = decode_loop(blocks, state_positions=STATE), 5 * BLOCK_SIZE
    for size in (12, whole - 1):
        one = attempt(f"r{size}", size=size, max_tokens=40)
        loop.scheduler.add(one, 0.0)
        made = Outputs().take(run_out(loop)).of(one)[0]
        assert made == expected(one, 0, STATE)[0][: whole - size]
    with pytest.raises(ContextLengthExceeded):
        loop.scheduler.add(attempt("r", size=whole), 0.0)
    prefill = prefill_loop(blocks, PREFILL, state_positions=STATE)
    prefill.scheduler.add(attempt("r", size=whole), 0.0)
    run_out(prefill)
    with pytest.raises(ContextLengthExceeded):
        prefill.scheduler.add(attempt("s", size=whole + 1), 0.0)


def test_choices_that_can_never_own_their_states_at_once_are_refused() -> None:
    one = attempt(n=2, size=8, max_tokens=3)
    wanted = 2 * STATE_BLOCKS + 3 + 1
    with pytest.raises(InvalidArgument):
        decode_loop(wanted - 1, state_positions=STATE).scheduler.add(one, 0.0)
    loop = decode_loop(wanted, state_positions=STATE)
    loop.scheduler.add(one, 0.0)
    assert Outputs().take(run_out(loop)).of(one) == expected(one, 0, STATE)


def test_room_to_grow_is_kept_beside_states() -> None:
    """The first has 5 blocks of positions and may need 7; the second wants 5 and a state."""
    wanted = STATE_BLOCKS + 5
    for spare, waiting in ((1, 1), (2, 0)):
        policy = SchedulerPolicy(headroom=8)
        loop = decode_loop(2 * wanted + spare, policy, state_positions=STATE)
        loop.scheduler.add(attempt("first", max_tokens=30), 0.0)
        outputs = Outputs()
        while len(outputs.tokens.get(SequenceKey("first", 0, 0), ())) < 8:
            outputs.take(loop.step(0.0))
        loop.scheduler.add(attempt("second", max_tokens=30), 0.0)
        assert loop.plan(0.0) is not None
        assert loop.scheduler.load.waiting_sequences == waiting


def test_a_share_of_a_prefill_workers_pool_counts_states() -> None:
    loop = prefill_loop(16, PREFILL, state_positions=STATE)
    loop.scheduler.live_receivers = 2
    for name in ("r", "s"):
        loop.scheduler.add(attempt(name, size=12), 0.0, keep=True, receiver="x")
    loop.step(1.0)
    assert len(loop.scheduler.sequences.kept) == 1, "two are more than half of the pool"
    loop.scheduler.grant(AttemptKey("r", 0))
    loop.step(2.0)
    assert len(loop.scheduler.sequences.kept) == 2
    for name in ("r", "s"):
        loop.scheduler.release(AttemptKey(name, 0))
    loop.idle_check()
