"""A decode worker's scheduler under any order of calls, steps and completions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from batonlm.core.request.attempt import Attempt, AttemptKey, SequenceKey
from batonlm.core.scheduler.events import Adopted, AttemptFailed, Event, Held
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import StepPlan
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from tests.core.attempts import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Outputs,
    expected,
    fill_in,
    handed_over,
    packed,
    pool_of,
    runner,
    unpacked,
)
from tests.core.drafting import Foretold
from tests.core.step_machine import DRAWN, EOS_EVERY, NUM_BLOCKS, PROFILE, STATES, StepMachine

MOST_SEQUENCES = 8


class DecodeMachine(StepMachine):
    loop: EngineLoop

    @initialize(
        headroom=st.sampled_from([1, 6, 20]),
        prefill_budget=st.sampled_from([4, 10, 64]),
        swap=st.sampled_from([(0, 0), (64, 0), (9, 12), (0, 30)]),
        state_positions=STATES,
        wrong_every=st.sampled_from([-1, 0, 3]),
    )
    def begin(
        self,
        headroom: int,
        prefill_budget: int,
        swap: tuple[int, int],
        state_positions: int,
        wrong_every: int,
    ) -> None:
        """wrong_every: of drafts, see `Foretold`; -1: there are none."""
        self.begin_steps()
        self.state_positions = state_positions
        policy = SchedulerPolicy(
            max_sequences=MOST_SEQUENCES,
            token_budget=64,
            prefill_budget=prefill_budget,
            headroom=headroom,
        )
        engine = runner(
            NUM_BLOCKS,
            delay_steps=1,
            eos_every=EOS_EVERY,
            num_swap_blocks=swap,
            depth=2,
            state_positions=state_positions,
        )
        self.drafter = Foretold(wrong_every) if wrong_every >= 0 else None
        scheduler = Scheduler(
            pool_of(engine),
            policy,
            engine.model,
            num_swap_blocks=swap,
            drafter=self.drafter,
        )
        self.loop = EngineLoop(engine, scheduler)
        self.prefill_budget = prefill_budget
        self.swap_blocks = sum(swap)
        self.outputs = Outputs()
        self.wanted: set[SequenceKey] = set()
        self.reserved: dict[AttemptKey, int] = {}
        self.limits: dict[AttemptKey, int] = {}
        self.confirmed: dict[SequenceKey, int] = {}
        self.stopping: set[SequenceKey] = set()
        self.held: dict[SequenceKey, Held] = {}
        self.moving: dict[SequenceKey, tuple[Attempt, int]] = {}
        self.orphans: set[SequenceKey] = set()

    def budget(self) -> int:
        return 64

    def keeps_budgets(self, plan: StepPlan) -> None:
        rows = [chunk for chunk in plan.chunks if chunk.first_position and chunk.samples]
        assert plan.work.rows <= min(len(rows), MOST_SEQUENCES)
        assert plan.work.rows + plan.work.prefill + plan.work.drafts == plan.num_tokens
        assert sum(len(chunk.samples) for chunk in plan.chunks) <= MOST_SEQUENCES
        assert not plan.work.rows or plan.work.prefill <= self.prefill_budget

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AttemptFailed):
                self.dropped(event)
        self.outputs.take(events)
        for key, tokens in self.outputs.tokens.items():
            one = self.drawn[AttemptKey(key.request_id, key.attempt)]
            assert self.expected(one)[key.choice][: len(tokens)] == tokens
        for event in events:
            if isinstance(event, Held):
                self.stopped(event)

    def name(self, one: Attempt) -> Attempt:
        if self.drafter is not None:
            for tokens in self.expected(one).values():
                self.drafter.foretell(one.token_ids, tokens)
        return super().name(one)

    def dropped(self, event: AttemptFailed) -> None:
        """Nothing fails but what has no router."""
        gone = {SequenceKey(event.key.request_id, c, event.key.attempt) for c in event.choices}
        assert gone and gone <= self.orphans
        self.orphans -= gone
        self.wanted -= gone
        self.outputs.ended |= gone

    def expected(self, one: Attempt) -> dict[int, list[int]]:
        return expected(one, EOS_EVERY, self.state_positions)

    def stopped(self, event: Held) -> None:
        """All is told, and nothing more comes."""
        self.stopping.remove(event.key)
        self.held[event.key] = event
        output = self.outputs.tokens[event.key]
        assert event.newest.position == len(output) - 1
        assert list(event.newest.token_ids) == output[-1:]
        one = self.drawn[AttemptKey(event.key.request_id, event.key.attempt)]
        assert event.num_positions == one.num_prompt_tokens + len(output) - 1
        self.outputs.ended.add(event.key)

    def fits(self, one: Attempt) -> bool:
        """Choices of a long input can be too many for this pool; that is tested elsewhere."""
        whole = -(-min(len(one.token_ids) + 20, MAX_MODEL_LEN) // BLOCK_SIZE)
        state = -(-self.state_positions // BLOCK_SIZE)
        return whole + state + (len(one.choices) - 1) * (6 + state) <= NUM_BLOCKS

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
        for key in list(self.held):
            self.cancel_one(key, all_choices=False)

    @precondition(lambda self: self.wanted)
    @rule(last=st.booleans())
    def hold(self, last: bool) -> None:
        self.hold_one(last)

    def hold_one(self, last: bool) -> None:
        """The first or the last that can be."""
        for key in sorted(self.wanted, reverse=last):
            if self.loop.scheduler.hold(key):
                assert key not in self.stopping and key not in self.held
                self.stopping.add(key)
                break
        self.take(self.loop.scheduler.take_events())

    @precondition(lambda self: self.in_flight and self.wanted)
    @rule(last=st.booleans())
    def apply_and_hold(self, last: bool) -> None:
        """Between two steps, when forks may not be copied yet."""
        self.apply_one()
        self.hold_one(last)

    @precondition(lambda self: self.held.keys() - self.moving.keys())
    @rule(data=st.data())
    def begin_to_move(self, data: st.DataObject) -> None:
        """Another worker reserves: here the same one, so that both ends are under one roof."""
        key = data.draw(st.sampled_from(sorted(self.held.keys() - self.moving.keys())))
        next_one = self.continuation(key)
        limit = self.limits[AttemptKey(key.request_id, key.attempt)]
        position = self.loop.scheduler.reserve(next_one, self.now, max_unconfirmed=limit)
        if position is not None:
            self.know(next_one, key)
            self.moving[key] = (next_one, position)

    def continuation(self, key: SequenceKey) -> Attempt:
        """The attempt that goes on with a held sequence."""
        one = self.drawn[AttemptKey(key.request_id, key.attempt)]
        self.number += 1
        return replace(
            one,
            request_id=key.request_id,
            attempt=self.number,
            choices=(key.choice,),
            token_ids=(
                *one.token_ids[: one.num_prompt_tokens],
                *self.outputs.tokens[key][:-1],
            ),
        )

    def know(self, next_one: Attempt, key: SequenceKey) -> None:
        """It continues a sequence."""
        whole = AttemptKey(key.request_id, key.attempt)
        self.drawn[next_one.key], self.limits[next_one.key] = self.drawn[whole], self.limits[whole]

    def goes_on(self, next_one: Attempt, key: SequenceKey) -> None:
        """From now on with its tokens."""
        (replacement,) = next_one.keys()
        self.outputs.tokens[replacement] = self.outputs.tokens[key][:-1]
        self.confirmed[replacement] = next_one.position
        self.wanted = (self.wanted - {key}) | {replacement}

    @precondition(lambda self: self.held.keys() - self.moving.keys())
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        """No other worker got its KV."""
        key = data.draw(st.sampled_from(sorted(self.held.keys() - self.moving.keys())))
        next_one = self.continuation(key)
        del self.held[key]
        self.know(next_one, key)
        self.goes_on(next_one, key)
        self.loop.scheduler.resume(key, next_one)
        self.take(self.loop.scheduler.take_events())

    def begun(self) -> list[SequenceKey]:
        """What another router could go on with."""
        tokens, stopped = self.outputs.tokens, self.stopping | self.held.keys()
        return sorted(key for key in self.wanted - stopped if tokens.get(key))

    @precondition(lambda self: self.begun())
    @rule(data=st.data())
    def orphan(self, data: st.DataObject) -> None:
        """Its router is gone."""
        key = data.draw(st.sampled_from(self.begun()))
        self.orphans.add(key)
        self.loop.scheduler.orphan([key])
        self.take(self.loop.scheduler.take_events())

    @precondition(lambda self: self.begun())
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """Another router's request goes on with a sequence."""
        key = data.draw(st.sampled_from(self.begun()))
        attempt_key, scheduler = AttemptKey(key.request_id, key.attempt), self.loop.scheduler
        if scheduler.sequences.find(key) is None:
            # It has ended.
            return
        one = self.drawn[attempt_key]
        self.number += 1
        new = replace(
            one,
            request_id=f"r{self.number}",
            choices=(key.choice,),
            token_ids=one.token_ids[: one.num_prompt_tokens],
        )
        self.drawn[new.key], self.limits[new.key] = one, self.limits[attempt_key]
        (replacement,) = new.keys()
        scheduler.adopt(key, new)
        events = scheduler.take_events()
        (adopted,) = (event for event in events if isinstance(event, Adopted))
        assert adopted.tokens.key == replacement and adopted.tokens.position == 0
        assert list(adopted.tokens.token_ids) == self.outputs.tokens[key]
        self.outputs.tokens[replacement] = list(self.outputs.tokens[key])
        self.outputs.ended.add(key)
        self.confirmed[replacement] = self.confirmed.get(key, 0)
        self.orphans.discard(key)
        self.wanted = (self.wanted - {key}) | {replacement}
        self.take(events)

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def end_moving(self, data: st.DataObject) -> None:
        self.move_one(data.draw(st.sampled_from(sorted(self.moving))))

    def move_one(self, key: SequenceKey) -> None:
        (next_one, position), held = self.moving.pop(key), self.held.pop(key)
        scheduler, runner = self.loop.scheduler, self.loop.runner
        kv = packed(runner, held.extents, position, held.num_positions)
        unpacked(runner, scheduler.extents(next_one.key), position, held.num_positions, kv)
        self.goes_on(next_one, key)
        scheduler.admit(next_one.key, (held.newest,), self.now)
        scheduler.cancel(AttemptKey(key.request_id, key.attempt), (key.choice,))
        self.take(scheduler.take_events())

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.admit_one(data.draw(st.sampled_from(sorted(self.reserved))))

    def admit_one(self, key: AttemptKey) -> None:
        position = self.reserved.pop(key)
        if not any(key == (k.request_id, k.attempt) for k in self.wanted):
            return
        one = self.drawn[key]
        first, kv = handed_over(one, EOS_EVERY, self.state_positions)
        fill_in(self.loop, replace(one, request_id=key.request_id), position, kv)
        tokens = [t._replace(key=t.key._replace(request_id=key.request_id)) for t in first.tokens]
        self.loop.scheduler.admit(key, tokens, self.now)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), all_choices=st.booleans())
    def cancel(self, data: st.DataObject, all_choices: bool) -> None:
        self.cancel_one(data.draw(st.sampled_from(sorted(self.wanted))), all_choices)

    def cancel_one(self, key: SequenceKey, all_choices: bool) -> None:
        attempt_key = AttemptKey(key.request_id, key.attempt)
        self.loop.scheduler.cancel(attempt_key, () if all_choices else (key.choice,))
        self.take(self.loop.scheduler.take_events())
        gone = {
            k
            for k in self.wanted
            if k == key or (all_choices and (k.request_id, k.attempt) == attempt_key)
        }
        for one in gone:
            self.stopping.discard(one)
            self.held.pop(one, None)
            if one in self.moving:
                self.loop.scheduler.cancel(self.moving.pop(one)[0].key)
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
        for sequence in list(self.moving):
            self.move_one(sequence)
        self.run_out()
        space = self.loop.scheduler.sequences.swap
        assert sum(space.num_free) == self.swap_blocks, "swap blocks leaked"
        assert self.drafter is None or not self.drafter.known, "drafts are kept for what is gone"
        for wanted in self.wanted:
            one = self.drawn[AttemptKey(wanted.request_id, wanted.attempt)]
            assert self.outputs.tokens[wanted] == self.expected(one)[wanted.choice]


DecodeMachine.TestCase.settings = settings(PROFILE, max_examples=100)
TestDecode = DecodeMachine.TestCase
