"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, always the same.

No sockets and no threads: when nothing is left that could happen, `Stalled` is raised.
"""

from __future__ import annotations

import asyncio
import secrets
import selectors
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class Stalled(Exception):
    """Everybody waits for somebody else."""


class _Clock(selectors.SelectSelector):
    """Where a real loop would wait for sockets, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Times are virtual seconds."""

    def __init__(self) -> None:
        self.virtual = _Clock()
        super().__init__(self.virtual)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self.virtual.now

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""


def run(seed: int, main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a loop of its own, with all clocks virtual and all chance drawn from the
    seed."""
    loop = VirtualLoop()
    try:
        with _seeded(seed), mock.patch("time.monotonic", loop.time):
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    draw = Random(f"ids {seed}")
    with (
        mock.patch.object(secrets, "token_bytes", lambda size: draw.randbytes(size)),
        mock.patch.object(secrets, "token_hex", lambda size: draw.randbytes(size).hex()),
        mock.patch.object(secrets, "randbits", draw.getrandbits),
        mock.patch("random.uniform", draw.uniform),
    ):
        yield
