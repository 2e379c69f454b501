"""Passes on to the engine which positions hold no stop string; knows nothing of streams.

One call is under way at a time and carries all that came meanwhile, so that however often routers
confirm, the engine's queue is not filled by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from baton.core.errors import Unavailable
from baton.core.request.attempt import SequenceKey
from baton.core.scheduler.decode import DecodeScheduler
from baton.core.scheduler.loop import EngineLoop
from baton.engine.thread import EngineThread


class Confirmations:
    """Lives on the event loop."""

    def __init__(self, engine: EngineThread[DecodeScheduler]) -> None:
        self._engine = engine
        self._waiting: dict[SequenceKey, int] = {}
        self._telling: asyncio.Task[None] | None = None

    def add(self, positions: Mapping[SequenceKey, int]) -> None:
        """Positions below these are confirmed."""
        self._waiting.update(positions)
        if self._waiting and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell())

    async def close(self) -> None:
        """Tells nothing more and returns when no task of ours runs."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait([self._telling])

    async def _tell(self) -> None:
        # An engine that has stopped runs no sequence that could wait for this.
        with suppress(Unavailable):
            while self._waiting:
                await self._engine.call(self._confirm(self._waiting))

    def _confirm(
        self, positions: Mapping[SequenceKey, int]
    ) -> Callable[[EngineLoop[DecodeScheduler]], None]:
        self._waiting = {}

        def confirm(loop: EngineLoop[DecodeScheduler]) -> None:
            for key, position in positions.items():
                loop.scheduler.confirm(key, position)

        return confirm
