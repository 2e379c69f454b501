"""Runs a whole Baton for a benchmark; measures nothing."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.cli.layout import Layout, UpOptions, plan
from baton.cli.supervisor import LONGEST_BACKOFF_S, Notify, Supervisor


@asynccontextmanager
async def fleet(options: UpOptions) -> AsyncIterator[tuple[Layout, Supervisor]]:
    """All processes, ready. Raises StartFailed. They are gone on leaving."""
    layout = plan(options)
    with apart():
        async with supervised(layout, lambda *_: None) as supervisor:
            yield layout, supervisor


@contextmanager
def apart() -> Iterator[None]:
    """What is supervised meanwhile has a folder of its own, beside a `baton up` of the user's."""
    before = os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["XDG_STATE_HOME"]
            if before is not None:
                os.environ["XDG_STATE_HOME"] = before


@asynccontextmanager
async def supervised(
    layout: Layout, notify: Notify, *, longest_backoff_s: float = LONGEST_BACKOFF_S
) -> AsyncIterator[Supervisor]:
    """The same for processes that are planned already; notify is told what happens to them."""
    ready = asyncio.Event()

    def note(what: str, *details: object) -> None:
        if what == "ready":
            ready.set()
        notify(what, *details)

    supervisor = Supervisor(layout, note, longest_backoff_s=longest_backoff_s)
    running = asyncio.create_task(supervisor.run())
    try:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            await running
        yield supervisor
    finally:
        supervisor.stop()
        await asyncio.wait({running})
