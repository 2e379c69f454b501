"""The event loop of Baton's processes, and a clock of the time in which it ran.

The loop is uvloop, with one change. A thread of grpc.aio writes a byte into a socket for each
operation that is done. The reader handles all that are done, but takes one byte: after writes to 64
streams the loop would come round 63 times more for nothing. Here the other bytes are taken first.
"""

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
"""Taken at a time, at most."""

_READER = "PollerCompletionQueue"
"""Of grpc.aio. Were it called otherwise one day, its signals would be taken one by one again."""


class Loop(uvloop.Loop):
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
    """The last byte is the callback's own: it waits for one."""
    spare = len(signals.recv(SIGNALS, socket.MSG_PEEK)) - 1
    if spare > 0:
        signals.recv(spare)
    callback(*args)


Clock = Callable[[], float]
"""Seconds, monotonic."""

TICK_S = 0.25
LONGEST_TURN_S = 0.5
"""What two ticks are apart counts up to this much. It has to be far below the silence after which
a peer counts as dead, and above what a busy event loop takes to come round."""


class AwakeClock:
    """A `Clock` of one event loop; it goes between `start` and `stop`."""

    def __init__(self, clock: Clock) -> None:
        """clock: the event loop's own time."""
        self.stalls = 0
        """How often the loop did not come round for longer than LONGEST_TURN_S."""
        self.stalled_s = 0.0
        """What is missing on this clock, in all."""
        self._clock = clock
        self._ticked_at = clock()
        self._awake_s = 0.0
        """At the last tick."""
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> float:
        return self._awake_s + min(self._clock() - self._ticked_at, LONGEST_TURN_S)

    def start(self) -> None:
        """Runs on the running loop from now on."""
        self._ticked_at = self._clock()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._keep_ticking)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def tick(self) -> None:
        """The loop came round."""
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
    """To be called once everything is loaded.

    What loading made stays for good: no full collection needs to walk through it amid work. And a
    step, or a frame of tokens, makes thousands of tuples that die without the collector's help.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
