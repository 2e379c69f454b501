"""The event loop of Baton's processes, a clock that leaves out its stalls, and a GC setting."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvloop

log = logging.getLogger(__name__)

SIGNALS = 4096
"""The most signal bytes that are read at once."""

_READER = "PollerCompletionQueue"
"""A private class of grpc.aio. If it is renamed, its signals are read one by one again."""


class Loop(uvloop.Loop):
    """uvloop, with one change for grpc.aio.

    A thread of grpc.aio writes a byte into a socket for each finished operation. Its reader handles
    all finished operations but reads one byte: after writes to 64 streams the loop would iterate 63
    times for nothing. This loop reads the other bytes first.
    """

    def add_reader(  # type: ignore[override]  # as loosely typed as uvloop itself
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        if isinstance(fd, socket.socket) and _reads_signals(callback):
            callback = functools.partial(_take_all_but_one, fd, callback)
        super().add_reader(fd, callback, *args)


def _reads_signals(callback: Callable[..., Any]) -> bool:
    method = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(method, "__self__", None)).__name__ == _READER


def _take_all_but_one(signals: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Reads all waiting bytes but one, then calls the callback, which reads the last one."""
    spare = len(signals.recv(SIGNALS, socket.MSG_PEEK)) - 1
    if spare > 0:
        signals.recv(spare)
    callback(*args)


Clock = Callable[[], float]
"""Seconds, monotonic."""

TICK_S = 0.25
LONGEST_TURN_S = 0.5
"""The time between two ticks counts up to this much. It must be far below the silence after which a
peer counts as dead, and above one iteration of a busy event loop."""


class AwakeClock:
    """A `Clock` of one event loop that leaves out its stalls; it runs between `start` and
    `stop`."""

    def __init__(self, clock: Clock) -> None:
        """clock: the event loop's own time."""
        self.stalls = 0
        """How often two ticks were more than LONGEST_TURN_S apart."""
        self.stalled_s = 0.0
        """The total time that this clock left out."""
        self._clock = clock
        self._ticked_at = clock()
        self._awake_s = 0.0
        """This clock's time at the last tick."""
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> float:
        return self._awake_s + min(self._clock() - self._ticked_at, LONGEST_TURN_S)

    def start(self) -> None:
        """Begins to tick on the running loop."""
        self._ticked_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._keep_ticking)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def tick(self) -> None:
        """Adds the time since the last tick, and counts a stall where there was one."""
        now = self._clock()
        passed = now - self._ticked_at
        self._awake_s += min(passed, LONGEST_TURN_S)
        self._ticked_at = now
        if passed > LONGEST_TURN_S:
            self.stalls += 1
            self.stalled_s += passed - LONGEST_TURN_S
            log.info("the event loop did not come round for %.1f s", passed)

    def _keep_ticking(self) -> None:
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._keep_ticking)


_YOUNG_OBJECTS = 50_000


def freeze_garbage() -> None:
    """Exempts all present objects from garbage collection; called once everything is loaded.

    Loaded objects live as long as the process, so that full collections need not walk through them.
    The higher threshold spares collections for the thousands of tuples of a step or a frame of
    tokens, which reference counting frees.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
