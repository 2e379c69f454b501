"""Signals of grpc.aio are taken many at a time, and none is lost."""

from __future__ import annotations

import asyncio
import functools
import socket

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from batonlm.rpc.loop import Loop


class PollerCompletionQueue:
    """As grpc.aio's own reads its socket."""

    def __init__(self, signals: socket.socket) -> None:
        self.signals = signals
        self.turns = 0

    def _handle_events(self, _: object) -> None:
        self.turns += 1
        assert self.signals.recv(1)


def test_grpc_reads_as_this_loop_expects() -> None:
    queue = cygrpc.PollerCompletionQueue
    assert queue.__name__ == PollerCompletionQueue.__name__
    assert hasattr(queue, PollerCompletionQueue._handle_events.__name__)


@pytest.mark.parametrize("signals", [1, 2, 64, 200])
def test_what_is_signalled_together_is_handled_together(signals: int) -> None:
    reading, writing = socket.socketpair()
    queue = PollerCompletionQueue(reading)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(reading, functools.partial(queue._handle_events, loop))
        for _ in range(signals):
            writing.send(b"1")
        for _ in range(signals + 10):
            await asyncio.sleep(0)
        loop.remove_reader(reading)

    with reading, writing, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
        reading.setblocking(False)
        with pytest.raises(BlockingIOError):
            reading.recv(1)
    assert queue.turns <= 3


def test_other_readers_are_left_alone() -> None:
    reading, writing = socket.socketpair()
    got: list[bytes] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(reading, lambda: got.append(reading.recv(1)))
        writing.send(b"abc")
        for _ in range(10):
            await asyncio.sleep(0)
        loop.remove_reader(reading)

    with reading, writing, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    assert got == [b"a", b"b", b"c"]
