"""The senders that this worker has met: one handshake per instance id, for all hand-overs with it.

The way to a known sender is kept proven while nothing moves on it: one peer at a time is probed,
only one that moved nothing for half an interval, and none while hand-overs run, because those prove
the ways better. One failed probe may be a pause of the sender, so nothing follows from it; after
two in a row the peer is forgotten and met again, over another transport if need be. A peer that
cannot be met stays forgotten until a hand-over needs its KV.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc

from batonlm.core.errors import BatonError, Incompatible, Internal, Unavailable
from batonlm.core.handover.fit import difference, refusal, short_name
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.routing.failures import SteadyVerdict
from batonlm.rpc.calls import abandon
from batonlm.rpc.convert import identity_to_proto, layout_from_proto, layout_to_proto
from batonlm.rpc.errors import from_rpc_error
from batonlm.transfer.staging import TransportError
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.stream import FAREWELL_S
from batonlm.transfer.transports import Staging, TransferReader, digests_differ
from batonlm.transfer.ucx import Ucx
from batonlm.v1 import handover_pb2 as pb
from batonlm.v1 import handover_pb2_grpc

MEET_S = 10.0
"""Longest handshake, its probe included."""
MAX_PEERS = 1024

MAX_INBOX = 256
"""Messages of one stream that are read ahead."""

Connect = Callable[[WorkerIdentity], "SenderConnection"]
"""How a receiver reaches a sender, one connection per sender."""

log = logging.getLogger(__name__)


def meet_request(
    receiver: WorkerIdentity,
    layout: KvLayout,
    transports: Sequence[str],
    sender_instance_id: str,
    ucx: Ucx,
    digests: Sequence[str],
) -> pb.MeetRequest:
    """What a receiver sends to a sender that it has not met: who it is, and what fits it.

    digests: of KV chunks that are good enough for it.
    """
    return pb.MeetRequest(
        receiver=identity_to_proto(receiver),
        layout=layout_to_proto(layout),
        transports=transports,
        sender_instance_id=sender_instance_id,
        kv_network=ucx.network.value,
        ucx_transports=ucx.transports,
        digests=digests,
    )


class SenderConnection:
    """Reaches one sender over a borrowed channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = handover_pb2_grpc.HandoverStub(channel)

    async def meet(self, request: pb.MeetRequest) -> pb.MeetResponse:
        """Raises Incompatible, Unavailable and whatever else the sender answers."""
        try:
            return await self._stub.Meet(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def collect(self) -> CollectStream:
        """Opens a Collect stream; what goes wrong shows when it is used."""
        return CollectStream(self._stub.Collect())


class CollectStream:
    """The receiver's end of one stream, open from the start.

    Iterating gives the sender's messages and ends, or raises Unavailable, when the stream does; it
    may be abandoned and cancelled without ending the stream. A task reads ahead into a bounded
    inbox, because gRPC cancels a call whose reader is cancelled.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._inbox: asyncio.Queue[pb.CollectResponse | BatonError | None] = asyncio.Queue(
            MAX_INBOX
        )
        self._closing = False
        self._reading = asyncio.create_task(self._read())

    async def __aiter__(self) -> AsyncIterator[pb.CollectResponse]:
        while (message := await self._inbox.get()) is not None:
            if isinstance(message, BatonError):
                raise message
            yield message

    async def send(self, message: pb.CollectRequest) -> None:
        """Raises Unavailable when the stream is broken."""
        try:
            await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise Unavailable("the sender left") from None

    async def close(self) -> None:
        """Ends our half, gives the sender a moment to end its own, then cancels. Idempotent."""
        self._closing = True
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._call.done_writing()
                await asyncio.wait([self._reading])
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            # The sender is stuck or gone.
            pass
        finally:
            await abandon(self._call)
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        last: BatonError | None = None
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                await self._put(response)
        except grpc.aio.AioRpcError as error:
            # Senders report their faults in messages, so with any status the stream is broken; it
            # says nothing of the request. INTERNAL is gRPC's own for one that ended while we wrote.
            broken = from_rpc_error(error)
            gone = isinstance(broken, Internal)
            last = Unavailable("the sender left" if gone else broken.message)
        await self._put(last)

    async def _put(self, message: pb.CollectResponse | BatonError | None) -> None:
        if not self._closing:
            await self._inbox.put(message)


class ProbeOutcome(Enum):
    OK = "ok"
    LOST = "lost"
    """The peer did not answer, refused, or took too long."""
    UNREADABLE = "unreadable"
    """The read failed or hangs."""
    MISMATCH = "mismatch"
    """What arrived is not what was sent."""


@dataclass(slots=True)
class Peer:
    """A sender whose staging pool can be read."""

    sender: WorkerIdentity
    layout: KvLayout
    handshake: pb.MeetResponse
    """Its answer to the handshake."""
    reader: TransferReader
    """Of the transport that both use."""
    connection: SenderConnection
    users: int = 0
    suspect: bool = False
    """A read broke, or the sender is gone: it is removed once nothing uses it."""
    doubted: bool = False
    """A stream broke, which says nothing of the pool: the next user asks whether the process is
    still there."""
    verdict: SteadyVerdict = field(default_factory=SteadyVerdict)
    """Of its probes while it is idle."""
    last_used: float = 0.0
    """When the last user left, by the event loop's clock."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is removed."""

    @property
    def instance_id(self) -> str:
        return self.sender.instance_id


class Peers:
    """Meets senders and remembers them. Lives on the event loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        staging: Staging,
        connect: Connect,
        probe: Callable[[Peer], Awaitable[tuple[ProbeOutcome, str]]],
        stats: HandoverStats,
    ) -> None:
        """probe: collects a probe from a peer; returns what came of it, and why it failed."""
        self._identity, self._layout = identity, layout
        self._staging, self._connect = staging, connect
        self._probe, self._stats = probe, stats
        self._handshakes: OrderedDict[str, asyncio.Task[Peer]] = OrderedDict()
        self.probing = False
        """An unused peer is being probed."""

    async def meet(self, sender: WorkerIdentity) -> Peer:
        """Meets a sender, or finds it among those met; waits until a probe has arrived from it.

        Raises Incompatible with what differs, and Unavailable.
        """
        known = self._known(sender.instance_id)
        if known is not None and known.doubted:
            await self._check_alive(known)
        if known is not None and known.suspect:
            # Others still use the broken connection. It must be gone before there is a new one.
            await self._wait_until_unused(known)
        task = self._handshakes.get(sender.instance_id)
        if task is None:
            task = asyncio.create_task(self._meet(sender))
            self._handshakes[sender.instance_id] = task
            task.add_done_callback(lambda _: self._forget_failure(sender.instance_id))
        peer = await asyncio.shield(task)
        await self._drop_replaced(peer)
        return peer

    @asynccontextmanager
    async def use(self, sender: WorkerIdentity, timeout_s: float) -> AsyncIterator[Peer]:
        """A met peer that stays until the block is left. timeout_s: of the handshake."""
        try:
            async with asyncio.timeout(timeout_s):
                peer = await self.meet(sender)
        except TimeoutError:
            raise Unavailable("the sender did not answer in time") from None
        async with self._hold(peer):
            yield peer

    async def probe_unused(self, every_s: float, busy: Callable[[], bool]) -> None:
        """Probes peers that nothing uses, until cancelled. busy: whether hand-overs run."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(every_s)
            before = clock() - every_s / 2
            known = [self._known(instance_id) for instance_id in self._handshakes]
            for peer in [p for p in known if p and p.last_used <= before]:
                if busy():
                    break
                if peer.users or peer.suspect or self._known(peer.instance_id) is not peer:
                    continue
                try:
                    self.probing = True
                    await self._probe_unused(peer)
                except Exception:
                    log.exception("a sender could not be probed")
                finally:
                    self.probing = False

    async def forget(self, instance_id: str) -> None:
        """Drops what is kept of a sender that is gone, as soon as no hand-over uses it."""
        peer = self._known(instance_id)
        if peer is not None:
            peer.suspect = True
            if peer.users == 0:
                await self._remove(peer)

    async def close(self) -> None:
        tasks = list(self._handshakes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._handshakes.clear()

    @asynccontextmanager
    async def _hold(self, peer: Peer) -> AsyncIterator[None]:
        """Keeps a known peer until the block is left."""
        peer.users += 1
        try:
            yield
        finally:
            peer.users -= 1
            peer.last_used = asyncio.get_running_loop().time()
            if peer.suspect and peer.users == 0:
                await self._remove(peer)

    def _known(self, instance_id: str) -> Peer | None:
        task = self._handshakes.get(instance_id)
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    def _forget_failure(self, instance_id: str) -> None:
        if self._known(instance_id) is None:
            self._handshakes.pop(instance_id, None)

    async def _probe_unused(self, peer: Peer) -> None:
        async with self._hold(peer):
            outcome, why = await self._probe(peer)
        if not peer.verdict.observe(outcome is ProbeOutcome.OK):
            return
        log.warning("%s fails its probes and is met again: %s", short_name(peer.sender), why)
        await self.forget(peer.instance_id)
        try:
            await self.meet(peer.sender)
        except BatonError as error:
            log.warning("%s cannot be met: %s", short_name(peer.sender), error.message)

    def _request(self, transports: list[str], sender_instance_id: str) -> pb.MeetRequest:
        return meet_request(
            self._identity,
            self._layout,
            transports,
            sender_instance_id,
            self._staging.ucx,
            self._staging.digests,
        )

    async def _check_alive(self, peer: Peer) -> None:
        """Keeps the way to the pool of a process that is still there, and forgets any other.

        To reach the pool of a living process anew would cost sockets on both sides for as long as
        both live: UCX does not close those of before.
        """
        try:
            async with asyncio.timeout(MEET_S):
                request = self._request([peer.handshake.transport], peer.instance_id)
                handshake = await peer.connection.meet(request)
            self._check(peer.sender, handshake)
            peer.doubted = False
        except (BatonError, TimeoutError):
            await self.forget(peer.instance_id)

    async def _wait_until_unused(self, peer: Peer) -> None:
        try:
            async with asyncio.timeout(MEET_S):
                await peer.unused.wait()
        except TimeoutError:
            raise Unavailable("the connection to the sender is broken") from None

    async def _meet(self, sender: WorkerIdentity) -> Peer:
        connection = self._connect(sender)
        names = list(self._staging.names)
        refused: dict[str, str] = {}
        theirs = ""
        try:
            async with asyncio.timeout(MEET_S):
                while names:
                    handshake = await connection.meet(self._request(names, sender.instance_id))
                    layout = self._check(sender, handshake)
                    theirs = handshake.kv_network
                    try:
                        return await self._reach(sender, layout, handshake, connection)
                    except TransportError as error:
                        refused[handshake.transport] = str(error)
                        names = [name for name in names if name not in refused]
        except TimeoutError:
            raise Unavailable("the sender did not answer in time") from None
        except Incompatible as error:
            log.warning("%s", error.message)
            raise
        tried = ", ".join(f"{name} ({why})" for name, why in refused.items())
        tried += (
            f"; kv_network is {self._staging.ucx.network.value} here, {theirs or 'unknown'} there"
        )
        log.warning("%s cannot be reached: tried %s", short_name(sender), tried)
        raise Incompatible(f"the memory of {short_name(sender)} cannot be reached: tried {tried}")

    def _check(self, sender: WorkerIdentity, handshake: pb.MeetResponse) -> KvLayout:
        """The sender's layout. Raises Unavailable, and Incompatible with what differs."""
        layout = layout_from_proto(handshake.layout)
        if handshake.sender.instance_id != sender.instance_id:
            raise Unavailable("this address now belongs to another process")
        misfit = difference(layout, (handshake.transport,), self._layout, self._staging.names)
        if not misfit and handshake.digest not in self._staging.digests:
            misfit = digests_differ(handshake.digest, self._staging)
        if misfit:
            raise refusal(sender, self._identity, misfit)
        return layout

    async def _reach(
        self,
        sender: WorkerIdentity,
        layout: KvLayout,
        handshake: pb.MeetResponse,
        connection: SenderConnection,
    ) -> Peer:
        """Adds the peer and collects a probe, so that the first KV chunk finds a way that works.

        Raises TransportError when this transport does not carry it, and Unavailable.
        """
        reader, clock = self._staging.readers[handshake.transport], asyncio.get_running_loop().time
        await reader.add_peer(sender.instance_id, handshake.transport_metadata, handshake.ring)
        peer = Peer(sender, layout, handshake, reader, connection, last_used=clock())
        try:
            outcome, why = await self._probe(peer)
            if outcome is ProbeOutcome.LOST:
                raise Unavailable(f"no probe came from {short_name(sender)}: {why}")
            if outcome is not ProbeOutcome.OK:
                raise TransportError(why)
        except BaseException:
            await reader.remove_peer(sender.instance_id)
            raise
        self._stats.peers_met += 1
        return peer

    async def _drop_replaced(self, peer: Peer) -> None:
        """A process at an address replaces the one before; and the number of peers is bounded."""
        if peer.instance_id in self._handshakes:
            self._handshakes.move_to_end(peer.instance_id)
        for instance_id in list(self._handshakes):
            old = self._known(instance_id)
            if old is None or old is peer:
                continue
            replaced = old.sender.address == peer.sender.address
            if replaced or (len(self._handshakes) > MAX_PEERS and old.users == 0):
                await self.forget(instance_id)

    async def _remove(self, peer: Peer) -> None:
        self._handshakes.pop(peer.instance_id, None)
        try:
            await peer.reader.remove_peer(peer.instance_id)
        finally:
            peer.unused.set()
