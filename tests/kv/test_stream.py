"""Silence on a Collect stream counts only turns in which it could have been heard, and what is sent
together travels together to a peer that understands it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator

import pytest

from batonlm.core.errors import HandoverFailed, Unavailable
from batonlm.transfer.peers import CollectStream
from batonlm.transfer.stream import MAX_WAITING, HeartbeatStream, Liveness, PeerLost, joined, parts
from batonlm.v1 import handover_pb2 as pb
from tests.kv.rig import POSITIONS_PER_BUFFER, Pool, Wire, expected, rig

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
        async with asyncio.timeout(120):
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
    async with asyncio.timeout(120):
        with pytest.raises(PeerLost):
            await line.beat()
    await line.close()


def finished(count: int) -> pb.CollectResponse:
    return pb.CollectResponse(finished=pb.PositionsFinished(num_positions=count))


class Slow:
    """A stream's writes, of which each waits until it may end."""

    def __init__(self) -> None:
        self.written: list[pb.CollectResponse] = []
        self.may_end = asyncio.Event()
        self.broken = False

    async def send(self, message: pb.CollectResponse) -> None:
        self.written.append(message)
        await self.may_end.wait()
        if self.broken:
            raise Unavailable("it is gone")

    def stream(self, joins: bool) -> HeartbeatStream[pb.CollectRequest, pb.CollectResponse]:
        async def incoming() -> AsyncIterator[pb.CollectRequest]:
            await asyncio.get_running_loop().create_future()
            yield pb.CollectRequest()

        made: HeartbeatStream[pb.CollectRequest, pb.CollectResponse] = HeartbeatStream(
            incoming(), self.send, HEARTBEAT, LIVENESS
        )
        made.joins = joins
        return made

    @property
    def told(self) -> list[int]:
        """What the peer got, in order, however it travelled."""
        return [part.finished.num_positions for each in self.written for part in parts(each)]


@pytest.mark.parametrize(("joins", "messages"), [(True, [3, 2]), (False, [1, 1, 1, 1, 1])])
async def test_what_is_sent_at_once_or_during_a_write_travels_together(
    joins: bool, messages: list[int]
) -> None:
    slow = Slow()
    line = slow.stream(joins)
    delivering = asyncio.create_task(line.deliver())
    for count in (1, 2, 3):
        await line.send(finished(count))
    while not slow.written:  # noqa: ASYNC110 (a few turns)
        await asyncio.sleep(0)
    for count in (4, 5):
        await line.send(finished(count))
    slow.may_end.set()
    await line.flush()
    delivering.cancel()
    await line.close()
    assert slow.told == [1, 2, 3, 4, 5]
    assert [len(parts(each)) for each in slow.written] == messages


async def test_what_waits_is_bounded_and_a_broken_write_is_raised() -> None:
    slow = Slow()
    line = slow.stream(joins=True)
    for count in range(MAX_WAITING):
        await line.send(finished(count))
    held = asyncio.create_task(line.send(finished(MAX_WAITING)))
    await asyncio.wait([held], timeout=0.05)
    assert not held.done() and len(slow.written) == 1
    slow.broken = True
    slow.may_end.set()
    with pytest.raises(PeerLost, match="gone"):
        await held
    with pytest.raises(PeerLost, match="gone"):
        await line.deliver()
    await line.close()


def test_parts_are_what_was_joined() -> None:
    messages = [finished(1), finished(2)]
    assert list(parts(joined(messages))) == messages
    assert list(parts(joined(messages[:1]))) == messages[:1] == [joined(messages[:1])]


@pytest.mark.parametrize("older", ["", "sender", "receiver"])
async def test_a_peer_that_does_not_know_it_gets_one_message_for_each(
    older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed: list[pb.CollectRequest | pb.CollectResponse] = []

    class Recording(CollectStream):
        async def __aiter__(self) -> AsyncIterator[pb.CollectResponse]:
            async for message in super().__aiter__():
                crossed.append(message)
                yield message

        async def send(self, message: pb.CollectRequest) -> None:
            if message.HasField("open") and older == "receiver":
                message.open.ClearField("several")
            crossed.append(message)
            await super().send(message)

    async with rig() as world:
        answer = world.sender.meet

        def meet(request: pb.MeetRequest) -> pb.MeetResponse:
            response = answer(request)
            if older == "sender":
                response.ClearField("several")
            return response

        monkeypatch.setattr(world.sender, "meet", meet)
        await world.receiver.meet(world.sender.identity)
        monkeypatch.setattr(Wire, "collect", lambda self: Recording(self._stub.Collect()))
        understood: set[type[pb.CollectRequest | pb.CollectResponse]] = set()
        if older != "sender":
            understood.add(pb.CollectRequest)
        if older != "receiver":
            understood.add(pb.CollectResponse)
        # What of a hand-over is sent together depends on when its writes end.
        for _ in range(20):
            offer, pool = world.offer(2 * POSITIONS_PER_BUFFER), Pool()
            world.compute(offer)
            await world.collect(offer, pool)
            assert pool.kv == expected(offer.handover_id, 2 * POSITIONS_PER_BUFFER)
            together = {type(each) for each in crossed if each.WhichOneof("message") == "several"}
            assert together <= understood
            if together == understood:
                return
    raise AssertionError(f"only {together} travelled together")


async def test_several_within_several_is_refused() -> None:
    nested = joined([joined([finished(1), finished(2)]), finished(3)])

    class Nesting(CollectStream):
        async def __aiter__(self) -> AsyncIterator[pb.CollectResponse]:
            yield nested

    async with rig() as world:
        await world.receiver.meet(world.sender.identity)
        offer = world.offer(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wire, "collect", lambda self: Nesting(self._stub.Collect()))
            with pytest.raises(HandoverFailed, match="out of place"):
                await world.collect(offer, Pool())


async def test_every_write_that_fails_is_looked_at() -> None:
    """Two are under way when the stream breaks: neither is left to the loop to complain of."""
    broke, complaints = asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: complaints.append(context["message"])
    )

    async def send(_: pb.CollectRequest) -> None:
        await broke.wait()
        raise Unavailable("gone")

    async def incoming() -> AsyncIterator[pb.CollectResponse]:
        await asyncio.Event().wait()
        yield HEARTBEAT

    message = pb.CollectRequest(heartbeat=pb.HandoverHeartbeat())
    line: HeartbeatStream[pb.CollectResponse, pb.CollectRequest] = HeartbeatStream(
        incoming(), send, message, LIVENESS
    )
    flushes = []
    for _ in range(2):
        await line.send(message)
        flushes.append(asyncio.create_task(line.flush()))
        await asyncio.sleep(0)
    broke.set()
    ends = await asyncio.gather(*flushes, return_exceptions=True)
    assert [type(end) for end in ends] == [PeerLost, PeerLost]
    await line.close()
    del flushes, ends, line
    gc.collect()
    assert complaints == []
