"""Runs a scenario against a server, at its rate or at several rates in turn."""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from baton_loadtest.drive import GrpcLoadClient, HttpLoadClient, LoadLimits, OpenLoop, Run, TokenIds
from baton_loadtest.load.scenario import Source
from baton_loadtest.load.search import Found, Range, Verdict, highest
from baton_loadtest.load.summary import Objectives, Summary
from batonlm.cli.access import Access
from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.rpc.address import split
from batonlm.rpc.loop import Loop

LOOK_S, SAY_S = 0.5, 10.0


class Shown:
    """Shows the progress on stderr: a bar on a terminal, otherwise a line now and then. Close it.

    total: the maximum number of requests.
    """

    def __init__(self, total: int, what: str) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._total, self._what = total, what
        self._looked = self._shown_at = time.monotonic()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("due, {task.fields[open]} open"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # The refresh thread would take time from the requests.
            auto_refresh=False,
            disable=not self._console.is_terminal,
        )
        self._bar = self._bars.add_task(what, total=total, open=0)
        self._bars.start()

    def __call__(self, run: Run, num_open: int) -> None:
        """Called often; mostly does nothing."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._console.is_terminal:
            self._bars.update(self._bar, completed=len(run.samples), open=num_open, refresh=True)
        elif now - self._shown_at >= SAY_S:
            self._shown_at = now
            self._console.print(
                f"{self._what}: {len(run.samples)} of {self._total} due, {num_open} open"
            )

    def close(self) -> None:
        self._bars.stop()


CONNECT_S = 5.0
OTHER_FILES = 64
"""Open files of this process besides connections."""

Tried = list[tuple[float, Summary]]
T = TypeVar("T")


class Runs:
    """args: arguments of `baton loadtest`. face: http or grpc."""

    def __init__(self, args: argparse.Namespace, face: str, where: Access) -> None:
        """Raises InvalidArgument, and Unavailable if nothing listens."""
        first, dash, last = args.token_ids.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal()):
            raise InvalidArgument("must be FIRST-LAST", field="token_ids")
        self._token_ids = TokenIds(args.seed, int(first), int(last))
        self._seed: int = args.seed
        self._limits = LoadLimits(args.max_open, args.timeout_s, args.timeout_s)
        self._objectives = Objectives(args.slo_first_s, args.slo_between_s, args.lag_s)
        self._client = GrpcLoadClient if face == "grpc" else HttpLoadClient
        self._where, self._model = where, args.model
        if face == "http":
            _allow_files(args.max_open + OTHER_FILES)
        try:
            socket.create_connection(split(where.address, face), timeout=CONNECT_S).close()
        except OSError:
            raise Unavailable(f"nothing listens on {where.address}") from None

    def run(self, source: Source, what: str) -> Summary:
        """Runs once. what: shown meanwhile."""

        async def once() -> Summary:
            async with self._opened() as client:
                return await self._run(client, source, what)

        return _on_loop(once())

    def search(self, source: Source, bounds: Range, share: float) -> tuple[Found, Tried]:
        """Searches the highest mean rate at which this share of requests meets the objectives."""
        tried: Tried = []

        async def all_of_it() -> Found:
            async with self._opened() as client:

                async def probe(rate: float) -> Verdict:
                    scaled = source.scaled(rate / source.mean_rate)
                    summary = await self._run(client, scaled, f"{rate:.4g}/s")
                    tried.append((rate, summary))
                    verdict = judged(summary, share)
                    text = f"{rate:.4g}/s: {100 * summary.share_met:.1f} % within objectives"
                    if verdict in (Verdict.UNKNOWN, Verdict.STOPPED):
                        text += f"; {verdict}"
                    print(text, file=sys.stderr, flush=True)
                    return verdict

                return await highest(bounds, probe)

        return _on_loop(all_of_it()), tried

    async def _run(
        self, client: HttpLoadClient | GrpcLoadClient, source: Source, what: str
    ) -> Summary:
        workload = source.workload(self._seed)
        if not workload.sessions:
            raise InvalidArgument("no request would be due: more seconds, or a higher rate",
                                  field="seconds")  # fmt: skip
        shown = Shown(workload.requests, what)
        runner = OpenLoop(client, self._token_ids, self._limits, show=shown)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, runner.stop)
        # The workload is frozen: repeated garbage collections of it would delay requests.
        gc.collect()
        gc.freeze()
        try:
            return Summary(await runner.run(workload), self._objectives)
        finally:
            gc.unfreeze()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            shown.close()

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[HttpLoadClient | GrpcLoadClient]:
        client = self._client(self._where, self._model)
        try:
            yield client
        finally:
            await client.close()


def judged(summary: Summary, share: float) -> Verdict:
    """Requests that were not sent because too many were open count against the server. If requests
    were sent late, this process was too slow."""
    if summary.run.stopped:
        return Verdict.STOPPED
    if summary.lag_s > summary.objectives.lag_s:
        return Verdict.UNKNOWN
    return Verdict.WELL if summary.share_met >= share else Verdict.BADLY


def _on_loop(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)


def _allow_files(number: int) -> None:
    """Raises the limit of open files, one per connection. If that is not allowed, some requests
    fail to connect and are counted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
