"""RouterSession, the sequences of one router and their unsent tokens, merged into step frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from batonlm.core.errors import BatonError
from batonlm.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, Logprobs, SequenceKey
from batonlm.core.request.request import FinishReason
from batonlm.rpc.convert import choice_tokens_to_proto, error_to_proto
from batonlm.v1 import decode_pb2 as pb

MAX_SCORED = 8
"""The most attempts with prompt log probabilities in one frame: each may have megabytes of them.
The tokens of further ones wait too, because they must come after."""


@dataclass(slots=True)
class SequenceLog:
    """All tokens of one sequence that this worker generated."""

    key: SequenceKey
    attempt: Attempt
    """The sequence's, from whose position on the tokens are."""
    adoption_id: bytes = b""
    """Names the sequence to a router that is to go on with it when its own is gone; empty: none
    is."""
    earlier: Sequence[Logprobs] = ()
    """Of the output tokens below its position, where they are known."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    sent: int = 0
    """How many of the tokens were sent."""
    saved_steps: int = 0
    """Of the tokens that are not sent. Those that are sent again have none."""
    end_sent_at: float | None = None
    """When the end of the sequence was last sent, by the monotonic clock."""
    migrated_out: pb.SequenceHandedOver | None = None
    """Set when the sequence generated its last token here and migrates to another worker; the log
    is then kept as long as the hand-over."""

    @property
    def position(self) -> int:
        """The output position of the first token."""
        return self.attempt.position

    @property
    def adoptable(self) -> bool:
        """Whether another router may go on with the sequence, or with its tokens where it has not
        begun: it stays here, and all of it is known here."""
        scored = self.attempt.sampling.top_logprobs is not None
        whole = not scored or len(self.earlier) == self.position
        some = self.end > 0 and self.migrated_out is None
        return bool(self.adoption_id) and some and whole

    @property
    def begun(self) -> bool:
        """Whether it has a token that was made here, or came with its KV."""
        return bool(self.token_ids)

    @property
    def end(self) -> int:
        """The output position of the next token."""
        return self.position + len(self.token_ids)

    def whole(self, key: SequenceKey) -> ChoiceTokens:
        """Returns all tokens of the choice, of a sequence that is adoptable, as this one."""
        before = self.attempt.token_ids[self.attempt.num_prompt_tokens :]
        return ChoiceTokens(
            key,
            0,
            (*before, *self.token_ids),
            (*self.earlier, *self.logprobs),
            self.finish_reason,
            self.stop_token_id,
        )

    def append(self, tokens: ChoiceTokens) -> None:
        self.token_ids.extend(tokens.token_ids)
        self.logprobs.extend(tokens.logprobs)
        self.finish_reason = tokens.finish_reason
        self.stop_token_id = tokens.stop_token_id
        self.saved_steps += tokens.saved_steps

    def take_unsent(self, now: float) -> ChoiceTokens | None:
        if self.sent == len(self.token_ids):
            return None
        first, self.sent = self.sent, len(self.token_ids)
        saved_steps, self.saved_steps = self.saved_steps, 0
        if self.finish_reason is not None:
            self.end_sent_at = now
        return ChoiceTokens(
            key=self.key,
            position=self.position + first,
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:],
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
            saved_steps=saved_steps,
        )


class SessionStream:
    """One stream of a router, compared by identity: only the newest one may send."""


class RouterSession:
    """The sequences of one router instance id on this worker, and what is not sent of them.

    A session outlives its stream by the resume window. A sequence's tokens are kept until the
    router cancels it, or for the window after its end was sent, so that a new stream can continue
    from any position. Unsent tokens are merged per sequence: a slow stream makes frames larger, and
    no queue grows.

    Only the newest stream takes frames. Frames lost by an older one are sent again: a new stream
    begins with the positions up to which the router has tokens.
    """

    def __init__(self, router_instance_id: str) -> None:
        self.router_instance_id = router_instance_id
        self.stream: SessionStream | None = None
        self.broken_at: float | None = None
        """When the last stream ended, by the monotonic clock; None while there is one."""
        self.busy_since: float | None = None
        """When the newest stream took the frame that it is still writing, by the monotonic clock;
        None while it waits for a frame."""
        self.orphaned = False
        """Whether the router is gone for good, and its sequences wait for another one."""
        self._logs: dict[SequenceKey, SequenceLog] = {}
        self._dirty: dict[SequenceKey, None] = {}
        self._wanted: set[SequenceKey] = set()
        """Those that another router wants."""
        self._left: list[ChoiceTokens] = []
        """The tokens of sequences that are not here, of whose logs they are left."""
        self._failures: list[pb.SequenceFailure] = []
        self._started: list[pb.SequenceStarted] = []
        self._kept: list[pb.SequenceHandedOver] = []
        self._wake = asyncio.Event()

    @property
    def keys(self) -> Collection[SequenceKey]:
        return self._logs.keys()

    @property
    def has_news(self) -> bool:
        """Whether anything waits for a frame."""
        # Where `_left` has something, so have the failures.
        return bool(self._dirty or self._failures or self._started or self._kept)

    def attach(self) -> SessionStream:
        """A new stream, which replaces any older one."""
        self.stream, self.broken_at, self.busy_since = SessionStream(), None, None
        self._wake.set()
        return self.stream

    def detach(self, stream: SessionStream) -> None:
        """Notes that a stream has ended."""
        if self.stream is stream:
            self.stream, self.broken_at, self.busy_since = None, time.monotonic(), None

    def cut(self) -> None:
        """Ends the current stream's right to send."""
        self.stream = None
        self._wake.set()

    def wake(self) -> None:
        """Wakes a stream that waits in `next_frame`."""
        self._wake.set()

    def open(
        self,
        attempt: Attempt,
        adoption_ids: Sequence[bytes] = (),
        earlier: Sequence[Logprobs] = (),
    ) -> None:
        """adoption_ids: of each choice; none: no other router goes on with them. earlier: see
        SequenceLog."""
        ids = adoption_ids or [b""] * len(attempt.choices)
        for key, adoption_id in zip(attempt.keys(), ids, strict=True):
            self._logs[key] = SequenceLog(key, attempt, adoption_id, earlier)

    def want(self, adoption_ids: Collection[bytes]) -> None:
        """Another router wants the sequences with these ids, whatever became of this one."""
        self._wanted.update(k for k, log in self._logs.items() if log.adoption_id in adoption_ids)

    def adoptable(self) -> list[SequenceLog]:
        """Returns the sequences that another router may go on with: all, without a stream, and
        otherwise those that one wants."""
        keys = self._logs.keys() if self.stream is None else self._wanted
        return [log for key in keys if (log := self._logs[key]).adoptable]

    def tokens(self, tokens: ChoiceTokens) -> None:
        log = self._logs.get(tokens.key)
        if log is None:
            return
        log.append(tokens)
        self._dirty[tokens.key] = None
        self._wake.set()

    def failed(
        self,
        key: AttemptKey,
        choices: Iterable[int],
        error: BatonError,
        *,
        adopted: bool = False,
    ) -> None:
        """Queues the failure of choices of an attempt. adopted: another router goes on with
        them."""
        choices = tuple(choices)
        for choice in choices:
            self.forget(SequenceKey(key.request_id, choice, key.attempt))
        self._failures.append(
            pb.SequenceFailure(
                request_id=key.request_id,
                attempt=key.attempt,
                choices=choices,
                error=error_to_proto(error),
                adopted=adopted,
            )
        )
        self._wake.set()

    def left(self, tokens: ChoiceTokens, error: BatonError) -> None:
        """Queues the tokens of a sequence, and after them its failure."""
        self._left.append(tokens)
        self.failed(
            AttemptKey(tokens.key.request_id, tokens.key.attempt), (tokens.key.choice,), error
        )

    def started(self, started: pb.SequenceStarted) -> None:
        """Queues the report that the KV of an attempt is complete."""
        self._started.append(started)
        self._wake.set()

    def migrated_out(self, key: SequenceKey, handover_id: bytes, position: int | None) -> None:
        """Queues the report, after all its tokens, that a sequence's KV is offered to another
        worker. position: how many output tokens it has; None when it stays here."""
        made = pb.SequenceHandedOver(
            request_id=key.request_id,
            attempt=key.attempt,
            choice=key.choice,
            handover_id=handover_id,
            position=position,
        )
        log = self._logs.get(key)
        if position is None:
            self._kept.append(made)
        elif log is not None:
            log.migrated_out = made
            self._dirty[key] = None
        self._wake.set()

    def forget(self, key: SequenceKey) -> None:
        self._logs.pop(key, None)
        self._dirty.pop(key, None)
        self._wanted.discard(key)

    def resume(
        self, positions: Mapping[SequenceKey, int]
    ) -> tuple[list[SequenceKey], list[SequenceKey]]:
        """Continues from the router's positions on a new stream.

        Returns (lost, dropped): sequences that the router named and that are not here, and
        sequences that are here and that it did not name (the caller frees them). A migrating
        sequence is never dropped: it ends with its hand-over, which does not involve the router.
        """
        lost = [key for key in positions if key not in self._logs]
        unwanted = self._logs.keys() - positions.keys()
        dropped = [key for key in unwanted if self._logs[key].migrated_out is None]
        for key in dropped:
            self.forget(key)
        for key in self._logs.keys() & positions.keys():
            log = self._logs[key]
            log.sent = min(max(positions[key] - log.position, 0), len(log.token_ids))
            if log.sent < len(log.token_ids) or log.migrated_out is not None:
                self._dirty[key] = None
        return lost, dropped

    def forget_ended(self, before: float) -> None:
        """Drops the logs of sequences whose end was sent before `before`, while a stream is
        open."""
        if self.stream is None:
            return
        ended = [
            key
            for key, log in self._logs.items()
            if log.end_sent_at is not None and log.end_sent_at < before and key not in self._dirty
        ]
        for key in ended:
            self.forget(key)

    async def next_frame(self, stream: SessionStream, timeout_s: float) -> pb.StepFrame | None:
        """Waits for anything to send, and returns all of it, with `step` not set. Returns None
        after timeout_s, when the stream was replaced, or on `wake`.
        """
        if self.stream is stream:
            self.busy_since = None
            if not self.has_news:
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._wake.wait()
        # Checked after the wait: a frame taken by a replaced stream would be lost.
        if self.stream is not stream or not self.has_news:
            return None
        self.busy_since = now = time.monotonic()
        started, self._started = self._started, []
        dirty, self._dirty = self._dirty, {}
        if sum(each.HasField("prompt_logprobs") for each in started) > MAX_SCORED:
            started, self._started = started[:MAX_SCORED], started[MAX_SCORED:]
            later = {AttemptKey(each.request_id, each.attempt) for each in self._started}
            self._dirty = {k: None for k in dirty if AttemptKey(k.request_id, k.attempt) in later}
        logs = [self._logs[key] for key in dirty if key not in self._dirty]
        unsent = [tokens for log in logs if (tokens := log.take_unsent(now)) is not None]
        leaving = [log.migrated_out for log in logs if log.migrated_out is not None]
        frame = pb.StepFrame(
            tokens=[choice_tokens_to_proto(tokens) for tokens in (*self._left, *unsent)],
            failures=self._failures,
            started=started,
            handed_over=[*self._kept, *leaving],
        )
        self._left, self._failures, self._kept = [], [], []
        return frame
