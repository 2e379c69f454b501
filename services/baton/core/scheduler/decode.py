"""DecodeScheduler, which sequences get their next token.

Every step is continuous batching: what ended is gone, what arrived joins, tables grow by a block
where the next token needs one, and all that runs gets one token. Inputs that are computed here
(local prefill) share the step under a budget that bounds running sequences' inter-token latency.

Who gets blocks, and who gives them up, is `BlockBudget`'s to say; what becomes of a preempted
sequence's KV is `Swapping`'s. Either way its next token is drawn at the same position as it would
have been. While an input waits for room, nothing that is not more important passes it.

With `pipelined`, steps are planned while others are in flight: a sequence then gets a row for the
token behind the one that is still to come. Whatever a launched step samples counts, also for a
sequence that was preempted meanwhile; only what ended takes no more tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many

from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    HandoverFailed,
    Internal,
    InvalidArgument,
)
from baton.core.kvcache.block_pool import BlockCopy, BlockPool, Extents, SwapSpace
from baton.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, SequenceKey
from baton.core.request.model import ModelDescription
from baton.core.routing.speed import WorkerSpeed
from baton.core.scheduler.block_budget import BlockBudget, Reservation
from baton.core.scheduler.decode_policy import DecodePolicy as DecodePolicy
from baton.core.scheduler.events import Event, Failed, Held, Started, Tokens
from baton.core.scheduler.intake import AttemptIntake
from baton.core.scheduler.launched import InputChunk, Launched
from baton.core.scheduler.plan import Chunk, CompiledGrammar, StepPlan, StepResult, StepWork
from baton.core.scheduler.scheduler import Load, earliest
from baton.core.scheduler.sequence import (
    Sequence,
    SequenceEvent,
    SequenceGroup,
    SequenceState,
    next_chunks,
)
from baton.core.scheduler.sequence_table import SequenceTable, rank
from baton.core.scheduler.step_cost import PrefillCost, StepCost
from baton.core.scheduler.swapping import Swapping

# DecodeMeter, what a decode worker's steps teach about its speed.


class DecodeMeter:
    """cost: for whoever plans the next step. prefill_step_tokens: what a step prefills at most
    beside sequences that run."""

    def __init__(self, prefill_step_tokens: int) -> None:
        self.cost = StepCost()
        self._prefill = PrefillCost()
        self._prefill_step_tokens = prefill_step_tokens

    @property
    def speed(self) -> WorkerSpeed:
        """May be read by any thread."""
        return WorkerSpeed(*self.cost.curve, *self._prefill.curve, self._prefill_step_tokens)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        # What moving blocks takes is told apart, in StepResult.swap_s. Rows of logits, with which a
        # prompt is scored, take time that no other step's positions do.
        if plan.swap_out or plan.swap_in or plan.scores:
            return
        if plan.work.prefill:
            added_s = self.cost.added(plan.work, seconds)
            self._prefill.observe(plan.chunks[plan.work.rows :], added_s)
        self.cost.observe(plan.work, seconds)


# LocalPrefill, which inputs a decode step computes and how much of them.
#
# They share the step with running sequences under a budget, which bounds the latter's inter-token
# latency. At least one block is always computed, so nothing starves.


class LocalPrefill:
    """alone, beside: positions of a step when nothing runs and when something does. target_step_s:
    the latter are cut so that the step's predicted seconds stay below it; 0: they are not.
    pipelined: inputs of which a chunk is in flight go on. Budgets are at least one block.
    """

    def __init__(
        self,
        roster: SequenceTable,
        cost: StepCost,
        *,
        block_size: int,
        alone: int,
        beside: int,
        target_step_s: float,
        pipelined: bool,
    ):
        self._roster = roster
        self._cost = cost
        self._block_size = block_size
        self._alone = alone
        self._beside = beside
        self._target_step_s = target_step_s
        self._pipelined = pipelined

    def budget(self, rows: Many[Sequence]) -> int:
        """Positions that may be computed in a step with these rows."""
        # One that waits to run on may join the step, too.
        if not self._roster.running and not self._roster.num_stored:
            return self._alone
        budget = self._beside
        if self._target_step_s:
            context = sum(sequence.reach for sequence in rows)
            most = self._cost.most_prefill(len(rows), context, self._target_step_s)
            if most is not None:
                budget = min(budget, max(most, self._block_size))
        return budget

    def left(self, rows: Many[Sequence]) -> int:
        """What the inputs that have begun leave of the budget; below 0 when it is too small."""
        begun = sum(s.remaining for s in self._roster.prefilling if self._goes_on(s))
        return self.budget(rows) - begun

    def plan(self, rows: Many[Sequence]) -> tuple[list[Chunk], list[InputChunk]]:
        """Chunks of inputs that have their blocks, the most important first, in the budget; one of
        an input that is scored at most."""
        chunks: list[Chunk] = []
        inputs: list[InputChunk] = []
        budget = self.budget(rows)
        may_score = True
        for shared in sorted(self._roster.prefilling, key=rank):
            if not self._goes_on(shared) or (shared.scores is not None and not may_score):
                continue
            if budget < min(shared.remaining, self._block_size):
                break
            chunk = shared.next_chunk(budget, self._block_size)
            chunks.append(chunk)
            may_score = may_score and chunk.scored is None
            inputs.append(InputChunk(shared, chunk.end_position, not shared.remaining))
            budget -= len(chunk.token_ids)
        return chunks, inputs

    def _goes_on(self, shared: SequenceGroup) -> bool:
        return not shared.must_wait and (self._pipelined or not shared.in_flight)


class DecodeScheduler:
    """Implements `Scheduler`. num_swap_blocks: as the runner has them, in host memory, on disk.

    pipelined: plan also what depends on tokens that are still to come.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: DecodePolicy,
        model: ModelDescription,
        *,
        num_swap_blocks: tuple[int, int] = (0, 0),
        pipelined: bool = False,
    ):
        beside = policy.prefill_beside(pool.block_size)
        self._pool = pool
        self._policy = policy
        self._pipelined = pipelined
        # A sequence that fits the pool alone can always be run again, so preemption always ends.
        max_positions = min(model.max_model_len, pool.num_blocks * pool.block_size)
        self._intake = AttemptIntake(
            model,
            block_size=pool.block_size,
            max_positions=max_positions,
            max_model_len=max_positions,
        )
        space = SwapSpace(*num_swap_blocks)
        self._meter = DecodeMeter(beside)
        self._swapping = Swapping(pool, space, self._meter.cost)
        self._roster = SequenceTable(pool, space)
        self._room = BlockBudget(
            pool,
            self._roster,
            self._swapping,
            self._meter.cost,
            max_sequences=policy.max_sequences,
            headroom=policy.headroom,
            target_step_s=policy.target_step_s,
        )
        self._prefill = LocalPrefill(
            self._roster,
            self._meter.cost,
            block_size=pool.block_size,
            alone=policy.token_budget,
            beside=beside,
            target_step_s=policy.target_step_s,
            pipelined=pipelined,
        )
        self._claim = Reservation()
        self._launched: deque[Launched] = deque()
        self._events: list[Event] = []
        self._step = 0

    @property
    def has_work(self) -> bool:
        return len(self._roster) > 0

    @property
    def load(self) -> Load:
        return self._roster.load

    @property
    def speed(self) -> WorkerSpeed:
        return self._meter.speed

    @property
    def preemptions(self) -> dict[str, int]:
        return dict(self._room.preemptions)

    def reserve(
        self,
        attempt: Attempt,
        now: float,
        *,
        max_unconfirmed: int = 0,
        grammar: CompiledGrammar | None = None,
    ) -> int | None:
        """Takes blocks for an input whose KV another worker will hand over, and its growth.

        Returns the first position that is needed (those before it are here; it may be the input's
        length), or None when there is no room now (but see `making_room`). Raises InvalidArgument
        or ContextLengthExceeded. What is reserved stays until `admit` or `cancel`.
        """
        shared = self._open(attempt, now, max_unconfirmed, grammar)
        if self._must_not_pass(attempt, now):
            return None
        size = len(shared.tokens)
        taken = self._room.take(shared, size)
        # What is moved out stays where it is until the next step, and a reservation is written to
        # at once: so nothing is swapped for it.
        if not taken and self._room.make(shared, now, may_swap=False):
            taken = self._room.take(shared, size)
            if not taken:
                self._claim.hold(attempt.key, attempt.priority, now)
        if not taken:
            return None
        self._claim.drop(attempt.key)
        self._roster.expect(shared)
        return shared.computed

    def making_room(self, key: AttemptKey, now: float) -> bool:
        """Whether room for an attempt that `reserve` refused comes free with the steps in flight,
        so that it is worth asking again. For a short while it is kept for it."""
        return self._claim.is_of(key, now)

    def admit(self, key: AttemptKey, tokens: Many[ChoiceTokens], now: float) -> None:
        """The KV of a reserved attempt is complete; its choices go on from their first tokens.

        tokens: token 0 of this attempt for every choice that was not cancelled. They are told again
        in a Tokens event; choices that they end do not run. Raises NotFound for an attempt that is
        not reserved (any more), InvalidArgument for tokens that do not fit it; then it stays
        reserved.
        """
        shared = self._roster.reserved(key)
        first = self._intake.first_tokens(shared, tokens)
        shared.publish(self._pool, len(shared.tokens))
        self._events.append(Started(key, shared.cached, now - shared.arrived))
        self._roster.part(shared, awaited=False)
        made = []
        for sequence in shared.sequences:
            given = first[sequence.key.choice]
            logprobs = given.logprobs[0] if given.logprobs else None
            made.append(sequence.accept(given.token_ids[0], logprobs))
            if made[-1].finish_reason is not None:
                self._roster.end(sequence, SequenceEvent.FINISH)
        self._events.append(Tokens(tuple(made), self._step))

    def add(
        self,
        attempt: Attempt,
        now: float,
        *,
        max_unconfirmed: int = 0,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Queues an attempt whose input is computed here. grammar: its own, compiled.

        Raises InvalidArgument, ContextLengthExceeded or Overloaded.
        """
        shared = self._open(attempt, now, max_unconfirmed, grammar)
        self._policy.limit.check(self.load, attempt)
        self._roster.wait(shared)

    def cancel(self, key: AttemptKey, choices: Iterable[int] = ()) -> None:
        """Ends choices of an attempt, all if none is named. No event follows.

        Unknown ones are no error.
        """
        self._claim.drop(key)
        sequences = self._roster.choices(key)
        for choice in tuple(choices) or sequences:
            if choice in sequences:
                self._roster.end(sequences[choice], SequenceEvent.CANCEL)

    def confirm(self, key: SequenceKey, position: int) -> None:
        """Output positions below this one hold no stop string. Unknown sequences are no error."""
        sequence = self._roster.find(key)
        if sequence is not None:
            sequence.confirm(position)

    def extents(self, key: AttemptKey) -> Extents:
        """Where a reserved attempt's KV goes. Raises NotFound when it is not reserved."""
        table = self._roster.reserved(key).table
        return () if table is None else table.extents

    def hold(self, key: SequenceKey) -> bool:
        """Stops a running sequence, for its KV to be handed over. A Held event follows, unless an
        awaited token ends it; its blocks stay until `cancel`. False: it cannot be held now."""
        sequence = self._roster.find(key)
        if sequence is None or not sequence.can_be_held:
            return False
        self._roster.hold(sequence)
        self._tell_held([sequence])
        return True

    def held_extents(self, key: SequenceKey) -> Extents:
        """Where a held sequence's KV is. Raises NotFound when it is not held."""
        table = self._roster.held_one(key).table
        return () if table is None else table.extents

    def plan(self, now: float) -> StepPlan | None:
        self._expire(now)
        # Who is pushed out by this step does not come back in it.
        waiting = [s for s in self._roster.waiting if not self._claim.outranks(s.priority, now)]
        ready = self._ready(now)
        fetched: list[Sequence] = []
        if waiting:
            fetched = self._room.let_in(waiting, self._prefill.left(ready), now)
            ready = [s for s in ready if s.table is not None] + fetched
        copies: list[BlockCopy] = []
        if self._pool.num_uncopied:
            tables = [sequence.table for sequence in ready if sequence.table is not None]
            copies = [copy for table in tables if (copy := self._pool.claim_copy(table))]
        chunks, context = next_chunks(ready)
        more, inputs = self._prefill.plan(ready) if self._roster.prefilling else ([], [])
        chunks += more
        if not chunks:
            self._room.dropped()
            return None
        prefill = sum(len(chunk.token_ids) for chunk in more)
        plan = StepPlan(
            self._step + 1,
            tuple(chunks),
            tuple(copies),
            tuple(self._swapping.swap_out),
            tuple(self._swapping.swap_in),
            StepWork(len(ready), context, prefill),
        )
        self._launch(plan.step, ready, inputs, fetched)
        return plan

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self._meter.observe(plan, seconds)

    def apply(self, result: StepResult, now: float) -> list[Event]:
        if not self._launched or self._launched[0].step != result.step:
            raise Internal(f"step {result.step} is not the oldest one")
        launched = self._launched.popleft()
        self._pool.completed(result.step)
        self._swapping.completed(result.step, result.swap_s)
        for chunk in launched.inputs:
            chunk.input.note_scores(result)
            self._computed(chunk, now)
        size = self._pool.block_size
        running = SequenceState.RUNNING
        made = []
        stopped = []
        for sequence, token in zip(launched.rows, launched.drawn(result), strict=True):
            sequence.in_flight -= 1
            if sequence.state is not running:
                if sequence.ended or sequence.lost:
                    continue
                stopped.append(sequence)
            if token is None:
                self._without_token(sequence, launched, now)
                continue
            tokens = sequence.accept(token.token_id, token.logprobs)
            made.append(tokens)
            computed = len(sequence.tokens) - 1
            if not computed % size:
                sequence.publish(self._pool, computed)
            if tokens.finish_reason is not None:
                self._roster.end(sequence, SequenceEvent.FINISH)
        if made:
            self._events.append(Tokens(tuple(made), result.step))
        self._tell_held(stopped)
        return self.take_events()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def next_wake(self, now: float) -> float | None:
        deadlines = (shared.deadline for shared in self._roster.waiting)
        return earliest((*deadlines, self._claim.until), now)

    def check(self) -> None:
        self._roster.check()

    def _open(
        self, attempt: Attempt, now: float, max_unconfirmed: int, grammar: CompiledGrammar | None
    ) -> SequenceGroup:
        """Raises InvalidArgument when its choices can never own enough blocks at once."""
        shared = self._intake.admit(attempt, now, max_unconfirmed=max_unconfirmed, grammar=grammar)
        if attempt.key in self._roster:
            raise InvalidArgument("This attempt already runs here.", field="attempt")
        self._room.check(shared)
        return shared

    def _must_not_pass(self, attempt: Attempt, now: float) -> bool:
        """Whether something as important waits for room that it was refused or had to give."""
        priority = attempt.priority
        if self._claim.outranks(priority, now) and not self._claim.is_of(attempt.key, now):
            return True
        return self._roster.waiting.hold_back(priority)

    def _tell_held(self, sequences: Iterable[Sequence]) -> None:
        """Of these, those that are held and whose launched steps are done."""
        for one in sequences:
            newest = one.tokens_from(one.position - 1)
            if one.state is SequenceState.HELD and not one.in_flight and newest is not None:
                self._events.append(Held(one.key, one.reach, newest))

    def _ready(self, now: float) -> list[Sequence]:
        """Running sequences whose next position can be computed now, with a block for it."""
        running: Collection[Sequence] = self._roster.running.values()
        if self._launched:
            ahead = self._pipelined
            running = [s for s in running if not s.in_flight or (ahead and not s.serial)]
        ready = [s for s in running if s.reach < s.limit]
        if len(ready) < len(running):
            short = [s for s in running if s.limit <= s.reach < s.ceiling]
            if short:
                return self._room.grow(short, ready, now, in_flight=bool(self._launched))
        return ready

    def _launch(
        self,
        step: int,
        ready: list[Sequence],
        inputs: list[InputChunk],
        fetched: list[Sequence],
    ) -> None:
        """The planned step starts. Only from here on do its blocks stay when they are released."""
        self._step = step
        self._pool.launched(step)
        self._room.launched(step)
        rows = [*ready]
        for shared, _, last in inputs:
            if last:
                self._roster.part(shared, awaited=True)
                rows += shared.sequences
        self._launched.append(Launched(step, rows, inputs, frozenset(s.id for s in fetched)))

    def _computed(self, chunk: InputChunk, now: float) -> None:
        """KV of an input is there up to a position."""
        shared = chunk.input
        shared.in_flight -= 1
        shared.publish(self._pool, chunk.end)
        if not chunk.last:
            return
        for sequence in shared.sequences:
            sequence.publish(self._pool, chunk.end)
        if not shared.resumed and not all(sequence.ended for sequence in shared.sequences):
            waited_s, told = now - shared.arrived, shared.prompt_logprobs
            self._events.append(Started(shared.key, shared.cached, waited_s, told))

    def _without_token(self, sequence: Sequence, launched: Launched, now: float) -> None:
        """Its KV could not be brought back, so it is computed again; or its own input is bad."""
        if sequence.id in launched.fetched and sequence.state is SequenceState.RUNNING:
            self._room.preempt(sequence, now, may_swap=False)
            sequence.lost = sequence.in_flight > 0
        elif sequence.id in launched.fetched and sequence.state is SequenceState.HELD:
            self._fail(sequence, HandoverFailed("The KV to hand over could not be brought back."))
        else:
            self._fail(sequence, sequence.without_token())

    def _expire(self, now: float) -> None:
        """Drops what is out of time before it costs any."""
        for shared in self._roster.waiting.expired(now):
            for sequence in shared.sequences.copy():
                error = DeadlineExceeded("The request ran out of time in the queue.")
                self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        attempt = AttemptKey(sequence.key.request_id, sequence.key.attempt)
        self._events.append(Failed(attempt, (sequence.key.choice,), error))
        self._roster.end(sequence, SequenceEvent.FAIL)
