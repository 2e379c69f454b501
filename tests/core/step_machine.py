"""What the state machines of both schedulers share: attempts, and steps that can be interrupted.

The runner delays steps and draws each token from all KV it can see, and what must come out is known
from a run alone. So a block that is freed too early, shared wrongly or copied too late shows as a
wrong token; a repeated or skipped position, a broken budget, a leak and an attempt without an end
are checked by themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonlm.core.errors import Overloaded
from batonlm.core.kvcache.prefix import Prefix
from batonlm.core.request.attempt import Attempt, AttemptKey
from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.prefixes import PrefixBlocks
from batonlm.testing.fake_runner import KEY_SIZE, VALUE_SIZE
from tests.core.attempts import attempt, handed_over, packed
from tests.depth import examples

EOS_EVERY = 12
NUM_BLOCKS = 24
MOST_IN_FLIGHT = 2

STATES = st.sampled_from([0, 6])
"""Positions that a model's state takes: none, or a block and a half."""

DRAWN = st.builds(
    attempt,
    size=st.integers(1, 30),
    seed=st.integers(0, 2),
    n=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 2, 9, 40]),
    salt=st.sampled_from([b"", b"tenant"]),
    priority=st.integers(0, 1),
)


class Pinned(NamedTuple):
    """A prefix on its way to another worker, or from one."""

    blocks: PrefixBlocks
    one: Attempt
    """Whose beginning it is."""

    def kv(self, first: int, end: int) -> bytes:
        """What these positions must hold: all keys, then all values."""
        whole, count = handed_over(self.one, EOS_EVERY)[1][0], len(self.one.token_ids)
        keys, values = whole[: count * KEY_SIZE], whole[count * KEY_SIZE :]
        return (
            keys[first * KEY_SIZE : end * KEY_SIZE] + values[first * VALUE_SIZE : end * VALUE_SIZE]
        )


class StepMachine(RuleBasedStateMachine):
    """Launches and applies steps as two rules, so that anything can happen in between."""

    loop: EngineLoop
    state_positions: int

    def begin_steps(self) -> None:
        self.now = 0.0
        self.in_flight = 0
        self.number = 0
        self.pinned: list[Pinned] = []
        self.drawn: dict[AttemptKey, Attempt] = {}

    def name(self, one: Attempt) -> Attempt:
        """The same attempt under an id of its own; what is expected of it stays known."""
        self.number += 1
        named = replace(one, request_id=f"r{self.number}")
        self.drawn[named.key] = one
        return named

    def take(self, events: list[Event]) -> None:
        raise NotImplementedError

    def let_go_on(self) -> None:
        """Does what a scheduler may be waiting for."""

    def launch_one(self) -> bool:
        plan = self.loop.plan(self.now)
        self.take(self.loop.scheduler.take_events())
        if plan is None:
            return False
        assert plan.num_tokens <= self.budget()
        self.keeps_budgets(plan)
        self.loop.runner.submit(plan)
        self.in_flight += 1
        return True

    def budget(self) -> int:
        raise NotImplementedError

    def keeps_budgets(self, plan: StepPlan) -> None:
        """What a plan must not be more of."""

    def apply_one(self) -> None:
        self.in_flight -= 1
        self.take(self.loop.apply(self.loop.runner.collect(), self.now))

    @precondition(lambda self: self.in_flight < MOST_IN_FLIGHT)
    @rule()
    def launch(self) -> None:
        self.launch_one()

    @precondition(lambda self: self.in_flight > 0)
    @rule()
    def apply(self) -> None:
        self.apply_one()

    @rule(one=DRAWN)
    def offer_prefix(self, one: Attempt) -> None:
        """Another worker collects what the cache has of an input."""
        prefix = Prefix(one.token_ids, one.cache_salt, one.adapter)
        try:
            blocks = self.loop.scheduler.offer_prefix(prefix)
        except Overloaded:
            return
        if blocks is not None:
            assert 0 < blocks.num_positions <= len(one.token_ids)
            self.pinned.append(Pinned(blocks, one))

    @precondition(lambda self: not self.state_positions)
    @rule(one=DRAWN.filter(lambda one: len(one.token_ids) > 1))
    def expect_prefix(self, one: Attempt) -> None:
        """An input's beginning comes from another worker."""
        prefix = Prefix(one.token_ids[:-1], one.cache_salt, one.adapter)
        blocks = self.loop.scheduler.expect_prefix(prefix, self.now)
        if blocks is not None:
            self.pinned.append(Pinned(blocks, one))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def end_prefix(self, data: st.DataObject) -> None:
        """After all of it was copied, or some."""
        index = data.draw(st.integers(0, len(self.pinned) - 1))
        self.unpin(self.pinned.pop(index), data.draw(st.integers(0, 30)))

    def unpin(self, pinned: Pinned, num_copied: int) -> None:
        blocks, runner = pinned.blocks, self.loop.runner
        first, end = blocks.cached, blocks.num_positions
        if not blocks.arrives:
            kv_now, _ = packed(runner, blocks.extents, 0, end)
            assert kv_now == pinned.kv(0, end), "it changed while it was on offer"
            self.loop.scheduler.release_prefix(blocks)
            return
        end = min(end, first + num_copied)
        if end > first:
            part = memoryview(bytearray(pinned.kv(first, end)))
            runner.unpack(blocks.extents, first, end - first, part)
        self.loop.scheduler.release_prefix(blocks, end)

    @rule(seconds=st.sampled_from([0.001, 0.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def books_agree(self) -> None:
        self.loop.idle_check()

    def run_out(self) -> None:
        for pinned in self.pinned:
            self.unpin(pinned, 30)
        for _ in range(2000):
            self.let_go_on()
            if self.in_flight:
                self.apply_one()
            elif not self.launch_one():
                self.now += 1.0
                if not self.loop.scheduler.has_work:
                    break
        assert not self.loop.scheduler.has_work, "an attempt never ended"
        self.loop.idle_check()
        assert self.loop.scheduler.load.free_blocks == NUM_BLOCKS, "blocks leaked"


PROFILE = settings(max_examples=examples(40), stateful_step_count=50, derandomize=True)
