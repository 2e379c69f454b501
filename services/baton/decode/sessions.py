"""What each router is owed: tokens of its sequences, grouped into StepFrames.

A session belongs to a router's instance id and outlives its stream by the resume window. Tokens of
a sequence are kept until the router lets go of it (cancel), or for the window after its end went
out, so that a new stream can go on from any position. Whatever is not sent yet waits here, merged
per sequence: a slow stream makes larger frames, never a longer queue.

Only the newest stream of a router takes frames. What an older one took and lost, the newer one asks
for again when it says how far the router has come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from baton.core.errors import BatonError
from baton.core.request.attempt import AttemptKey, ChoiceTokens, Logprobs, SequenceKey
from baton.core.request.prompt_logprobs import PromptLogprobs
from baton.core.request.request import FinishReason

MAX_SCORED = 8
"""Attempts with prompts' log-probabilities that are told in one message: each may be megabytes. The
others' tokens wait as well, because they come after."""


@dataclass(slots=True)
class SequenceLog:
    """All tokens of one sequence that this worker made, and how many of them went out.

    end_sent_at: when the end of the sequence last went out. migrated_out: set when it made its last
    token here and another worker is to go on with it; the log then lives as long as the hand-over.
    """

    key: SequenceKey
    position: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    sent: int = 0
    end_sent_at: float | None = None
    migrated_out: MigratedOut | None = None

    def append(self, tokens: ChoiceTokens) -> None:
        self.token_ids.extend(tokens.token_ids)
        self.logprobs.extend(tokens.logprobs)
        self.finish_reason = tokens.finish_reason
        self.stop_token_id = tokens.stop_token_id

    def take_unsent(self, now: float) -> ChoiceTokens | None:
        if self.sent == len(self.token_ids):
            return None
        first, self.sent = self.sent, len(self.token_ids)
        if self.finish_reason is not None:
            self.end_sent_at = now
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
    """An attempt whose KV is complete. Times in seconds. prompt_logprobs: of its input, when asked
    for and computed here."""

    key: AttemptKey
    cached_tokens: int
    received_bytes: int
    wait_s: float
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt, or one choice of it, that failed."""

    key: AttemptKey
    choices: tuple[int, ...]
    error: BatonError


@dataclass(frozen=True, slots=True)
class MigratedOut:
    """Answer to the wish that a sequence be handed over. position: how many output tokens it has,
    or None when it stays here."""

    key: SequenceKey
    handover_id: bytes
    position: int | None


@dataclass(slots=True)
class Frame:
    """What goes out in one message."""

    tokens: list[ChoiceTokens] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    migrated_out: list[MigratedOut] = field(default_factory=list)


class Stream:
    """One stream of a router, as a name for who may send."""


class RouterSession:
    """One router instance id's sequences on this worker.

    broken_at: when its last stream ended, None while there is one. busy_since: when the newest
    stream took a frame that it is still writing, None while it asks for more. Readings of the
    monotonic clock.
    """

    def __init__(self, router_instance_id: str) -> None:
        self.router_instance_id = router_instance_id
        self.stream: Stream | None = None
        self.broken_at: float | None = None
        self.busy_since: float | None = None
        self._logs: dict[SequenceKey, SequenceLog] = {}
        self._dirty: dict[SequenceKey, None] = {}
        self._failures: list[Failure] = []
        self._started: list[Started] = []
        self._kept: list[MigratedOut] = []
        self._wake = asyncio.Event()

    @property
    def keys(self) -> Collection[SequenceKey]:
        return self._logs.keys()

    @property
    def has_news(self) -> bool:
        """Whether something was not taken by a stream yet."""
        return bool(self._dirty or self._failures or self._started or self._kept)

    def attach(self) -> Stream:
        """A new stream, which takes the place of any older one."""
        self.stream, self.broken_at, self.busy_since = Stream(), None, None
        self._wake.set()
        return self.stream

    def detach(self, stream: Stream) -> None:
        """A stream has ended."""
        if self.stream is stream:
            self.stream, self.broken_at, self.busy_since = None, time.monotonic(), None

    def cut(self) -> None:
        """Lets no stream send any more."""
        self.stream = None
        self._wake.set()

    def wake(self) -> None:
        """Whoever waits for a frame looks around."""
        self._wake.set()

    def open(self, keys: Iterable[SequenceKey], position: int) -> None:
        for key in keys:
            self._logs[key] = SequenceLog(key, position)

    def tokens(self, tokens: ChoiceTokens) -> None:
        log = self._logs.get(tokens.key)
        if log is None:
            return
        log.append(tokens)
        self._dirty[tokens.key] = None
        self._wake.set()

    def failed(self, failure: Failure) -> None:
        for choice in failure.choices:
            self.forget(SequenceKey(failure.key.request_id, choice, failure.key.attempt))
        self._failures.append(failure)
        self._wake.set()

    def started(self, started: Started) -> None:
        self._started.append(started)
        self._wake.set()

    def migrated_out(self, given: MigratedOut) -> None:
        """A sequence's KV is on offer, behind all its tokens; or it stays."""
        log = self._logs.get(given.key)
        if given.position is None:
            self._kept.append(given)
        elif log is not None:
            log.migrated_out = given
            self._dirty[given.key] = None
        self._wake.set()

    def forget(self, key: SequenceKey) -> None:
        self._logs.pop(key, None)
        self._dirty.pop(key, None)

    def resume(
        self, positions: Mapping[SequenceKey, int]
    ) -> tuple[list[SequenceKey], list[SequenceKey]]:
        """Goes on from the router's positions over a new stream.

        Returns (lost, dropped): sequences the router wants that are not here, and sequences that
        are here but the router no longer wants (the caller frees them). One that is given away ends
        with its hand-over, which does not go through the router.
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
        """Drops the logs of sequences whose end went out before a time, unless the stream broke."""
        if self.stream is None:
            return
        ended = [
            key
            for key, log in self._logs.items()
            if log.end_sent_at is not None and log.end_sent_at < before and key not in self._dirty
        ]
        for key in ended:
            del self._logs[key]

    async def next_frame(self, stream: Stream, timeout_s: float) -> Frame | None:
        """All that is new, as soon as something is. None when there was nothing for timeout_s,
        when the stream was replaced, and sometimes sooner.
        """
        if self.stream is stream:
            self.busy_since = None
            if not self.has_news:
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._wake.wait()
        # Looked at after the wait: what a replaced stream took now, nobody would get.
        if self.stream is not stream or not self.has_news:
            return None
        self.busy_since = now = time.monotonic()
        frame = Frame(failures=self._failures, started=self._started, migrated_out=self._kept)
        self._failures, self._started, self._kept = [], [], []
        dirty, self._dirty = self._dirty, {}
        if _num_scored(frame.started) > MAX_SCORED:
            frame.started, self._started = frame.started[:MAX_SCORED], frame.started[MAX_SCORED:]
            later = {started.key for started in self._started}
            self._dirty = {k: None for k in dirty if AttemptKey(k.request_id, k.attempt) in later}
        for key in dirty:
            if key in self._dirty:
                continue
            log = self._logs[key]
            tokens = log.take_unsent(now)
            if tokens is not None:
                frame.tokens.append(tokens)
            if log.migrated_out is not None:
                frame.migrated_out.append(log.migrated_out)
        return frame


def _num_scored(started: Iterable[Started]) -> int:
    return sum(each.prompt_logprobs is not None for each in started)
