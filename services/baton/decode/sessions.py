"""What each router is owed: tokens of its sequences, grouped into StepFrames; knows no gRPC.

A session belongs to a router's incarnation and outlives its stream by the resume window. Tokens of
a sequence are kept until the router lets go of it (cancel), or for the window after it ended, so
that a new stream can go on from any position. Whatever is not sent yet waits here, merged per
sequence: a slow stream makes larger frames, never a longer queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.core.attempt import AttemptKey, ChoiceTokens, Logprobs, SequenceKey
from baton.core.errors import BatonError
from baton.core.request import FinishReason


@dataclass(slots=True)
class SequenceLog:
    """All tokens of one sequence that this worker made, and how many of them went out."""

    key: SequenceKey
    position: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    sent: int = 0
    ended_at: float | None = None

    def append(self, tokens: ChoiceTokens) -> None:
        self.token_ids.extend(tokens.token_ids)
        self.logprobs.extend(tokens.logprobs)
        self.finish_reason = tokens.finish_reason
        self.stop_token_id = tokens.stop_token_id

    def take_unsent(self) -> ChoiceTokens | None:
        if self.sent == len(self.token_ids):
            return None
        first, self.sent = self.sent, len(self.token_ids)
        return ChoiceTokens(
            key=self.key,
            position=self.position + first,
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:],
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
        )


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt whose KV is complete. Times in seconds."""

    key: AttemptKey
    cached_tokens: int
    received_bytes: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt, or one choice of it, that failed."""

    key: AttemptKey
    choices: tuple[int, ...]
    error: BatonError


@dataclass(slots=True)
class Frame:
    """What goes out in one message."""

    tokens: list[ChoiceTokens] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)


class RouterSession:
    """One router incarnation's sequences on this worker."""

    def __init__(self, router_incarnation: str) -> None:
        self.router_incarnation = router_incarnation
        self.stream: object | None = None
        """The stream that may send now; a newer one replaces it."""
        self.broken_at: float | None = None
        self._logs: dict[SequenceKey, SequenceLog] = {}
        self._dirty: dict[SequenceKey, None] = {}
        self._failures: list[Failure] = []
        self._started: list[Started] = []
        self._wake = asyncio.Event()

    @property
    def keys(self) -> Iterable[SequenceKey]:
        return self._logs.keys()

    def open(self, keys: Sequence[SequenceKey], position: int) -> None:
        for key in keys:
            self._logs[key] = SequenceLog(key, position)

    def tokens(self, tokens: ChoiceTokens, now: float) -> None:
        log = self._logs.get(tokens.key)
        if log is None:
            return
        log.append(tokens)
        if log.finish_reason is not None:
            log.ended_at = now
        self._dirty[tokens.key] = None
        self._wake.set()

    def failed(self, failure: Failure) -> None:
        for choice in failure.choices:
            key = SequenceKey(failure.key.request_id, choice, failure.key.attempt)
            self._logs.pop(key, None)
            self._dirty.pop(key, None)
        self._failures.append(failure)
        self._wake.set()

    def started(self, started: Started) -> None:
        self._started.append(started)
        self._wake.set()

    def forget(self, key: SequenceKey) -> None:
        self._logs.pop(key, None)
        self._dirty.pop(key, None)

    def resume(
        self, positions: dict[SequenceKey, int]
    ) -> tuple[list[SequenceKey], list[SequenceKey]]:
        """Goes on from the router's positions over a new stream.

        Returns (lost, dropped): sequences the router wants that are not here, and sequences that
        are here but the router no longer wants (the caller frees them).
        """
        lost = [key for key in positions if key not in self._logs]
        dropped = [key for key in self._logs if key not in positions]
        for key in dropped:
            self.forget(key)
        for key, log in self._logs.items():
            log.sent = min(max(positions[key] - log.position, 0), len(log.token_ids))
            if log.sent < len(log.token_ids):
                self._dirty[key] = None
        self._wake.set()
        return lost, dropped

    def forget_ended(self, before: float) -> None:
        """Drops the logs of sequences that ended, and went out, before a time."""
        ended = [
            key
            for key, log in self._logs.items()
            if log.ended_at is not None and log.ended_at < before and key not in self._dirty
        ]
        for key in ended:
            del self._logs[key]

    async def next_frame(self, timeout_s: float) -> Frame | None:
        """All that is new, as soon as something is; None after timeout_s of silence."""
        if not (self._dirty or self._failures or self._started):
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        frame = Frame(failures=self._failures, started=self._started)
        self._failures, self._started = [], []
        for key in self._dirty:
            tokens = self._logs[key].take_unsent()
            if tokens is not None:
                frame.tokens.append(tokens)
        self._dirty.clear()
        return frame
