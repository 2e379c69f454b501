"""A running HTTP edge with scripted answers behind it, in this process or in one of its own.

`serving` is the only place that starts a server: what the tests here say holds for any server that
can be started there. Its own process (`EdgeProcess`) is for tests that measure memory, or that
keep no event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from prometheus_client import CollectorRegistry

from batonlm.core.admission.admission import Holding
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Unauthenticated
from batonlm.core.request.request import Accepted, Delta, Event, Request
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.connections import HttpLimits
from batonlm.router.api.http.server import HttpServer, serve_http
from batonlm.rpc.tls import Certificates
from tests.services.router_http.scripted import MODEL, Scripted, http_app, prompt_text

ROOT = Path(__file__).parents[2]
LIVENESS_S = 30.0
"""Bounds every wait for something that has to come; no test measures it."""


LATE_S = 0.3
"""Longer than it takes to send a request."""


class TenantAuthenticator:
    """Knows every key: `Bearer NAME` is the tenant of that name."""

    def authenticate(self, authorization: Sequence[str]) -> Tenant:
        if len(authorization) != 1 or not authorization[0].startswith("Bearer "):
            raise Unauthenticated("Show one API key.")
        return Tenant(authorization[0].removeprefix("Bearer "))

    async def run(self) -> None:
        return


class Lasting(Scripted):
    """Never ends two answers: "endless" comes as fast as it is taken, "silent" says one word and no
    more. And "late" comes later than others."""

    async def open(
        self, request: Request, holding: Holding | None = None
    ) -> AsyncGenerator[Event, None]:
        if prompt_text(request) == "late":
            await asyncio.sleep(LATE_S)
        if prompt_text(request) not in ("endless", "silent"):
            return await super().open(request, holding)
        self.seen.append(request)
        return self._without_end(request)

    async def _without_end(self, request: Request) -> AsyncGenerator[Event, None]:
        self.open_streams += 1
        try:
            yield Accepted(f"{len(self.seen):08x}", MODEL.name, prompt_tokens=1, seed=7)
            self.started.set()
            while True:
                yield Delta(0, "x" * 1000, (120,))
                if prompt_text(request) == "silent":
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
        finally:
            self.open_streams -= 1
            self.closed.set()


@asynccontextmanager
async def serving(
    frontend: Scripted,
    limits: HttpLimits | None = None,
    certificates: Certificates | None = None,
    *,
    keyed: bool = False,
) -> AsyncIterator[HttpServer]:
    """A server on a free port of 127.0.0.1. keyed: with `TenantAuthenticator`, else open to all."""
    access = HttpAccess(TenantAuthenticator() if keyed else OpenAuthenticator())
    app = http_app(frontend, CollectorRegistry(), access)
    server = await serve_http(
        app, "127.0.0.1:0", limits=limits or HttpLimits(), certificates=certificates
    )
    try:
        yield server
    finally:
        await server.close()


class Asked(NamedTuple):
    """A request that reached the frontend."""

    prompt: str
    tenant: str
    traceparent: str


@dataclass(frozen=True)
class EdgeOptions:
    """How an `EdgeProcess` serves. limits: fields of HttpLimits. certificate: with its key."""

    limits: Mapping[str, float]
    certificate: tuple[str, str] | None = None
    keyed: bool = False


class EdgeProcess:
    """A server in a process of its own. Not shared between threads, but for `watched`.

    address: host:port.
    """

    def __init__(self, options: EdgeOptions) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.edge.edge", json.dumps(asdict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.memory = psutil.Process(self._process.pid)
        self.address: str = self._read()

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, port = self.address.rsplit(":", 1)
        return host, int(port)

    def asked(self) -> list[Asked]:
        """The requests that reached the frontend since this was called last."""
        return [Asked(*each) for each in self._ask("asked")]

    def open_streams(self) -> int:
        """Answers that the frontend is giving now."""
        return int(self._ask("open_streams"))

    def wait_for_streams(self, number: int) -> None:
        """Until it gives so many answers."""
        until = time.monotonic() + LIVENESS_S
        while (now := self.open_streams()) != number:
            assert time.monotonic() < until, f"{now} answers are being given, not {number}"
            time.sleep(0.01)

    def connections(self) -> int:
        """Open ones, as the kernel counts them."""
        return sum(1 for each in self.memory.net_connections("tcp") if each.raddr)

    def wait_for_no_connections(self) -> None:
        until = time.monotonic() + LIVENESS_S
        while now := self.connections():
            assert time.monotonic() < until, f"{now} connections are still open"
            time.sleep(0.01)

    @contextmanager
    def watched(self, growth_mib: int) -> Iterator[None]:
        """Within, the process' resident memory never grows by more than that."""
        before, peak, done = self.memory.memory_info().rss, 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.02):
                peak = max(peak, self.memory.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
        peak = max(peak, self.memory.memory_info().rss)
        grown = (peak - before) / (1 << 20)
        assert grown <= growth_mib, f"{before >> 20} MiB grew by {grown:.0f} MiB"

    def close(self) -> None:
        """Asserts that the process ends in order."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Its end alone does not do: processes that a test forked may hold a copy of the pipe.
        self._process.stdin.write("\n")
        self._process.stdin.close()
        try:
            self._process.wait(LIVENESS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        assert self._process.returncode == 0

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the edge's process ended: {self._process.wait(LIVENESS_S)}"
        return json.loads(line)


async def _run(options: EdgeOptions) -> None:
    """Serves until an empty line comes; every other one is a question."""
    frontend = Lasting()
    certificates = Certificates(*options.certificate) if options.certificate else None
    limits = HttpLimits(**options.limits)  # type: ignore[arg-type]
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(questions), sys.stdin
    )
    async with serving(frontend, limits, certificates, keyed=options.keyed) as server:
        _say(server.address)
        while question := (await questions.readline()).decode().strip():
            match question:
                case "asked":
                    _say([_asked(request) for request in frontend.seen])
                    frontend.seen.clear()
                case "open_streams":
                    _say(frontend.open_streams)
                case _:
                    raise ValueError(question)


def _asked(request: Request) -> Asked:
    return Asked(prompt_text(request), request.tenant.name, request.trace.traceparent)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_run(EdgeOptions(**json.loads(sys.argv[1]))))
