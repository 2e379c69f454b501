"""DecodeScheduler, which sequences get their next token; knows neither routers nor transfers.

Every step is continuous batching: what ended is gone, what arrived joins, tables grow by a block
where the next token needs one, and all that runs gets one token. Inputs that are computed here
(local prefill) share the step under a budget that bounds running sequences' inter-token latency.

Blocks come with growth headroom: nothing is let in unless it and all that runs can grow by
`headroom` positions, so nobody is let in only to push somebody out. When blocks run out all the
same, the least important and latest sequence is preempted: its tokens become an input that is
computed again, mostly from the prefix cache, and its next token is drawn at the same position as it
would have been. While an input waits for blocks, nothing that is not more important passes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.attempt import Attempt, AttemptKey, ChoiceTokens, Logprobs, SequenceKey
from baton.core.block_pool import BlockPool
from baton.core.errors import BatonError, DeadlineExceeded, Internal, InvalidArgument, NotFound
from baton.core.events import Event, Failed, Started, Tokens
from baton.core.intake import Intake
from baton.core.plan import BlockCopy, Chunk, Extents, StepPlan, StepResult
from baton.core.roster import Roster
from baton.core.scheduling import Load, QueueLimit, earliest
from baton.core.sequence import Sequence, SequenceEvent, SequenceState
from baton.core.shared_input import SharedInput


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """max_sequences: how many own blocks at once. token_budget: positions of a step at most, one of
    them for each running sequence. prefill_budget: most of them for local prefill while sequences
    run. headroom: positions that all that is let in can grow. limit: what may wait to be computed.
    """

    max_sequences: int = 256
    token_budget: int = 2048
    prefill_budget: int = 256
    headroom: int = 64
    limit: QueueLimit = field(default_factory=QueueLimit)


class _Launched(NamedTuple):
    step: int
    running: list[Sequence]
    inputs: list[tuple[SharedInput, int]]
    """With the position each will be computed up to."""


class DecodeScheduler:
    """Implements `Scheduler`."""

    def __init__(
        self,
        pool: BlockPool,
        policy: DecodePolicy,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        vocab_size: int = 2**31,
        model_digest: str = "",
    ):
        smallest = min(policy.prefill_budget, policy.token_budget - policy.max_sequences)
        if smallest < pool.block_size:
            raise ValueError(
                "prefill_budget, and token_budget - max_sequences, must be at least one block, "
                "or local prefill can starve"
            )
        self._pool = pool
        self._policy = policy
        # A sequence that fits the pool alone can always be run again, so preemption always ends.
        max_positions = min(max_model_len, pool.num_blocks * pool.block_size)
        self._intake = Intake(
            block_size=pool.block_size,
            max_positions=max_positions,
            max_model_len=max_positions,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            model_digest=model_digest,
        )
        self._roster = Roster(pool)
        self._launched: deque[_Launched] = deque()
        self._events: list[Event] = []
        self._step = 0

    @property
    def has_work(self) -> bool:
        return len(self._roster) > 0

    @property
    def load(self) -> Load:
        return self._roster.load

    def reserve(self, attempt: Attempt, now: float, *, max_unconfirmed: int = 0) -> int | None:
        """Takes blocks for an input whose KV another worker will hand over, and its growth.

        Returns the first position that is needed (those before it are here; it may be the input's
        length), or None when there is no room now. Raises InvalidArgument or ContextLengthExceeded.
        What is reserved stays until `admit` or `cancel`.
        """
        shared = self._open(attempt, now, max_unconfirmed)
        if self._must_not_pass(attempt.priority):
            return None
        if not self._take_blocks(shared, len(shared.tokens), self._blocks_to_keep()):
            return None
        self._roster.expect(shared)
        return shared.computed

    def admit(self, key: AttemptKey, tokens: Many[ChoiceTokens], now: float) -> None:
        """The KV of a reserved attempt is complete; its choices go on from their first tokens.

        tokens: token 0 of this attempt for every choice that was not cancelled. They are told again
        in a Tokens event; choices that they end do not run. Raises NotFound for an attempt that is
        not reserved (any more), InvalidArgument for tokens that do not fit it; then it stays
        reserved.
        """
        shared = self._roster.arriving.get(key)
        if shared is None:
            raise NotFound("This attempt is not reserved here.")
        first = {choice_tokens.key: choice_tokens for choice_tokens in tokens}
        for sequence in shared.sequences:
            given = first.get(sequence.key)
            if given is None or given.position != sequence.position or len(given.token_ids) != 1:
                raise InvalidArgument("Every choice needs the token of its next position.")
            self._intake.check_token(given.token_ids[0], "tokens")
        shared.computed = len(shared.tokens)
        self._ready(shared, now)
        made = []
        for sequence in shared.sequences:
            given = first[sequence.key]
            logprobs = given.logprobs[0] if given.logprobs else None
            made.append(self._accept(sequence, given.token_ids[0], logprobs))
        self._events.append(Tokens(tuple(made), self._step))

    def add(self, attempt: Attempt, now: float, *, max_unconfirmed: int = 0) -> None:
        """Queues an attempt whose input is computed here.

        Raises InvalidArgument, ContextLengthExceeded or Overloaded.
        """
        shared = self._open(attempt, now, max_unconfirmed)
        self._policy.limit.check(self.load, attempt)
        self._roster.wait(shared)

    def cancel(self, key: AttemptKey, choices: Iterable[int] = ()) -> None:
        """Ends choices of an attempt, all if none is named. No event follows.

        Unknown ones are no error.
        """
        sequences = self._roster.choices(key)
        for choice in tuple(choices) or sequences:
            if choice in sequences:
                self._roster.end(sequences[choice], SequenceEvent.CANCEL)

    def confirm(self, key: SequenceKey, position: int) -> None:
        """Output positions below this one hold no stop string. Unknown sequences are no error."""
        sequence = self._roster.find(key)
        if sequence is None:
            return
        sequence.confirmed = max(sequence.confirmed, min(position, sequence.position))
        if sequence.state is SequenceState.PAUSED and not sequence.must_wait:
            sequence.move(SequenceEvent.RESUME)

    def tokens_from(self, key: SequenceKey, position: int) -> ChoiceTokens | None:
        """What a sequence that has not ended sampled here from an output position on, or None."""
        sequence = self._roster.find(key)
        return None if sequence is None else sequence.tokens_from(position)

    def extents(self, key: AttemptKey) -> Extents:
        """Where a reserved attempt's KV goes. Raises NotFound when it is not reserved."""
        shared = self._roster.arriving.get(key)
        if shared is None or shared.table is None:
            raise NotFound("This attempt is not reserved here.")
        return shared.table.extents

    def plan(self, now: float) -> StepPlan | None:
        self._expire(now)
        ready = self._grow(
            [
                sequence
                for sequence in self._roster.running.values()
                if sequence.state is SequenceState.RUNNING and not sequence.in_flight
            ],
            now,
        )
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        for sequence in ready:
            table = sequence.table
            assert table is not None
            if table.copy is not None and (copy := self._pool.claim_copy(table)):
                copies.append(copy)
            sequence.in_flight = True
            chunks.append(
                Chunk(
                    sequence.id,
                    (sequence.tokens[-1],),
                    sequence.computed,
                    table.extents,
                    (sequence.sample_row(),),
                )
            )
        budget = self._policy.token_budget
        if ready:
            budget = min(self._policy.prefill_budget, budget - len(ready))
        inputs = self._plan_inputs(budget, now, chunks)
        if not chunks:
            return None
        self._step += 1
        self._launched.append(_Launched(self._step, ready, inputs))
        self._pool.launched(self._step)
        return StepPlan(self._step, tuple(chunks), tuple(copies))

    def apply(self, result: StepResult, now: float) -> list[Event]:
        if not self._launched or self._launched[0].step != result.step:
            raise Internal(f"step {result.step} is not the oldest one")
        launched = self._launched.popleft()
        self._pool.completed(result.step)
        for sequence in launched.running:
            sequence.in_flight = False
            sequence.computed += 1
            if sequence.computed % self._pool.block_size == 0:
                self._publish(sequence)
        for shared, end in launched.inputs:
            shared.in_flight = False
            if shared.table is None:
                continue
            shared.computed = end
            if shared.remaining:
                shared.publish(self._pool)
            else:
                self._ready(shared, now)
                launched.running.extend(shared.sequences)
        given = {token.sequence_id: token for token in result.tokens}
        made = []
        for sequence in launched.running:
            token = given.get(sequence.id)
            if sequence.id not in self._roster.running:
                continue
            if token is None:
                self._fail(sequence, Internal("The model gave no token for this sequence."))
            else:
                made.append(self._accept(sequence, token.token_id, token.logprobs))
        if made:
            self._events.append(Tokens(tuple(made), result.step))
        return self.take_events()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def next_wake(self, now: float) -> float | None:
        return earliest([shared.deadline for shared in self._roster.waiting], now)

    def check(self) -> None:
        self._roster.check()

    def _open(self, attempt: Attempt, now: float, max_unconfirmed: int) -> SharedInput:
        """Raises InvalidArgument when its choices can never own enough blocks at once."""
        shared = self._intake.admit(attempt, now, max_unconfirmed=max_unconfirmed)
        if attempt.key in self._roster:
            raise InvalidArgument("This attempt already runs here.", field="attempt")
        choices = len(attempt.choices)
        whole, fork = shared.blocks_wanted(self._pool.block_size, self._policy.headroom)
        wanted = whole + fork * (choices - 1)
        if wanted > self._pool.num_blocks or choices > self._policy.max_sequences:
            raise InvalidArgument(
                f"This worker cannot run {choices} choices of this input at once.", field="n"
            )
        return shared

    def _must_not_pass(self, priority: int) -> bool:
        """Whether something as important waits for blocks that it was refused or had to give."""
        return any(
            shared.held_back and shared.priority <= priority and not shared.must_wait
            for shared in self._roster.waiting
        )

    def _blocks_to_keep(self) -> int:
        """Blocks that all running sequences still need to grow by the headroom."""
        size, headroom = self._pool.block_size, self._policy.headroom
        missing = 0
        for sequence in self._roster.running.values():
            assert sequence.table is not None
            most = min(len(sequence.tokens) + headroom, sequence.rule.max_positions - 1)
            missing += max(0, -(-most // size) - len(sequence.table.blocks))
        return missing

    def _grow(self, ready: list[Sequence], now: float) -> list[Sequence]:
        """Makes room for each sequence's next position; returns those that have it."""
        size = self._pool.block_size
        short = [s for s in ready if s.table and s.computed >= len(s.table.blocks) * size]
        if not short:
            return ready
        for sequence in sorted(short, key=_rank):
            while sequence.table and not self._pool.grow(sequence.table):
                # Blocks given up now return only when the steps in flight are done.
                if self._launched:
                    break
                victims: tuple[Sequence | SharedInput, ...] = (
                    *self._roster.running.values(),
                    *self._roster.prefilling,
                )
                self._roster.push_back(max(victims, key=_rank), now)
        return [s for s in ready if s.table and s.computed < len(s.table.blocks) * size]

    def _plan_inputs(
        self, budget: int, now: float, chunks: list[Chunk]
    ) -> list[tuple[SharedInput, int]]:
        """Adds chunks of inputs within a token budget: those begun first, then new ones."""
        size = self._pool.block_size
        planned: list[tuple[SharedInput, int]] = []
        begun = sorted(self._roster.prefilling, key=_rank)
        keep_free = self._blocks_to_keep() if self._roster.waiting else 0
        for shared in (*begun, *sorted(self._roster.waiting, key=_rank)):
            if budget < min(shared.remaining, size):
                break
            if shared.in_flight or shared.must_wait:
                continue
            if shared.table is None and not self._start(shared, keep_free):
                break
            chunk = shared.chunk(budget, size)
            shared.in_flight = True
            chunks.append(chunk)
            planned.append((shared, chunk.end_position))
            budget -= len(chunk.token_ids)
        return planned

    def _start(self, shared: SharedInput, keep_free: int) -> bool:
        """Takes a waiting input's blocks. Its last position is always computed, for its logits."""
        if not self._take_blocks(shared, len(shared.tokens) - 1, keep_free):
            return False
        self._roster.start(shared)
        return True

    def _take_blocks(self, shared: SharedInput, max_cached: int, keep_free: int) -> bool:
        num_owning = self._roster.num_owning + len(shared.sequences)
        shared.held_back = num_owning > self._policy.max_sequences or not shared.take_blocks(
            self._pool,
            max_cached=max_cached,
            headroom=self._policy.headroom,
            keep_free=keep_free,
        )
        return not shared.held_back

    def _ready(self, shared: SharedInput, now: float) -> None:
        self._roster.part(shared)
        if not shared.resumed:
            self._events.append(Started(shared.key, shared.cached, now - shared.arrived))

    def _accept(self, sequence: Sequence, token_id: int, logprobs: Logprobs | None) -> ChoiceTokens:
        made = sequence.accept(token_id, logprobs)
        if made.finish_reason is not None:
            self._roster.end(sequence, SequenceEvent.FINISH)
        elif sequence.must_wait:
            sequence.move(SequenceEvent.PAUSE)
        return made

    def _publish(self, sequence: Sequence) -> None:
        if sequence.table is None or sequence.chain is None:
            return
        num_blocks = sequence.computed // self._pool.block_size
        sequence.chain.extend(sequence.tokens, num_blocks)
        self._pool.publish(sequence.table, sequence.chain, num_blocks)

    def _expire(self, now: float) -> None:
        """Drops what is out of time before it costs any."""
        for shared in self._roster.waiting.copy():
            if shared.deadline is not None and shared.deadline <= now:
                for sequence in shared.sequences.copy():
                    error = DeadlineExceeded("The request ran out of time in the queue.")
                    self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        attempt = AttemptKey(sequence.key.request_id, sequence.key.attempt)
        self._events.append(Failed(attempt, (sequence.key.choice,), error))
        self._roster.end(sequence, SequenceEvent.FAIL)


def _rank(one: Sequence | SharedInput) -> tuple[int, int]:
    """Smaller is more important: priority class, then arrival."""
    return one.priority, one.id
