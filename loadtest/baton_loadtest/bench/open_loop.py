"""An open-loop HTTP load in a process of its own: requests leave when they are due, whatever became
of those before.

Kept-alive connections with as little work as can be, so that it sustains what it is told; how late
its own requests left is part of what it tells.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.rpc.address import split
from baton_loadtest.bench.child import progress
from baton_loadtest.drive import Events, HttpConnection

END_S = 60.0
"""What has not ended so long after the last arrival counts as failed."""

RETRIES_AT_ONCE = 5
PAUSE_S = 0.25
"""Of a closed load's client that was refused."""


@dataclass(slots=True)
class Asked:
    """One request, as its client saw it. at: when it was due, from the phase's beginning; lag_s:
    how much later it left. status: of the last try, 0 for none. first_s: to the first token.
    took_s: to the end of the answer, of the last try. refusals_s: how long each refusal took.
    """

    at: float
    tenant: int = 0
    target: int = 0
    lag_s: float = 0.0
    status: int = 0
    first_s: float = 0.0
    took_s: float = 0.0
    tokens: int = 0
    whole: bool = False
    refusals_s: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)

    def meets(self, first_s: float, between_s: float) -> bool:
        """Whether it was answered in full, and in time: the first token, and the others after
        it on average."""
        if not self.whole or self.first_s > first_s:
            return False
        return (self.took_s - self.first_s) <= between_s * max(1, self.tokens - 1)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: targets (host:port of each router), headers of each tenant, body (text of a request with
    PROMPT in place of its token ids), prompt_tokens, seed, phases. A phase: name, seconds, streams:
    each with tenant, targets (numbers), rate per second; retry: whether who is refused asks again
    at once, five times; or closed: how many at a time, one behind the other.

    Returns the requests of each phase.
    """
    return {"phases": asyncio.run(_Load(job).run())}


class _Load:
    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._draw = random.Random(job["seed"])
        self._targets = [split(target, "targets") for target in job["targets"]]
        self._idle: dict[int, list[HttpConnection]] = {i: [] for i in range(len(self._targets))}

    async def run(self) -> list[list[dict[str, Any]]]:
        found = []
        for phase in self._job["phases"]:
            asked = await (self._closed(phase) if "closed" in phase else self._open(phase))
            ended = sum(one.whole for one in asked)
            statuses = sorted(Counter(one.status for one in asked).items())
            told = ", ".join(f"{count} of status {status}" for status, count in statuses)
            progress(f"{phase['name']}: {len(asked)} asked, {ended} answered in full; {told}")
            found.append([asdict(one) for one in asked])
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        return found

    async def _open(self, phase: dict[str, Any]) -> list[Asked]:
        """Poisson arrivals of every stream, drawn before the first one leaves."""
        due: list[Asked] = []
        for stream in phase["streams"]:
            at = self._draw.expovariate(stream["rate"])
            while at < phase["seconds"]:
                target = self._draw.choice(stream["targets"])
                due.append(Asked(at, stream["tenant"], target))
                at += self._draw.expovariate(stream["rate"])
        due.sort(key=lambda one: one.at)
        bodies = [self._body() for _ in due]
        retry = phase.get("retry", False)
        began, running = time.perf_counter(), set()
        for one, body in zip(due, bodies, strict=True):
            await asyncio.sleep(max(0.0, began + one.at - time.perf_counter()))
            one.lag_s = time.perf_counter() - began - one.at
            task = asyncio.create_task(self._ask(one, body, retry))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            _, late = await asyncio.wait(running, timeout=END_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return due

    async def _closed(self, phase: dict[str, Any]) -> list[Asked]:
        asked: list[Asked] = []
        began = time.perf_counter()

        async def client() -> None:
            while (at := time.perf_counter() - began) < phase["seconds"]:
                one = Asked(at)
                asked.append(one)
                await self._ask(one, self._body(), False)
                if not one.whole:
                    await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(client() for _ in range(phase["closed"])))
        return asked

    async def _ask(self, one: Asked, body: bytes, retry: bool) -> None:
        for _ in range(1 + RETRIES_AT_ONCE * retry):
            try:
                await self._try(one, body)
            except (OSError, EOFError, ValueError):
                one.status = 0
            if one.status != 429:
                return

    async def _try(self, one: Asked, body: bytes) -> None:
        idle = self._idle[one.target]
        while idle and not idle[-1].usable:
            idle.pop()
        connection = idle.pop() if idle else await HttpConnection.open(*self._targets[one.target])
        request = self._head(one, len(body)).encode() + body
        began = time.perf_counter()
        one.tokens = 0

        def hear(_: Sequence[int], count: int) -> None:
            if not one.tokens:
                one.first_s = time.perf_counter() - began
            one.tokens += count

        events = Events(hear)
        head = await connection.ask(request, events.feed)
        one.status, one.took_s = head.status, time.perf_counter() - began
        one.whole = events.done and not events.failed
        if one.status == 429:
            one.refusals_s.append(one.took_s)
            one.retry_after_s.append(float(head.headers["retry-after"]))
        if connection.usable:
            idle.append(connection)
        else:
            connection.close()

    def _head(self, one: Asked, length: int) -> str:
        return (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"{self._job['headers'][one.tenant]}"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        )

    def _body(self) -> bytes:
        ids = [self._draw.randrange(64, 1900) for _ in range(self._job["prompt_tokens"])]
        text: str = self._job["body"].replace("PROMPT", json.dumps(ids))
        return text.encode()
