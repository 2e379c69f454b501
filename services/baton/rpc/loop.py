"""The event loop of Baton's processes: uvloop, which takes grpc.aio's signals many at a time.

A thread of grpc.aio writes a byte into a socket for each operation that is done. Whoever reads
there handles all that are done, but takes one byte: when 64 streams were written to, the loop then
comes round 63 times more for nothing. Here the other bytes are taken first.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any

import uvloop

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
