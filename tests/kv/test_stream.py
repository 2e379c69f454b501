"""Silence on a Collect stream counts only turns in which it could have been heard."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from batonlm.transfer.stream import HeartbeatStream, Liveness, PeerLost
from batonlm.v1 import handover_pb2 as pb

LIVENESS = Liveness(heartbeat_s=0.3, missed=4)
HELD_UP_S = 2.0
HEARTBEAT = pb.CollectResponse(heartbeat=pb.HandoverHeartbeat())


async def nothing(_: object) -> None:
    return None


@pytest.mark.deep
async def test_a_process_that_was_held_up_does_not_take_its_peer_for_dead() -> None:
    """The peer, on a thread, says something all the time; our loop comes round too late for it."""
    loop, heard, over = asyncio.get_running_loop(), 0, threading.Event()
    inbox: asyncio.Queue[pb.CollectResponse] = asyncio.Queue()

    async def incoming() -> AsyncIterator[pb.CollectResponse]:
        nonlocal heard
        while True:
            yield await inbox.get()
            heard += 1

    def peer() -> None:
        while not over.wait(LIVENESS.heartbeat_s / 12):
            loop.call_soon_threadsafe(inbox.put_nowait, HEARTBEAT)

    line: HeartbeatStream[pb.CollectResponse, pb.CollectRequest] = HeartbeatStream(
        incoming(), nothing, pb.CollectRequest(heartbeat=pb.HandoverHeartbeat()), LIVENESS
    )
    listening = asyncio.create_task(line.listen(lambda message: None))
    beating = asyncio.create_task(line.beat())
    talking = threading.Thread(target=peer)
    talking.start()
    try:
        async with asyncio.timeout(20):
            while heard < 4:  # noqa: ASYNC110 (on another thread)
                await asyncio.sleep(0.01)
            time.sleep(HELD_UP_S)  # noqa: ASYNC251 (it is to be held up)
            held_up_at = heard
            while heard < held_up_at + 40:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not beating.done()
    finally:
        over.set()
        talking.join()
        for task in (listening, beating):
            task.cancel()
        await asyncio.gather(listening, beating, return_exceptions=True)
        await line.close()


@pytest.mark.deep
async def test_a_peer_that_says_nothing_is_lost() -> None:
    async def incoming() -> AsyncIterator[pb.CollectResponse]:
        await asyncio.get_running_loop().create_future()
        yield HEARTBEAT

    line: HeartbeatStream[pb.CollectResponse, pb.CollectRequest] = HeartbeatStream(
        incoming(), nothing, pb.CollectRequest(heartbeat=pb.HandoverHeartbeat()), LIVENESS
    )
    async with asyncio.timeout(20):
        with pytest.raises(PeerLost):
            await line.beat()
    await line.close()
