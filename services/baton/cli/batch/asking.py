"""Asks the lines of a batch over HTTP until each has its result.

answered            2xx, and refusals that would come again (4xx): the line's result
refused             429: asked again when the server says so, however often, within the window
                    of time that a line has
failed              5xx, 408, a connection that was lost: asked again a few times
unreachable         nobody listens any more: waited for; then the batch ends, and the line has no
                    result
unknown key         401: the batch ends, and the line has no result
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from baton.cli.batch.lines import Task
from baton.cli.batch.window import Window
from baton.cli.http_client import Answer, ConnectionLost, HttpClient, Unreachable
from baton.core.errors import BatonError, Unauthenticated, Unavailable

FAILURES = frozenset({408, 500, 502, 503, 504})
UNKNOWN_KEY = 401
REFUSED = 429
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
DEFAULT_RETRY_S = 1.0
KNOCK_S = 0.5
LOOK_S = 1.0
EXPIRED = "The server had no room for this line in all the time that it had."


@dataclass(frozen=True, slots=True)
class Limits:
    """concurrency: requests at a time, at most. attempts: of a line, those that failed included.
    request_s: time of one attempt. line_s: from a line's first attempt to its last. away_s: how
    long a server that nobody reaches is waited for.
    """

    concurrency: int = 48
    attempts: int = 6
    request_s: float = 660.0
    line_s: float = 86400.0
    away_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line's result, in OpenAI's form: one of the two is not None."""

    task: Task
    response: dict[str, Any] | None
    error: dict[str, Any] | None


class BatchClient:
    """done: told every result at once, in any order. draw: a random number from 0 to 1."""

    def __init__(
        self,
        client: HttpClient,
        limits: Limits,
        done: Callable[[Outcome], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.num_refused = 0
        self._client = client
        self._limits = limits
        self._done = done
        self._draw = draw
        self._window = Window(limits.concurrency)
        self._freed = asyncio.Event()
        self._away_since: float | None = -math.inf
        """None while the server is there. One that was never there is not waited for."""

    async def run(self, tasks: Iterator[Task]) -> None:
        """All of them. Raises Unavailable when the server stays away, Unauthenticated when it does
        not know the key, and a BatonError that `done` raises."""
        places = asyncio.Semaphore(self._limits.concurrency)

        async def one(task: Task) -> None:
            try:
                self._done(await self._outcome(task))
            finally:
                places.release()

        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    await places.acquire()
                    group.create_task(one(task))
        except* BatonError as found:
            raise found.exceptions[0] from None

    async def _outcome(self, task: Task) -> Outcome:
        ends_at = time.monotonic() + self._limits.line_s
        said: Answer | str | None = None
        failed = 0
        while failed < self._limits.attempts:
            said = await self._try(task)
            if said is None:
                await self._wait_for_server()
            elif isinstance(said, Answer) and said.status == REFUSED:
                self.num_refused += 1
                if self._window.not_before >= ends_at:
                    return Outcome(task, None, {"code": "batch_expired", "message": EXPIRED})
            elif isinstance(said, Answer) and said.status not in FAILURES:
                break
            else:
                failed += 1
                if failed < self._limits.attempts:
                    await asyncio.sleep(self._pause_s(failed, said))
        if isinstance(said, Answer):
            return Outcome(task, _response(said), None)
        assert said is not None
        return Outcome(task, None, {"code": "connection_lost", "message": said})

    async def _try(self, task: Task) -> Answer | str | None:
        """The answer; or why there is none; or None when the server cannot be reached."""
        turn = await self._enter()
        again_at: float | None = None
        answered = False
        try:
            said = await self._client.post(task.route, task.body, self._limits.request_s)
            self._away_since = None
            answered = said.status not in FAILURES
            if said.status == UNKNOWN_KEY:
                raise Unauthenticated("is not accepted there", field="api_key")
            if said.status == REFUSED:
                again_at = time.monotonic() + _retry_after_s(said, DEFAULT_RETRY_S)
            return said
        except Unreachable:
            return None
        except ConnectionLost:
            return "The connection was lost."
        except TimeoutError:
            return f"There was no answer within {self._limits.request_s:g} s."
        finally:
            if again_at is not None:
                self._window.refused(turn, again_at)
            else:
                self._window.left(answered=answered)
            self._freed.set()

    async def _enter(self) -> int:
        while not self._window.has_room(now := time.monotonic()):
            self._freed.clear()
            pause_s = max(LOOK_S, self._window.not_before - now)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), pause_s)
        return self._window.enter()

    async def _wait_for_server(self) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since > self._limits.away_s:
            raise Unavailable(f"nothing listens on {self._client.address}")
        await asyncio.sleep(KNOCK_S)

    def _pause_s(self, failed: int, said: Answer | str) -> float:
        """Grows, and no two lines come back at once."""
        told_s = _retry_after_s(said, 0.0) if isinstance(said, Answer) else 0.0
        drawn_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**failed) * (0.5 + self._draw() / 2)
        return max(told_s, drawn_s)


def _retry_after_s(said: Answer, default_s: float) -> float:
    """As the server says, in milliseconds where it does; never less than nothing."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = said.headers.get(name, "")
        if text.isascii() and text.isdigit():
            return float(text) * unit_s
    return default_s


def _response(said: Answer) -> dict[str, Any]:
    try:
        body = json.loads(said.body)
    except ValueError:
        # Of something in between: Baton says JSON.
        body = {"error": {"message": said.body[:1024].decode(errors="replace")}}
    return {
        "status_code": said.status,
        "request_id": said.headers.get("x-request-id", ""),
        "body": body,
    }
