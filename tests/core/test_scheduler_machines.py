"""Both schedulers under any order of calls, steps and completions, over memory that cannot lie.

The runner delays steps and draws each token from all KV it can see, and what must come out is known
from a run alone. So a block that is freed too early, shared wrongly or copied too late shows as a
wrong token; a repeated or skipped position, a broken budget, a leak and an attempt without an end
are checked by themselves.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.attempt import Attempt, AttemptKey, SequenceKey
from baton.core.block_pool import BlockPool
from baton.core.decode_scheduler import DecodePolicy, DecodeScheduler
from baton.core.events import Computed, Event, Failed, FirstTokens, Planned
from baton.core.loop import EngineLoop
from baton.core.plan import StepPlan
from baton.core.prefill_scheduler import PrefillPolicy, PrefillScheduler
from baton.core.scheduling import Scheduler, first_come, shortest_remaining
from tests.core.attempts import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Outputs,
    attempt,
    expected,
    fill_in,
    handed_over,
    runner,
)

EOS_EVERY = 12
NUM_BLOCKS = 24
MOST_IN_FLIGHT = 2
MOST_SEQUENCES = 8

DRAWN = st.builds(
    attempt,
    size=st.integers(1, 30),
    seed=st.integers(0, 2),
    n=st.integers(1, 3),
    max_tokens=st.sampled_from([1, 2, 9, 40]),
    salt=st.sampled_from([b"", b"tenant"]),
    priority=st.integers(0, 1),
)


class StepMachine(RuleBasedStateMachine):
    """Launches and applies steps as two rules, so that anything can happen in between."""

    loop: EngineLoop[Scheduler]

    def begin_steps(self) -> None:
        self.now = 0.0
        self.in_flight = 0
        self.number = 0
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

    @rule(seconds=st.sampled_from([0.001, 0.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def books_agree(self) -> None:
        self.loop.idle_check()

    def run_out(self) -> None:
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


class PrefillMachine(StepMachine):
    loop: EngineLoop[PrefillScheduler]

    @initialize(fcfs=st.booleans(), token_budget=st.sampled_from([4, 13, 64]))
    def begin(self, fcfs: bool, token_budget: int) -> None:
        self.begin_steps()
        self.token_budget = token_budget
        policy = PrefillPolicy(
            token_budget=token_budget,
            batch_window_s=0.01,
            order=first_come if fcfs else shortest_remaining(10.0),
        )
        engine = runner(NUM_BLOCKS, delay_steps=1, eos_every=EOS_EVERY)
        scheduler = PrefillScheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), policy, engine.model)
        scheduler.live_collectors = 2
        self.loop = EngineLoop(engine, scheduler)
        self.live: set[AttemptKey] = set()
        self.kept: set[AttemptKey] = set()
        self.planned: set[AttemptKey] = set()
        self.computed: dict[AttemptKey, int] = {}

    def budget(self) -> int:
        return self.token_budget

    @rule(one=DRAWN, keep=st.booleans(), collector=st.sampled_from("xy"))
    def add(self, one: Attempt, keep: bool, collector: str) -> None:
        named = self.name(one)
        self.loop.scheduler.add(named, self.now, keep=keep, collector=collector)
        self.live.add(named.key)
        if keep:
            self.kept.add(named.key)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        self.loop.scheduler.cancel(key)
        self.forget(key)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.kept)))
        self.loop.scheduler.release(key)
        self.kept.discard(key)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        self.loop.scheduler.grant(data.draw(st.sampled_from(sorted(self.kept))))

    def forget(self, key: AttemptKey) -> None:
        self.live.discard(key)
        self.kept.discard(key)

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, Failed)
            if isinstance(event, Planned):
                assert event.key not in self.planned
                self.planned.add(event.key)
            elif isinstance(event, Computed) and event.key in self.live:
                before = self.computed.get(event.key, event.cached)
                assert event.key in self.planned and event.num_positions > before
                self.computed[event.key] = event.num_positions
            elif isinstance(event, FirstTokens):
                self.first(event)

    def first(self, event: FirstTokens) -> None:
        assert event.key in self.live, "told twice, or after a cancel"
        one = self.drawn[event.key]
        assert self.computed[event.key] == len(one.token_ids)
        self.live.discard(event.key)
        wanted = expected(one, EOS_EVERY)
        assert {t.key.choice: list(t.token_ids) for t in event.tokens} == {
            choice: tokens[:1] for choice, tokens in wanted.items()
        }
        if event.key in self.kept:
            self.holds_kv(event.key, one)

    def holds_kv(self, key: AttemptKey, one: Attempt) -> None:
        _, kv = handed_over(one, EOS_EVERY)
        found = bytearray(len(kv))
        extents = self.loop.scheduler.extents(key)
        self.loop.runner.pack(extents, 0, len(one.token_ids), memoryview(found))
        assert found == kv

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for key in self.kept - self.live:
            self.holds_kv(key, self.drawn[key])
        for key in self.kept:
            self.loop.scheduler.release(key)
        self.kept.clear()
        self.run_out()
        assert not self.live, "an attempt got no answer"


class DecodeMachine(StepMachine):
    loop: EngineLoop[DecodeScheduler]

    @initialize(
        headroom=st.sampled_from([1, 6, 20]),
        prefill_budget=st.sampled_from([4, 10, 64]),
        swap=st.sampled_from([(0, 0), (64, 0), (9, 12), (0, 30)]),
        pipelined=st.booleans(),
    )
    def begin(
        self, headroom: int, prefill_budget: int, swap: tuple[int, int], pipelined: bool
    ) -> None:
        self.begin_steps()
        policy = DecodePolicy(
            max_sequences=MOST_SEQUENCES,
            token_budget=64,
            prefill_budget=prefill_budget,
            headroom=headroom,
        )
        engine = runner(
            NUM_BLOCKS, delay_steps=1, eos_every=EOS_EVERY, num_swap_blocks=swap, depth=2
        )
        scheduler = DecodeScheduler(
            BlockPool(NUM_BLOCKS, BLOCK_SIZE),
            policy,
            engine.model,
            num_swap_blocks=swap,
            pipelined=pipelined,
        )
        self.loop = EngineLoop(engine, scheduler)
        self.prefill_budget = prefill_budget
        self.swap_blocks = sum(swap)
        self.outputs = Outputs()
        self.wanted: set[SequenceKey] = set()
        self.reserved: dict[AttemptKey, int] = {}
        self.limits: dict[AttemptKey, int] = {}
        self.confirmed: dict[SequenceKey, int] = {}

    def budget(self) -> int:
        return 64

    def keeps_budgets(self, plan: StepPlan) -> None:
        rows = [chunk for chunk in plan.chunks if chunk.first_position and chunk.samples]
        assert plan.work.rows <= min(len(rows), MOST_SEQUENCES)
        assert plan.work.rows + plan.work.prefill == plan.num_tokens
        assert not plan.work.rows or plan.work.prefill <= self.prefill_budget

    def take(self, events: list[Event]) -> None:
        assert not any(isinstance(event, Failed) for event in events)
        self.outputs.take(events)
        for key, tokens in self.outputs.tokens.items():
            one = self.drawn[AttemptKey(key.request_id, key.attempt)]
            assert expected(one, EOS_EVERY)[key.choice][: len(tokens)] == tokens

    def fits(self, one: Attempt) -> bool:
        """Choices of a long input can be too many for this pool; that is tested elsewhere."""
        whole = -(-min(len(one.token_ids) + 20, MAX_MODEL_LEN) // BLOCK_SIZE)
        return whole + (len(one.choices) - 1) * 6 <= NUM_BLOCKS

    @rule(
        one=DRAWN.filter(lambda one: one.choices == (0,) or len(one.token_ids) < 20),
        limit=st.sampled_from([0, 0, 2]),
    )
    def add(self, one: Attempt, limit: int) -> None:
        if not self.fits(one):
            return
        named = self.name(one)
        self.loop.scheduler.add(named, self.now, max_unconfirmed=limit)
        self.limits[named.key] = limit
        self.wanted |= set(named.keys())

    @rule(one=DRAWN, limit=st.sampled_from([0, 0, 2]))
    def reserve(self, one: Attempt, limit: int) -> None:
        if not self.fits(one):
            return
        named = self.name(one)
        position = self.loop.scheduler.reserve(named, self.now, max_unconfirmed=limit)
        if position is not None:
            self.reserved[named.key] = position
            self.limits[named.key] = limit
            self.wanted |= set(named.keys())

    def let_go_on(self) -> None:
        self.confirm()

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.admit_one(data.draw(st.sampled_from(sorted(self.reserved))))

    def admit_one(self, key: AttemptKey) -> None:
        position = self.reserved.pop(key)
        if not any(key == (k.request_id, k.attempt) for k in self.wanted):
            return
        one = self.drawn[key]
        first, kv = handed_over(one, EOS_EVERY)
        fill_in(self.loop, replace(one, request_id=key.request_id), position, kv)
        tokens = [t._replace(key=t.key._replace(request_id=key.request_id)) for t in first.tokens]
        self.loop.scheduler.admit(key, tokens, self.now)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), all_choices=st.booleans())
    def cancel(self, data: st.DataObject, all_choices: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.wanted)))
        attempt_key = AttemptKey(key.request_id, key.attempt)
        self.loop.scheduler.cancel(attempt_key, () if all_choices else (key.choice,))
        self.take(self.loop.scheduler.take_events())
        gone = {
            k for k in self.wanted if k == key or (all_choices and k.request_id == key.request_id)
        }
        self.wanted -= gone
        self.outputs.ended |= gone

    @rule()
    def confirm_all(self) -> None:
        self.confirm()

    def confirm(self) -> None:
        for key, tokens in self.outputs.tokens.items():
            self.confirmed[key] = len(tokens)
            self.loop.scheduler.confirm(key, len(tokens))

    @invariant()
    def nobody_is_too_far_ahead(self) -> None:
        for key, tokens in self.outputs.tokens.items():
            limit = self.limits[AttemptKey(key.request_id, key.attempt)]
            assert not limit or len(tokens) - self.confirmed.get(key, 0) <= limit

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for key in list(self.reserved):
            self.admit_one(key)
        self.run_out()
        space = self.loop.scheduler._roster.swap
        assert sum(space.num_free) == self.swap_blocks, "swap blocks leaked"
        for wanted in self.wanted:
            one = self.drawn[AttemptKey(wanted.request_id, wanted.attempt)]
            assert self.outputs.tokens[wanted] == expected(one, EOS_EVERY)[wanted.choice]


PROFILE = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True)
PrefillMachine.TestCase.settings = PROFILE
DecodeMachine.TestCase.settings = PROFILE
TestPrefill = PrefillMachine.TestCase
TestDecode = DecodeMachine.TestCase
