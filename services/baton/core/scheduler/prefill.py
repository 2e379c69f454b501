"""PrefillScheduler, which prompts are computed next.

One loop fills steps by token budget. A step is due as soon as enough tokens wait to fill it or the
oldest of them has waited for the batch window, whichever comes first. Inputs that do not fit go on
in the next step, chunk by chunk. An input takes all its blocks before its first chunk.

What is kept for a decode worker stays pinned until it is released. A decode worker that has not
granted yet (it has reserved no blocks of its own) can pin only its share of the pool; further
inputs for it are passed over and hold up nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from baton.core.errors import BatonError, DeadlineExceeded, Internal, InvalidArgument
from baton.core.kvcache.block_pool import BlockPool, InvariantBroken, blocks_for
from baton.core.request.attempt import Attempt, AttemptKey, ChoiceTokens
from baton.core.request.model import ModelDescription
from baton.core.routing.speed import WorkerSpeed
from baton.core.scheduler.deficits import Deficits
from baton.core.scheduler.events import Computed, Event, Failed, FirstTokens, Planned
from baton.core.scheduler.intake import AttemptIntake
from baton.core.scheduler.plan import Chunk, CompiledGrammar, SampledToken, StepPlan, StepResult
from baton.core.scheduler.scheduler import (
    Load,
    Order,
    QueueLimit,
    earliest,
    shortest_remaining,
)
from baton.core.scheduler.sequence import SequenceEvent, SequenceGroup
from baton.core.scheduler.step_cost import PrefillCost

# Turns, which tenant's input a worker computes next.
#
# Within a priority class tenants take turns by deficit round robin over computed tokens
# (`Deficits`); within a tenant the given order stays.


class Turns:
    """quantum: tokens that a tenant of weight 1 is served before it is another one's turn."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._classes: dict[int, Deficits] = {}

    def order(self, inputs: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """All of them, sorted by priority class before, so that tenants take turns."""
        found: list[SequenceGroup] = []
        present = set()
        for priority, group in groupby(inputs, key=lambda shared: shared.priority):
            present.add(priority)
            deficits = self._classes.setdefault(priority, Deficits(self._quantum))
            found += _interleaved(deficits, list(group))
        for gone in self._classes.keys() - present:
            del self._classes[gone]
        return found

    def served(self, shared: SequenceGroup, tokens: int) -> None:
        """So many positions of an input are computed."""
        self._classes[shared.priority].charge(shared.tenant, tokens)


def _interleaved(deficits: Deficits, inputs: Sequence[SequenceGroup]) -> list[SequenceGroup]:
    """In the order in which they would be served if there was nothing else to wait for."""
    of: dict[str, list[SequenceGroup]] = {}
    for shared in inputs:
        of.setdefault(shared.tenant, []).append(shared)
    for tenant in deficits.members() - of.keys():
        deficits.leave(tenant)
    for tenant, own in of.items():
        deficits.join(tenant, own[0].weight)
    if len(of) == 1:
        return list(inputs)
    found: list[SequenceGroup] = []
    trial = deficits.copy()
    while len(found) < len(inputs):
        tenant = trial.order()[0]
        shared = of[tenant].pop(0)
        trial.charge(tenant, shared.remaining)
        found.append(shared)
        if not of[tenant]:
            trial.leave(tenant)
    return found


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """token_budget: positions a step computes at most. batch_window_s: how long an input waits for
    company. starving_after_s: an input that found no blocks for so long lets no other one start.
    order: within a priority class and tenant. quantum: positions a tenant is served before it is
    another one's turn, times its weight; 0: tenants do not take turns.
    """

    token_budget: int = 2048
    batch_window_s: float = 0.002
    starving_after_s: float = 2.0
    limit: QueueLimit = field(default_factory=QueueLimit)
    order: Order = field(default_factory=lambda: shortest_remaining(aging_tokens_per_s=1000.0))
    quantum: int = 512


class _Job:
    """One attempt here. pinned_for: the receiver whose share its blocks count against, or ""."""

    __slots__ = ("input", "keep", "pinned_for")

    def __init__(self, shared: SequenceGroup, keep: bool, receiver: str):
        self.input = shared
        self.keep = keep
        self.pinned_for = receiver if keep else ""


class _Launched(NamedTuple):
    step: int
    chunks: list[tuple[_Job, Chunk]]


class PrefillScheduler:
    """Implements `Scheduler`. live_receivers: decode workers that share the pool (settable)."""

    def __init__(
        self,
        pool: BlockPool,
        policy: PrefillPolicy,
        model: ModelDescription,
    ):
        if policy.token_budget < pool.block_size:
            raise ValueError("token_budget must be at least one block, or nothing can run")
        self.live_receivers = 1
        self._pool = pool
        self._policy = policy
        self._turns = Turns(policy.quantum) if policy.quantum else None
        self._intake = AttemptIntake(
            model,
            block_size=pool.block_size,
            max_positions=min(model.max_model_len, pool.num_blocks * pool.block_size + 1),
            max_model_len=model.max_model_len,
        )
        self._jobs: dict[AttemptKey, _Job] = {}
        self._unfinished: dict[AttemptKey, _Job] = {}
        self._launched: deque[_Launched] = deque()
        self._events: list[Event] = []
        self._next_step = 1
        self._cost = PrefillCost()

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def load(self) -> Load:
        waiting = [job.input for job in self._unfinished.values() if job.input.started is None]
        return Load(
            waiting_sequences=sum(len(i.sequences) for i in waiting),
            waiting_tokens=sum(job.input.remaining for job in self._unfinished.values()),
            running_sequences=sum(
                len(job.input.sequences)
                for job in self._unfinished.values()
                if job.input.started is not None
            ),
            free_blocks=self._pool.num_free,
        )

    @property
    def speed(self) -> WorkerSpeed:
        step_s, position_s, read_s = self._cost.curve
        return WorkerSpeed(
            prefill_step_s=step_s,
            prefill_position_s=position_s,
            prefill_read_s=read_s,
            prefill_step_tokens=self._policy.token_budget,
        )

    @property
    def preemptions(self) -> dict[str, int]:
        """None ever: an input that has its blocks keeps them."""
        return {}

    def add(
        self,
        attempt: Attempt,
        now: float,
        *,
        keep: bool,
        receiver: str = "",
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Queues an attempt. keep: its KV stays pinned after token 0 until `release`.

        receiver: who will collect what is kept; it counts against that worker's share until
        `grant`. grammar: the attempt's, compiled. Raises InvalidArgument, ContextLengthExceeded or
        Overloaded; then nothing is kept.
        """
        shared = self._intake.admit(attempt, now, grammar=grammar)
        if attempt.key in self._jobs:
            raise InvalidArgument("This attempt already runs here.", field="attempt")
        self._policy.limit.check(self.load, attempt)
        job = _Job(shared, keep, receiver)
        self._jobs[attempt.key] = self._unfinished[attempt.key] = job

    def grant(self, key: AttemptKey) -> None:
        """The receiver has reserved its blocks. Unknown attempts are no error."""
        if key in self._jobs:
            self._jobs[key].pinned_for = ""

    def release(self, key: AttemptKey) -> None:
        """The KV is not needed any more. One that still computes goes on, and is not kept.

        Unknown attempts are no error.
        """
        job = self._jobs.get(key)
        if job is None:
            return
        job.keep = False
        if key not in self._unfinished:
            self._end(job, SequenceEvent.FINISH)

    def cancel(self, key: AttemptKey) -> None:
        """Ends an attempt, whatever it does. Unknown ones are no error; no event follows."""
        if key in self._jobs:
            self._end(self._jobs[key], SequenceEvent.CANCEL)

    def plan(self, now: float) -> StepPlan | None:
        self._expire(now)
        if not self._due(now):
            return None
        chunks = self._fill(now)
        if not chunks:
            return None
        step, self._next_step = self._next_step, self._next_step + 1
        self._launched.append(_Launched(step, chunks))
        self._pool.launched(step)
        return StepPlan(step, tuple(chunk for _, chunk in chunks))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        # Rows of logits take time that no other input's positions take.
        if not plan.scores:
            self._cost.observe(plan.chunks, seconds)

    def apply(self, result: StepResult, now: float) -> list[Event]:
        if not self._launched or self._launched[0].step != result.step:
            raise Internal(f"step {result.step} is not the oldest one")
        launched = self._launched.popleft()
        self._pool.completed(result.step)
        tokens = {token.sequence_id: token for token in result.tokens}
        for job, chunk in launched.chunks:
            job.input.in_flight -= 1
            if job.input.table is None:
                continue
            end = chunk.end_position
            job.input.note_scores(result)
            job.input.publish(self._pool, end)
            self._events.append(Computed(job.input.key, end, job.input.cached))
            if chunk.samples:
                self._finish(job, tokens, now)
        return self.take_events()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def next_wake(self, now: float) -> float | None:
        window = self._policy.batch_window_s
        inputs = [job.input for job in self._unfinished.values() if job.input.started is None]
        return earliest([t for i in inputs for t in (i.arrived + window, i.deadline)], now)

    def check(self) -> None:
        self._pool.check()
        tables = sum(job.input.num_tables for job in self._jobs.values())
        if tables != self._pool.num_tables:
            raise InvariantBroken(f"{self._pool.num_tables} tables are owned, {tables} in use")

    def _due(self, now: float) -> bool:
        """Whether a step is worth running: by size, by timer, or because one goes on anyway."""
        waiting = 0
        for job in self._unfinished.values():
            if job.input.started is not None:
                return True
            if now >= job.input.arrived + self._policy.batch_window_s:
                return True
            waiting += job.input.remaining
        return waiting >= self._policy.token_budget

    def _fill(self, now: float) -> list[tuple[_Job, Chunk]]:
        budget = self._policy.token_budget
        chunks: list[tuple[_Job, Chunk]] = []
        may_start, may_score = True, True
        ordered = self._policy.order([job.input for job in self._unfinished.values()], now)
        if self._turns is not None:
            ordered = self._turns.order(ordered)
        for shared in ordered:
            job = self._jobs[shared.key]
            if not shared.remaining or budget < min(shared.remaining, self._pool.block_size):
                continue
            if shared.scores is not None and not may_score:
                continue
            if shared.started is None:
                if not may_start or not self._within_share(job):
                    continue
                if not self._start(job, now):
                    may_start = now - shared.arrived < self._policy.starving_after_s
                    continue
            chunk = shared.next_chunk(budget, self._pool.block_size)
            chunks.append((job, chunk))
            may_score = may_score and chunk.scored is None
            budget -= len(chunk.token_ids)
            if self._turns is not None:
                self._turns.served(shared, len(chunk.token_ids))
        return chunks

    def _within_share(self, job: _Job) -> bool:
        """Whether a worker that has not granted yet may pin this much more of the pool."""
        if not job.pinned_for:
            return True
        pinned = [
            len(other.input.table.blocks)
            for other in self._jobs.values()
            if other.pinned_for == job.pinned_for and other.input.table is not None
        ]
        wanted = blocks_for(len(job.input.tokens), self._pool.block_size)
        share = self._pool.num_blocks // max(1, self.live_receivers)
        return not pinned or sum(pinned) + wanted <= share

    def _start(self, job: _Job, now: float) -> bool:
        """Takes an input's blocks. The last position is always computed: its logits are needed."""
        shared = job.input
        most = len(shared.tokens) - 1
        if not shared.take_blocks(self._pool, max_cached=most):
            return False
        shared.started = now
        shared.move(SequenceEvent.START)
        assert shared.table is not None
        self._events.append(Planned(shared.key, shared.table.extents))
        return True

    def _finish(self, job: _Job, tokens: dict[int, SampledToken], now: float) -> None:
        """All positions are computed: tells token 0 of every choice, or that there is none."""
        shared = job.input
        without = next((s for s in shared.sequences if s.id not in tokens), None)
        if without is not None:
            return self._fail(job, without.without_token())
        first: list[ChoiceTokens] = []
        for sequence in shared.sequences:
            sampled = tokens[sequence.id]
            first.append(sequence.accept(sampled.token_id, sampled.logprobs))
        started = now if shared.started is None else shared.started
        self._events.append(
            FirstTokens(
                shared.key,
                tuple(first),
                shared.cached,
                started - shared.arrived,
                now - started,
                shared.prompt_logprobs,
            )
        )
        if job.keep:
            del self._unfinished[shared.key]
            shared.move(SequenceEvent.HOLD)
        else:
            self._end(job, SequenceEvent.FINISH)

    def _expire(self, now: float) -> None:
        """Drops what is out of time before it costs any."""
        for job in list(self._unfinished.values()):
            deadline = job.input.deadline
            if job.input.started is None and deadline is not None and deadline <= now:
                self._fail(job, DeadlineExceeded("The request ran out of time in the queue."))

    def _fail(self, job: _Job, error: BatonError) -> None:
        shared = job.input
        choices = tuple(sequence.key.choice for sequence in shared.sequences)
        self._events.append(Failed(shared.key, choices, error))
        if job.keep and shared.table is not None:
            # Whoever hands it over may be copying its blocks just now.
            del self._unfinished[shared.key]
            shared.move(SequenceEvent.HOLD)
        else:
            self._end(job, SequenceEvent.FAIL)

    def _end(self, job: _Job, event: SequenceEvent) -> None:
        """The one place where an attempt leaves."""
        job.input.move(event)
        job.input.give_up_blocks(self._pool)
        del self._jobs[job.input.key]
        self._unfinished.pop(job.input.key, None)
