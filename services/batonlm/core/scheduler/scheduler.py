"""Scheduler, what a worker computes in its next step: one scheduler for prefill and decode.

Every step is continuous batching: what ended is gone, what arrived joins, tables grow by a block
where the next token needs one, and all that runs gets one token. Inputs that are computed here
share the step under a token budget, which bounds running sequences' inter-token latency. Inputs
that do not fit go on in the next step, chunk by chunk; each takes all its blocks before its first
chunk.

A prefill worker's scheduler has a policy with `first_token_only`: its sequences stop after token 0,
and the KV of those that were added with `keep` stays pinned until it is released. A decode worker
that has not granted yet (it has reserved no blocks of its own) can pin only its share of the pool
there; further inputs for it are passed over and hold up no others.

`BlockBudget` decides who gets blocks and who gives them up. However a preempted sequence's KV comes
back, its next token is drawn at the same position as it would have been.

Steps are planned while others are in flight: a sequence then gets a row for the token behind the
one that is still to come. Whatever a launched step samples counts, also for a sequence that was
preempted meanwhile; only what ended takes no more tokens. A sequence with drafts (`speculation`)
waits for their step: until then nobody knows how many tokens come of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from math import inf
from typing import NamedTuple

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoverFailed,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from batonlm.core.kvcache.block_pool import (
    BlockCopy,
    BlockPool,
    CachedUnit,
    Extents,
    StateSnapshot,
    SwapSpace,
)
from batonlm.core.kvcache.prefix import Prefix, PrefixChain, namespace
from batonlm.core.request.attempt import (
    Attempt,
    AttemptKey,
    ChoiceTokens,
    Logprobs,
    SequenceKey,
)
from batonlm.core.request.model import ModelDescription
from batonlm.core.routing.load import WorkerSpeed
from batonlm.core.scheduler.block_budget import BlockBudget, Reservation
from batonlm.core.scheduler.drafts import Drafter
from batonlm.core.scheduler.events import (
    Adopted,
    AttemptFailed,
    Computed,
    Event,
    FirstTokens,
    Held,
    KvComplete,
    NewTokens,
    Planned,
)
from batonlm.core.scheduler.model_drafts import DraftModel, drafter_of
from batonlm.core.scheduler.plan import (
    Chunk,
    CompiledGrammar,
    SampledToken,
    StateCopy,
    StepPlan,
    StepResult,
    StepWork,
)
from batonlm.core.scheduler.policy import QueueLimit, SchedulerPolicy, TenantTurns
from batonlm.core.scheduler.prefixes import PrefixBlocks
from batonlm.core.scheduler.sequence import (
    Sequence,
    SequenceEvent,
    SequenceGroup,
    SequenceState,
    StopRule,
    next_chunks,
    validate_attempt,
    validate_ids,
)
from batonlm.core.scheduler.sequence_table import Load, SequenceTable
from batonlm.core.scheduler.speculation import Speculation
from batonlm.core.scheduler.step_cost import PrefillCost, StepCost

COMPANY = 10
"""An input waits for others only when one came within so many batch windows before it. So a lone
one is computed at once, and of those that come after a pause, the first."""


ORPHANS_SHARE = 0.1
"""The part of the blocks that sequences without a router may need."""

ORPHAN_TOKENS = 256
"""How many tokens such a sequence gets at most while it waits for a router."""


class _InputChunk(NamedTuple):
    """Part of an input, in a step."""

    group: SequenceGroup
    end: int
    """The position up to which it is computed."""
    last: bool
    """Whether that is all of it."""
    snapshots: tuple[tuple[int, StateSnapshot], ...] = ()
    """What it copies of its state, by the position behind which."""


class _LaunchedStep(NamedTuple):
    """What a step in flight will make, and for whom."""

    step: int
    rows: list[Sequence]
    """The sequences whose tokens come, in this order."""
    inputs: list[_InputChunk]
    restored: frozenset[int]
    """Ids of sequences whose KV it moves back in from swap memory."""
    snapshots: dict[int, StateSnapshot]
    """What rows copy of their states, by their sequences' ids."""
    has_drafts: bool

    def drawn(self, result: StepResult) -> Many[SampledToken | None]:
        """The first token of each row, or None."""
        if len(result.tokens) == len(self.rows) and not self.has_drafts:
            return result.tokens
        given = {token.sequence_id: token for token in reversed(result.tokens)}
        return [given.get(sequence.id) for sequence in self.rows]

    def all_drawn(self, result: StepResult) -> dict[int, list[SampledToken]]:
        """The tokens of sequences with drafts, by their ids."""
        found: dict[int, list[SampledToken]] = {}
        for token in result.tokens if self.has_drafts else ():
            found.setdefault(token.sequence_id, []).append(token)
        return found


