"""A prefill worker's scheduler under any order of calls, steps and completions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.attempt import Attempt, AttemptKey
from batonlm.core.scheduler.events import AttemptFailed, Computed, Event, FirstTokens, Planned
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.policy import PREFILL, first_come, shortest_remaining
from batonlm.core.scheduler.scheduler import Scheduler
from tests.core.attempts import expected, handed_over, packed, pool_of, runner
from tests.core.step_machine import DRAWN, EOS_EVERY, NUM_BLOCKS, PROFILE, STATES, StepMachine


class PrefillMachine(StepMachine):
    loop: EngineLoop

    @initialize(
        fcfs=st.booleans(), token_budget=st.sampled_from([4, 13, 64]), state_positions=STATES
    )
    def begin(self, fcfs: bool, token_budget: int, state_positions: int) -> None:
        self.begin_steps()
        self.state_positions = state_positions
        self.token_budget = token_budget
        policy = replace(
            PREFILL,
            token_budget=token_budget,
            batch_window_s=0.01,
            order=first_come if fcfs else shortest_remaining(10.0),
        )
        engine = runner(
            NUM_BLOCKS, delay_steps=1, eos_every=EOS_EVERY, state_positions=state_positions
        )
        scheduler = Scheduler(pool_of(engine), policy, engine.model)
        scheduler.live_receivers = 2
        self.loop = EngineLoop(engine, scheduler)
        self.live: set[AttemptKey] = set()
        self.kept: set[AttemptKey] = set()
        self.planned: dict[AttemptKey, Extents] = {}
        self.computed: dict[AttemptKey, int] = {}

    def budget(self) -> int:
        return self.token_budget

    @rule(one=DRAWN, keep=st.booleans(), receiver=st.sampled_from("xy"))
    def add(self, one: Attempt, keep: bool, receiver: str) -> None:
        named = self.name(one)
        self.loop.scheduler.add(named, self.now, keep=keep, receiver=receiver)
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
            assert not isinstance(event, AttemptFailed)
            if isinstance(event, Planned):
                assert event.key not in self.planned
                self.planned[event.key] = event.extents
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
        wanted = expected(one, EOS_EVERY, self.state_positions)
        assert {t.key.choice: list(t.token_ids) for t in event.tokens} == {
            choice: tokens[:1] for choice, tokens in wanted.items()
        }
        if event.key in self.kept:
            self.holds_kv(event.key, one)

    def holds_kv(self, key: AttemptKey, one: Attempt) -> None:
        _, kv = handed_over(one, EOS_EVERY, self.state_positions)
        assert packed(self.loop.runner, self.planned[key], 0, len(one.token_ids)) == kv

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


PrefillMachine.TestCase.settings = PROFILE
TestPrefill = PrefillMachine.TestCase
