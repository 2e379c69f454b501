"""Ties a worker of several ranks together: their runner, the ring, and the process's life.

A worker of one rank has none of this, and nothing is done for it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from baton.core.errors import Internal
from baton.core.scheduler.ports import ModelRunner
from baton.engine.ranks.runner import RankedRunner
from baton.engine.ranks.shared import MemoryFile, Region
from baton.transfer.buffers import StagingPool


def share_ring(runner: ModelRunner, ring: StagingPool) -> None:
    """Lets ranks pack into buffers and unpack out of them where they lie."""
    if isinstance(runner, RankedRunner):
        runner.share(Region(MemoryFile.of(ring.fd), ring.base_address))


def end_with_ranks(runner: ModelRunner, fatal: asyncio.Future[None]) -> None:
    """Fails `fatal` when a rank dies, also while no step waits for it."""
    if not isinstance(runner, RankedRunner):
        return
    loop = fatal.get_loop()

    def fail() -> None:
        if not fatal.done():
            fatal.set_exception(Internal("a rank has died"))

    def died() -> None:
        # A closed loop means that the process ends already.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(fail)

    runner.on_death(died)