class Scheduler:
    """Called by the engine thread only; every time is a reading of one clock, in seconds.

    For each step: `plan`, run it, `observe` and `apply`. Everything else may be called in between,
    also `plan` while planned steps are not applied yet: steps run and are applied in order.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: SchedulerPolicy,
        model: ModelDescription,
        *,
        num_swap_blocks: tuple[int, int] = (0, 0),
        draft_model: DraftModel | None = None,
        drafter: Drafter | None = None,
    ):
        """num_swap_blocks: as the runner has them, in host memory and on disk. draft_model: the
        runner's. drafter: in place of the policy's."""
        drafter = drafter or drafter_of(policy.speculation, draft_model)
        self._cost = StepCost()
        self.speculation: Speculation | None = None
        """Where sequences run, keep no state that drafts would change, and have a drafter."""
        if drafter is not None and not policy.first_token_only and not pool.state_blocks:
            self.speculation = Speculation(drafter, pool, policy, self._cost)
        swap = SwapSpace(*num_swap_blocks)
        forget = self.speculation.forget if self.speculation else lambda sequence_id: None
        self.sequences = SequenceTable(pool, swap, forget)
        self.live_receivers = 1
        """Decode workers that share the pool of a prefill worker. Settable."""
        self.adapters: dict[str, None] = {}
        """The digests of the adapters that new attempts may name, the least recently named first.
        The loop changes it."""
        self._pool = pool
        self._policy = policy
        self._model = model
        self._beside = policy.prefill_beside(pool.block_size)
        # A sequence that fits the pool alone can always be run again, so preemption always ends. A
        # token that is only sampled here needs no room.
        self._max_positions = min(model.max_model_len, pool.num_positions + policy.first_token_only)
        self._max_model_len = (
            model.max_model_len if policy.first_token_only else self._max_positions
        )
        self._turns = TenantTurns(policy.quantum) if policy.quantum else None
        self._prefill_cost = PrefillCost()
        self._budget = BlockBudget(pool, self.sequences, self._cost, policy, self._fail)
        self._reservation = Reservation()
        self._launched: deque[_LaunchedStep] = deque()
        self._events: list[Event] = []
        self._step = 0
        self._next_id = 0
        self._came = -inf
        """When an input was queued last: a clock reading, in seconds."""

    @property
    def has_work(self) -> bool:
        """Whether anything is here that has not ended, or is kept for another worker."""
        return len(self.sequences) > 0

    @property
    def load(self) -> Load:
        return self.sequences.load

    @property
    def limit(self) -> QueueLimit:
        """By which attempts are refused. May be read by any thread."""
        return self._policy.limit

    def uses_adapter(self, digest: str) -> bool:
        """Whether a sequence here, or a step in flight, is computed with it."""
        if any(sequence.adapter == digest for sequence in self.sequences):
            return True
        return any(
            sequence.adapter == digest
            for step in self._launched
            for sequence in (*step.rows, *(chunk.group.first for chunk in step.inputs))
        )

    @property
    def speed(self) -> WorkerSpeed:
        """By the steps so far. May be read by any thread."""
        return WorkerSpeed(*self._cost.curve, *self._prefill_cost.curve, self._beside)

    @property
    def preemptions(self) -> dict[str, int]:
        """How often blocks were taken from what ran, by what became of its KV: swap_host,
        swap_disk or recompute. What never happened may be missing."""
        return dict(self._budget.preemptions)

    def add(
        self,
        attempt: Attempt,
        now: float,
        *,
        max_unconfirmed: int = 0,
        grammar: CompiledGrammar | None = None,
        keep: bool = False,
        receiver: str = "",
    ) -> None:
        """Queues an attempt whose input is computed here.

        grammar: its own, compiled. keep: where sequences stop after their first token, the KV then
        stays pinned until `release`. receiver: the worker that will collect what is kept; it counts
        against that worker's share until `grant`. Raises InvalidArgument, ContextLengthExceeded or
        Overloaded.
        """
        group = self._open(attempt, now, max_unconfirmed, grammar)
        group.keep, group.receiver = keep, receiver if keep else ""
        self.limit.check(self.load, attempt)
        window = self._policy.batch_window_s
        if now < self._came + COMPANY * window:
            group.due = now + window
        self._came = now
        self.sequences.enqueue(group)

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
        group = self._open(attempt, now, max_unconfirmed, grammar)
        if self._must_not_pass(attempt, now):
            return None
        size = len(group.tokens)
        taken = self._budget.take(group, size, computes=False)
        # What is moved out stays where it is until the next step, and a reservation is written to
        # at once: so nothing is swapped for it.
        if not taken and self._budget.make_room(group, now, may_swap=False):
            taken = self._budget.take(group, size, computes=False)
            if not taken:
                self._reservation.make(attempt.key, attempt.priority, now)
        if not taken:
            return None
        self._reservation.drop(attempt.key)
        self.sequences.expect(group)
        return group.computed

    def making_room(self, key: AttemptKey, now: float) -> bool:
        """Whether room for an attempt that `reserve` refused comes free with the steps in flight,
        so that it is worth trying again. For a short while it is reserved for it."""
        return self._reservation.is_of(key, now)

    def extents(self, key: AttemptKey) -> Extents:
        """Where a reserved attempt's KV goes. Raises NotFound when it is not reserved."""
        table = self.sequences.reserved(key).table
        return () if table is None else table.extents

    def admit(self, key: AttemptKey, tokens: Many[ChoiceTokens], now: float) -> None:
        """The KV of a reserved attempt is complete; its choices go on from their first tokens.

        tokens: token 0 of this attempt for every choice that was not cancelled. They are repeated
        in a NewTokens event; choices that they end do not run. Raises NotFound for an attempt that
        is not reserved (any more), InvalidArgument for tokens that do not fit it; then it stays
        reserved.
        """
        group = self.sequences.reserved(key)
        # By choice: the number of the attempt is that of the worker that ran it before.
        first = {given.key.choice: given for given in tokens if given.key[0] == key.request_id}
        for sequence in group.sequences:
            given = first.get(sequence.key.choice)
            if given is None or given.position != sequence.position or len(given.token_ids) != 1:
                raise InvalidArgument("Every choice needs the token of its next position.")
            validate_ids(given.token_ids, self._model, "tokens")
        group.publish(self._pool, len(group.tokens))
        self._events.append(KvComplete(key, group.cached, now - group.arrived))
        self.sequences.run(group, awaited=False)
        made = []
        for sequence in group.sequences:
            given = first[sequence.key.choice]
            logprobs = given.logprobs[0] if given.logprobs else None
            made.append(sequence.accept(given.token_ids[0], logprobs))
            if made[-1].finish_reason is not None:
                self.sequences.end(sequence, SequenceEvent.FINISH)
        self._events.append(NewTokens(tuple(made), self._step))

    def cancel(self, key: AttemptKey, choices: Iterable[int] = ()) -> None:
        """Ends choices of an attempt, all if none is named, whatever they do. No event follows.

        Unknown ones are no error.
        """
        self._reservation.drop(key)
        sequences = self.sequences.choices(key)
        for choice in tuple(choices) or sequences:
            if choice in sequences:
                self.sequences.end(sequences[choice], SequenceEvent.CANCEL)

    def confirm(self, key: SequenceKey, position: int) -> None:
        """Output positions below this one hold no stop string. Unknown sequences are no error."""
        sequence = self.sequences.find(key)
        if sequence is not None:
            sequence.confirm(position)

    def hold(self, key: SequenceKey) -> bool:
        """Stops a running sequence, for its KV to be handed over. A Held event follows, unless an
        awaited token ends it; its blocks stay until `cancel` or `resume`. False: it cannot be held
        now."""
        sequence = self.sequences.find(key)
        newest_applied = self._launched[0].step - 1 if self._launched else self._step
        if sequence is None or not sequence.can_be_held(newest_applied):
            return False
        self.sequences.hold(sequence)
        self._report_held([sequence])
        return True

    def resume(self, key: SequenceKey, attempt: Attempt | None = None) -> None:
        """A held sequence runs on here, because its KV is at no other worker.

        attempt: what it runs as from now on, of this one choice; its input is all but the newest
        token, which is repeated in a NewTokens event. Raises NotFound for a sequence that is not
        held (any more), InvalidArgument for an attempt that does not continue it.
        """
        sequence = self.sequences.held.get(key)
        if sequence is None:
            raise NotFound("This sequence is not held here.")
        if attempt is None:
            self.sequences.resume(sequence, None)
            return
        if attempt.key in self.sequences:
            raise InvalidArgument("This attempt already runs here.", field="attempt")
        if (
            sequence.in_flight
            or (attempt.request_id, attempt.choices) != (key.request_id, (key.choice,))
            or attempt.num_prompt_tokens != sequence.attempt.num_prompt_tokens
            or [*attempt.token_ids] != [*sequence.tokens[:-1]]
        ):
            raise InvalidArgument("The input is not that of the held sequence.", field="token_ids")
        self.sequences.resume(sequence, attempt)
        newest = sequence.tokens_from(attempt.position)
        assert newest is not None
        self._events += [
            KvComplete(attempt.key, sequence.num_computed_tokens, 0.0),
            NewTokens((newest,), self._step),
        ]

    def orphan(self, keys: Iterable[SequenceKey]) -> None:
        """The router of these sequences is gone. Each of them that runs now gets a few more tokens
        and is kept until it is cancelled, adopted or preempted, as long as all such ones need no
        more than their share of the blocks. AttemptFailed events follow for the others."""
        kept = [one for one in self.sequences.running.values() if one.orphaned]
        room = self._pool.num_blocks * ORPHANS_SHARE - sum(map(self._most_blocks, kept))
        for sequence in filter(None, map(self.sequences.find, keys)):
            if sequence.state is SequenceState.RUNNING:
                sequence.orphan(ORPHAN_TOKENS)
            needed = self._most_blocks(sequence)
            if sequence.orphaned and needed <= room:
                room -= needed
            else:
                self._fail(sequence, Cancelled("The router of this sequence left."))

    def _most_blocks(self, sequence: Sequence) -> int:
        return self._pool.blocks_for(sequence.most_positions)

    def adopt(self, key: SequenceKey, attempt: Attempt, earlier: Iterable[Logprobs] = ()) -> None:
        """A sequence that has begun runs on as an attempt of another request, of this one choice,
        which repeats that of the sequence (`Attempt.repeats`). An Adopted event has all its tokens.
        earlier: the log-probabilities of the output tokens that it began with, if asked for.

        Raises NotFound for one that is not here (any more), is held, or waits for its first KV.
        """
        sequence = self.sequences.find(key)
        group = None if sequence is None else self.sequences.group_of(sequence)
        begun = group is None or group.resumed
        if sequence is None or sequence.state is SequenceState.HELD or not begun:
            raise NotFound("This sequence is not here, or has not begun.")
        self.sequences.rename(sequence, attempt, earlier)
        tokens = sequence.tokens_from(0)
        assert tokens is not None
        self._events += [KvComplete(attempt.key, attempt.num_prompt_tokens, 0.0), Adopted(tokens)]

    def grant(self, key: AttemptKey) -> None:
        """The receiver has reserved its blocks. Unknown attempts are no error."""
        group = self.sequences.group(key)
        if group is not None:
            group.receiver = ""

    def release(self, key: AttemptKey) -> None:
        """The KV is not needed any more. One that still computes goes on, and is not kept.

        Unknown attempts are no error.
        """
        group = self.sequences.group(key)
        if group is not None:
            group.keep = False
            if key in self.sequences.kept:
                self._end(group, SequenceEvent.FINISH)

    def offer_prefix(self, prefix: Prefix) -> PrefixBlocks | None:
        """Pins what the prefix cache has of a prefix, for another worker to collect; None: nothing.

        Raises Overloaded. What is pinned stays until `release_prefix`.
        """
        chain, num_blocks = self._whole_chain(prefix)
        return self.sequences.prefixes.offer(chain, num_blocks, self._budget.blocks_to_keep())

    def expect_prefix(self, prefix: Prefix, now: float) -> PrefixBlocks | None:
        """Takes blocks for a prefix that another worker gives, until `release_prefix`. None when
        there is no room, or something waits for some: nothing is preempted for a prefix."""
        reserved = self._reservation.until
        if any(group.blocked for group in self.sequences.waiting) or now < (reserved or now):
            return None
        chain, _ = self._whole_chain(prefix)
        size = len(prefix.token_ids)
        return self.sequences.prefixes.expect(chain, size, self._budget.blocks_to_keep())

    def spill(self, count: int, *, everything: bool = False) -> list[CachedUnit]:
        """See `BlockPool.spill`."""
        return self._pool.spill(count, everything=everything)

    def release_prefix(self, blocks: PrefixBlocks, arrived: int = 0) -> None:
        """A transfer has ended, and nothing copies any more. arrived: positions below this one have
        KV; they stay in the prefix cache as long as there is room."""
        self.sequences.prefixes.release(blocks, arrived)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, which the caller must run; None when nothing can run now."""
        self._expire(now)
        if not self._is_due(now):
            return None
        # What is preempted by this step does not come back in it.
        waiting = [*self.sequences.waiting]
        if self._reservation.until is not None:
            outranks = self._reservation.outranks
            waiting = [group for group in waiting if not outranks(group.priority, now)]
        rows = self._rows(now)
        inputs: list[_InputChunk] = []
        input_chunks: list[Chunk] = []
        restored: list[Sequence] = []
        copies: list[BlockCopy] = []
        if waiting or self.sequences.prefilling:
            input_chunks = self._fill(rows, waiting, inputs, restored, copies, now)
            rows = [s for s in rows if s.table is not None] + restored
        prefill = sum(len(chunk.token_ids) for chunk in input_chunks)
        drafts: dict[int, Many[int]] = {}
        drafting_s = 0.0
        if self.speculation is not None and rows:
            num_sampled = sum(len(chunk.samples) for chunk in input_chunks)
            keep = self._budget.blocks_to_keep
            drafts = self.speculation.choose(rows, num_sampled, prefill, keep)
            drafting_s = self.speculation.drafting_s
        chunks, context = next_chunks(rows, drafts)
        num_drafts = sum(chunk.num_drafts for chunk in chunks) if drafts else 0
        snapshots = self._snapshots(rows, chunks) if self._pool.state_blocks else {}
        chunks += input_chunks
        if not chunks:
            self._budget.dropped()
            return None
        if self._pool.num_uncopied:
            copies += self._copies(rows)
        swapping = self._budget.swapping
        plan = StepPlan(
            self._step + 1,
            tuple(chunks),
            tuple(copies),
            tuple(swapping.swap_out),
            tuple(swapping.swap_in),
            StepWork(len(rows), context, prefill, num_drafts, drafting_s),
        )
        self._launch(plan.step, rows, inputs, restored, snapshots, has_drafts=num_drafts > 0)
        return plan

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """How long a step ran, so that the time of later ones can be predicted: from its start
        without what drafting took, or the end of the one before it, to its own end. Called before
        its result is applied, by the caller, who has a clock."""
        # What moving blocks takes is reported apart, in StepResult.swap_s. Rows of logits, with
        # which a prompt is scored, take time that no other step's positions do.
        is_known = not (plan.swap_out or plan.swap_in or plan.scores)
        if is_known:
            if plan.work.prefill and not plan.work.drafts:
                added_s = self._cost.added(plan.work, seconds)
                self._prefill_cost.observe(plan.chunks[plan.work.rows :], added_s)
            self._cost.observe(plan.work, seconds)
        if self.speculation is not None and plan.work.rows:
            self.speculation.observe(plan.work, seconds if is_known else None)

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Takes the oldest planned step's result and returns everything that came of it."""
        if not self._launched or self._launched[0].step != result.step:
            raise Internal(f"step {result.step} is not the oldest one")
        launched = self._launched.popleft()
        self._pool.completed(result.step)
        self._budget.swapping.completed(result.step, result.swap_s)
        for chunk in launched.inputs:
            self._computed(chunk, result, now)
        size = self._pool.block_size
        running = SequenceState.RUNNING
        made = []
        stopped = []
        several = launched.all_drawn(result)
        for sequence, token in zip(launched.rows, launched.drawn(result), strict=True):
            sequence.in_flight -= 1
            if sequence.state is not running:
                if sequence.ended or sequence.lost:
                    continue
                stopped.append(sequence)
            if token is None:
                self._without_token(sequence, launched, now)
                continue
            if sequence.drafts:
                made.append(self._accept(sequence, several[sequence.id]))
                continue
            tokens = sequence.accept(token.token_id, token.logprobs)
            made.append(tokens)
            computed = len(sequence.tokens) - 1
            if not computed % size:
                sequence.publish(self._pool, computed)
                if snapshot := launched.snapshots.pop(sequence.id, None):
                    sequence.keep_snapshot(self._pool, snapshot, computed)
            if tokens.finish_reason is not None:
                self.sequences.end(sequence, SequenceEvent.FINISH)
        for snapshot in launched.snapshots.values():
            self._pool.drop_snapshot(snapshot)
        if made:
            self._events.append(NewTokens(tuple(made), result.step))
        self._report_held(stopped)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """What happened outside of `apply`, in order; each event is returned once."""
        events, self._events = self._events, []
        return events

    def next_wake(self, now: float) -> float | None:
        """When `plan` may find more than it did just now though nothing was called; or None."""
        times = [self._reservation.until]
        for group in self.sequences.waiting:
            times += (group.due, group.deadline)
        return min((time for time in times if time is not None and time > now), default=None)

    def check(self) -> None:
        """Raises InvariantBroken when the books disagree. For idle moments and tests."""
        self.sequences.check()

    def make_group(
        self, attempt: Attempt, now: float, max_unconfirmed: int, grammar: CompiledGrammar | None
    ) -> SequenceGroup:
        """A valid attempt's sequences. The simulator has its own. Raises InvalidArgument or
        ContextLengthExceeded."""
        validate_attempt(attempt, self._model, self._max_positions)
        if (grammar is None) != (attempt.grammar is None):
            raise InvalidArgument("This worker has no way to follow it.", field="grammar")
        rule = StopRule(attempt, self._model.eos_token_ids, self._max_model_len)
        sequences = []
        for choice in attempt.choices:
            matcher = None if grammar is None else grammar.matcher()
            sequences.append(
                Sequence(self._take_id(), attempt, choice, rule, max_unconfirmed, matcher)
            )
        chain = self._chain(attempt.cache_salt, attempt.adapter)
        return SequenceGroup(sequences, chain, now)

    def _chain(self, salt: bytes, adapter: str) -> PrefixChain:
        return PrefixChain(
            namespace(salt, self._model.digest, adapter),
            namespace(salt, self._model.tokenizer_digest, adapter),
            self._pool.block_size,
        )

    def _whole_chain(self, prefix: Prefix) -> tuple[PrefixChain, int]:
        """Returns the chain of a prefix's full blocks, and how many these are."""
        num_blocks = len(prefix.token_ids) // self._pool.block_size
        chain = self._chain(prefix.cache_salt, prefix.adapter)
        chain.extend(prefix.token_ids, num_blocks)
        return chain, num_blocks

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _open(
        self, attempt: Attempt, now: float, max_unconfirmed: int, grammar: CompiledGrammar | None
    ) -> SequenceGroup:
        if attempt.adapter and attempt.adapter not in self.adapters:
            # Another worker may have it, so this ends the attempt and not the request.
            raise Unavailable("This worker does not have the request's adapter.")
        if attempt.adapter:
            self.adapters[attempt.adapter] = self.adapters.pop(attempt.adapter)
        group = self.make_group(attempt, now, max_unconfirmed, grammar)
        if attempt.key in self.sequences:
            raise InvalidArgument("This attempt already runs here.", field="attempt")
        self._budget.check(group)
        return group

    def _must_not_pass(self, attempt: Attempt, now: float) -> bool:
        """Whether something as important waits for room that it was refused or had to give."""
        reservation, priority = self._reservation, attempt.priority
        if reservation.outranks(priority, now) and not reservation.is_of(attempt.key, now):
            return True
        return self.sequences.waiting.blocks(priority)

    def _is_due(self, now: float) -> bool:
        """Whether a step is worth running: by size, by timer, or because one goes on anyway."""
        window, waiting = self._policy.batch_window_s, self.sequences.waiting
        if not window or self.sequences.prefilling or self.sequences.running:
            return True
        if any(now >= group.due for group in waiting):
            return True
        return waiting.num_tokens >= self._policy.token_budget

    def _rows(self, now: float) -> list[Sequence]:
        """Running sequences whose next position can be computed now, with a block for it."""
        running: Collection[Sequence] = self.sequences.running.values()
        if self._launched:
            running = [s for s in running if not s.in_flight or not (s.serial or s.drafts)]
            if self.speculation is not None:
                waiting = self.speculation.waiting(running)
                running = [s for s in running if s.id not in waiting]
        ready = [s for s in running if s.num_computed_tokens < s.limit]
        if len(ready) < len(running):
            short = [s for s in running if s.limit <= s.num_computed_tokens < s.ceiling]
            if short:
                return self._budget.grow(short, ready, now, in_flight=bool(self._launched))
        return ready

    def _prefill_budget(self, rows: Many[Sequence]) -> int:
        """Positions of inputs that may be computed in a step with these rows."""
        # A sequence that waits to run on may join the step, too.
        if not self.sequences.running and not self.sequences.swap.num_grants:
            return self._policy.token_budget
        budget, target_s = self._beside, self._policy.target_step_s
        if target_s:
            context = sum(sequence.num_computed_tokens for sequence in rows)
            most = self._cost.most_prefill(len(rows), context, target_s)
            if most is not None:
                budget = min(budget, max(most, self._pool.block_size))
        return budget

    def _fill(
        self,
        rows: list[Sequence],
        waiting: list[SequenceGroup],
        inputs: list[_InputChunk],
        restored: list[Sequence],
        copies: list[BlockCopy],
        now: float,
    ) -> list[Chunk]:
        """Admits what waits, in order, and returns the chunks of inputs that the step computes.

        At least one block is computed, so no input starves. Adds to `inputs` what the chunks are
        of, to `restored` the sequences whose KV swap memory kept, which run on, and to `copies` the
        states that inputs begin with. One input that is scored is computed at most.
        """
        size = self._pool.block_size
        begun = [*self.sequences.prefilling]
        groups = self._policy.order([*begun, *waiting], now)
        if self._turns is not None:
            groups = self._turns.order(groups)
        budget = self._prefill_budget(rows)
        chunks: list[Chunk] = []
        may_start = may_score = True
        for group in groups:
            # First what is true of most groups of a long queue: each step passes all of them.
            if group.table is None and not may_start:
                continue
            if group.stored is None:
                if not group.remaining or budget < min(group.remaining, size):
                    continue
                if group.scores is not None and not may_score:
                    continue
            if group.must_wait:
                continue
            if group.table is None:
                # One that had begun was preempted just now.
                if group.unsettled or group in begun:
                    continue
                if not self._within_share(group):
                    continue
                num_running = len(self.sequences.running)
                if not self._budget.admit(group, now):
                    may_start = now - group.arrived < self._policy.starving_after_s
                    continue
                was_stored = group.stored is not None
                if was_stored:
                    self._budget.swapping.fetch(group)
                    restored.append(self.sequences.restore(group))
                if len(self.sequences.running) != num_running:
                    rows = [sequence for sequence in rows if sequence.table is not None]
                    computing = sum(len(chunk.token_ids) for chunk in chunks)
                    budget = self._prefill_budget([*rows, *restored]) - computing
                if was_stored:
                    continue
                self._start(group, now)
            chunk = group.next_chunk(budget, size)
            snapshots = self._snapshots_within(group, chunk)
            if snapshots:
                states = tuple(StateCopy(end, made.extents) for end, made in snapshots)
                chunk = chunk._replace(state_copies=states)
            chunks.append(chunk)
            last = not group.remaining
            inputs.append(_InputChunk(group, chunk.end_position, last, snapshots))
            if group.table is not None:
                copies += self._pool.claim_copies(group.table)
            may_score = may_score and chunk.scored is None
            budget -= len(chunk.token_ids)
            if self._turns is not None:
                self._turns.served(group, len(chunk.token_ids))
        return chunks

    def _snapshots_within(
        self, group: SequenceGroup, chunk: Chunk
    ) -> tuple[tuple[int, StateSnapshot], ...]:
        """What a chunk of an input is to copy of its state, as far as there is room."""
        found = []
        for end in group.snapshots_at:
            if chunk.first_position < end <= chunk.end_position:
                snapshot = self._pool.snapshot(self._budget.blocks_to_keep())
                if snapshot is not None:
                    found.append((end, snapshot))
        return tuple(found)

    def _snapshots(self, rows: Many[Sequence], chunks: list[Chunk]) -> dict[int, StateSnapshot]:
        """Has the chunks of rows copy their states where it is time to, as far as there is room."""
        every = self._pool.snapshot_positions
        found: dict[int, StateSnapshot] = {}
        for index, sequence in enumerate(rows):
            end = sequence.num_computed_tokens
            if not end % every:
                snapshot = self._pool.snapshot(self._budget.blocks_to_keep())
                if snapshot is None:
                    break
                found[sequence.id] = snapshot
                copied = (StateCopy(end, snapshot.extents),)
                chunks[index] = chunks[index]._replace(state_copies=copied)
        return found

    def _copies(self, rows: Many[Sequence]) -> tuple[BlockCopy, ...]:
        """What forks have of their own, of all that run: the step may rewrite the state that a fork
        copies, also where it computes nothing for the fork."""
        computed = {sequence.id for sequence in rows}
        copies: list[BlockCopy] = []
        for sequence in self.sequences.running.values():
            if sequence.table is not None and sequence.table.copies:
                copies += self._pool.claim_copies(sequence.table)
                if sequence.id not in computed:
                    sequence.copied_in = self._step + 1
        return tuple(copies)

    def _within_share(self, group: SequenceGroup) -> bool:
        """Whether a worker that has not granted yet may pin this much more of the pool."""
        if not group.receiver:
            return True
        pinned = [
            len(other.table.blocks)
            for other in (*self.sequences.prefilling, *self.sequences.kept.values())
            if other.receiver == group.receiver and other.table is not None
        ]
        wanted = self._pool.blocks_for(len(group.tokens))
        share = self._pool.num_blocks // max(1, self.live_receivers)
        return not pinned or sum(pinned) + wanted <= share

    def _start(self, group: SequenceGroup, now: float) -> None:
        """A group has got its blocks."""
        group.started = now
        self.sequences.start(group)
        if self._policy.first_token_only:
            assert group.table is not None
            self._events.append(Planned(group.key, group.table.extents))

    def _launch(
        self,
        step: int,
        rows: list[Sequence],
        inputs: list[_InputChunk],
        restored: list[Sequence],
        snapshots: dict[int, StateSnapshot],
        *,
        has_drafts: bool,
    ) -> None:
        """The planned step starts. Only from here on do its blocks stay when they are released."""
        self._step = step
        self._pool.launched(step)
        self._budget.launched(step)
        rows = [*rows]
        if not self._policy.first_token_only:
            for chunk in inputs:
                if chunk.last:
                    self.sequences.run(chunk.group, awaited=True)
                    rows += chunk.group.sequences
        ids = frozenset(s.id for s in restored)
        self._launched.append(_LaunchedStep(step, rows, inputs, ids, snapshots, has_drafts))

    def _accept(self, sequence: Sequence, drawn: list[SampledToken]) -> ChoiceTokens:
        """Takes what was drawn for a sequence with drafts."""
        assert self.speculation is not None
        size, drafts = self._pool.block_size, sequence.drafts
        before = len(sequence.tokens) - 1
        tokens = sequence.accept_with_drafts(drawn)
        right = sum(a == b for a, b in zip(drafts, tokens.token_ids, strict=False))
        self.speculation.took(sequence.id, len(drafts), right, tokens.saved_steps)
        computed = len(sequence.tokens) - 1
        if computed // size > before // size:
            sequence.publish(self._pool, computed)
        if tokens.finish_reason is not None:
            self.sequences.end(sequence, SequenceEvent.FINISH)
        return tokens

    def _computed(self, chunk: _InputChunk, result: StepResult, now: float) -> None:
        """KV of an input is there up to a position."""
        group = chunk.group
        group.in_flight -= 1
        if group.sequences:
            group.note_scores(result)
            group.publish(self._pool, chunk.end)
            if chunk.last and not self._policy.first_token_only:
                for sequence in group.sequences:
                    sequence.publish(self._pool, chunk.end)
        for end, snapshot in chunk.snapshots:
            self._pool.keep(snapshot, group.chain.links[end // self._pool.block_size - 1])
        if not group.sequences:
            return
        if self._policy.first_token_only:
            self._events.append(Computed(group.key, chunk.end, group.cached))
            if chunk.last:
                self._take_first(group, result, now)
        elif (
            chunk.last
            and not group.resumed
            and not all(sequence.ended for sequence in group.sequences)
        ):
            waited_s, scores = now - group.arrived, group.prompt_logprobs
            self._events.append(KvComplete(group.key, group.cached, waited_s, scores))

    def _take_first(self, group: SequenceGroup, result: StepResult, now: float) -> None:
        """All positions are computed: reports token 0 of every choice, or that there is none."""
        sampled = {token.sequence_id: token for token in result.tokens}
        without = next((s for s in group.sequences if s.id not in sampled), None)
        if without is not None:
            self._fail_group(group, without.without_token())
            return
        first = []
        for sequence in group.sequences:
            token = sampled[sequence.id]
            first.append(sequence.accept(token.token_id, token.logprobs))
        started = now if group.started is None else group.started
        self._events.append(
            FirstTokens(
                group.key,
                tuple(first),
                group.cached,
                started - group.arrived,
                now - started,
                group.prompt_logprobs,
            )
        )
        if group.keep:
            self.sequences.keep(group)
        else:
            self._end(group, SequenceEvent.FINISH)

    def _without_token(self, sequence: Sequence, launched: _LaunchedStep, now: float) -> None:
        """Its KV could not be brought back, so it is computed again; or its own input is bad."""
        if sequence.id not in launched.restored:
            self._fail(sequence, sequence.without_token())
        elif sequence.state is SequenceState.HELD:
            self._fail(sequence, HandoverFailed("The KV to hand over could not be brought back."))
        else:
            if sequence.state is SequenceState.RUNNING:
                self._budget.preempt(sequence, now, may_swap=False)
            else:
                # It was preempted again before this was known.
                self._budget.forget(sequence)
            sequence.lost = sequence.in_flight > 0

    def _report_held(self, sequences: Iterable[Sequence]) -> None:
        """Of these, those that are held and whose launched steps are done."""
        for one in sequences:
            newest = one.tokens_from(one.position - 1)
            if one.state is SequenceState.HELD and not one.in_flight and newest is not None:
                assert one.table is not None
                count, extents = one.num_computed_tokens, one.table.extents
                self._events.append(Held(one.key, count, newest, extents))

    def _expire(self, now: float) -> None:
        """Drops what is out of time before it costs any."""
        for group in self.sequences.waiting.expired(now):
            error = DeadlineExceeded("The request ran out of time in the queue.")
            self._fail_group(group, error)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        attempt = AttemptKey(sequence.key.request_id, sequence.key.attempt)
        self._events.append(AttemptFailed(attempt, (sequence.key.choice,), error))
        self.sequences.end(sequence, SequenceEvent.FAIL)

    def _fail_group(self, group: SequenceGroup, error: BatonError) -> None:
        choices = tuple(sequence.key.choice for sequence in group.sequences)
        self._events.append(AttemptFailed(group.key, choices, error))
        if group.keep and group.table is not None:
            # Its blocks may be being copied for the hand-over just now.
            self.sequences.keep(group)
        else:
            self._end(group, SequenceEvent.FAIL)

    def _end(self, group: SequenceGroup, event: SequenceEvent) -> None:
        for sequence in group.sequences.copy():
            self.sequences.end(sequence, event)
