"""An open-loop HTTP load in a process of its own: requests leave when they are due, whatever became
of those before. Knows nothing of what serves it.

Raw sockets, kept alive, and no parsing beyond what times need, so that it sustains what it is told;
how late its own requests left is part of what it tells.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.cli.bench.child import progress

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
        self._idle: dict[int, list[_Connection]] = {i: [] for i in range(len(job["targets"]))}

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
        connection = idle.pop() if idle else await _Connection.open(self._targets[one.target])
        try:
            await connection.ask(one, self._headers(one), body)
        except BaseException:
            connection.close()
            raise
        idle.append(connection)

    @property
    def _targets(self) -> list[str]:
        targets: list[str] = self._job["targets"]
        return targets

    def _headers(self, one: Asked) -> str:
        headers: list[str] = self._job["headers"]
        return headers[one.tenant]

    def _body(self) -> bytes:
        ids = [self._draw.randrange(64, 1900) for _ in range(self._job["prompt_tokens"])]
        text: str = self._job["body"].replace("PROMPT", json.dumps(ids))
        return text.encode()


class _Connection:
    """One kept-alive connection, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, target: str) -> _Connection:
        host, _, port = target.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def close(self) -> None:
        self._writer.close()

    async def ask(self, one: Asked, headers: str, body: bytes) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: b\r\n{headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        one.status = int(answer.split(" ", 2)[1])
        fields = dict(line.split(": ", 1) for line in answer.splitlines()[1:] if ": " in line)
        if one.status == 200:
            await self._events(one, began)
        else:
            await self._reader.readexactly(int(fields["content-length"]))
        one.took_s = time.perf_counter() - began
        if one.status == 429:
            one.refusals_s.append(one.took_s)
            one.retry_after_s.append(float(fields["retry-after"]))

    async def _events(self, one: Asked, began: float) -> None:
        """Chunked transfer coding around server-sent events."""
        one.tokens, one.whole = 0, False
        while size := int((await self._reader.readuntil(b"\r\n")).strip(), 16):
            chunk = (await self._reader.readexactly(size + 2))[:-2]
            if not one.tokens and b'"text"' in chunk:
                one.first_s = time.perf_counter() - began
            # An event may carry several tokens: ids are listed, one comma less than there are.
            for ids in chunk.split(b'"token_ids":[')[1:]:
                inside = ids.split(b"]", 1)[0]
                one.tokens += inside.count(b",") + 1 if inside else 0
            if b"[DONE]" in chunk and b'"error"' not in chunk:
                one.whole = True
        await self._reader.readuntil(b"\r\n")
