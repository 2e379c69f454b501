"""The senders that this worker has met: one handshake per instance id, for all hand-overs."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

from baton.core.errors import BatonError, HandoverFailed, Incompatible, Unavailable
from baton.core.handover.fit import difference, refusal, short_name
from baton.core.handover.messages import Handshake, HandshakeRequest
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.core.routing.failures import SteadyVerdict
from baton.transfer.grpc import GrpcSenderConnection
from baton.transfer.kv_chunk import DIGESTS
from baton.transfer.staging import TransportError
from baton.transfer.stats import HandoverStats
from baton.transfer.transports import Staging, TransferReader

MEET_S = 10.0
MAX_PEERS = 1024

log = logging.getLogger(__name__)


class ProbeOutcome(Enum):
    OK = "ok"
    LOST = "lost"
    """The peer did not answer, refused, or took too long."""
    UNREADABLE = "unreadable"
    """The read failed or hangs."""
    MISMATCH = "mismatch"
    """What arrived is not what was sent."""


Connect = Callable[[WorkerIdentity], GrpcSenderConnection]
"""How a receiver reaches a sender, one connection per sender."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What came of a probe. error: None only when all went well."""

    outcome: ProbeOutcome
    error: BatonError | None = None


@dataclass(slots=True)
class Peer:
    """A sender whose ring can be read.

    suspect: a read broke, or it is gone; removed once unused. doubted: a stream broke, which says
    nothing of the ring; whoever comes next asks whether the process is still there.
    verdict: of its probes while it is idle. last_used: when the last user left, by the loop's time.
    """

    meeting: Handshake
    reader: TransferReader
    connection: GrpcSenderConnection
    users: int = 0
    suspect: bool = False
    doubted: bool = False
    verdict: SteadyVerdict = field(default_factory=SteadyVerdict)
    last_used: float = 0.0
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def instance_id(self) -> str:
        return self.meeting.sender.instance_id


class Peers:
    """Meets senders and remembers them. Lives on the event loop.

    prove: collects a probe from a peer whose ring was just made reachable.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        staging: Staging,
        connect: Connect,
        prove: Callable[[Peer], Awaitable[Probe]],
        stats: HandoverStats,
    ) -> None:
        self._identity, self._layout = identity, layout
        self._staging, self._connect = staging, connect
        self._prove, self._stats = prove, stats
        self._meetings: OrderedDict[str, asyncio.Task[Peer]] = OrderedDict()

    async def meet(self, sender: WorkerIdentity) -> Peer:
        """Meets a sender, or remembers that we have; waits until a probe has arrived from it.

        Raises Incompatible with what differs, and Unavailable.
        """
        known = self._known(sender.instance_id)
        if known is not None and known.doubted:
            await self._ask_again(known)
        if known is not None and known.suspect:
            # Others still use the broken connection. It must be gone before there is a new one.
            await self._wait_until_unused(known)
        task = self._meetings.get(sender.instance_id)
        if task is None:
            task = asyncio.create_task(self._meet(sender))
            self._meetings[sender.instance_id] = task
            task.add_done_callback(lambda _: self._forget_failure(sender.instance_id))
        peer = await asyncio.shield(task)
        await self._drop_replaced(peer)
        return peer

    @asynccontextmanager
    async def use(self, sender: WorkerIdentity, timeout_s: float) -> AsyncIterator[Peer]:
        """A met peer that stays until the block is left. timeout_s: for meeting it."""
        try:
            async with asyncio.timeout(timeout_s):
                peer = await self.meet(sender)
        except TimeoutError:
            raise Unavailable("the sender did not answer in time") from None
        async with self.hold(peer):
            yield peer

    @asynccontextmanager
    async def hold(self, peer: Peer) -> AsyncIterator[None]:
        """Keeps a known peer until the block is left."""
        peer.users += 1
        try:
            yield
        finally:
            peer.users -= 1
            peer.last_used = asyncio.get_running_loop().time()
            if peer.suspect and peer.users == 0:
                await self._remove(peer)

    def unused_for(self, seconds: float) -> list[Peer]:
        """Peers that nobody uses, and nobody has used for so long."""
        before = asyncio.get_running_loop().time() - seconds
        known = [self._known(instance_id) for instance_id in self._meetings]
        return [p for p in known if p and self.is_unused(p) and p.last_used <= before]

    def is_unused(self, peer: Peer) -> bool:
        """Whether it is known, nobody uses it and nothing speaks against it."""
        known = self._known(peer.instance_id) is peer
        return known and not peer.users and not peer.suspect

    async def forget(self, instance_id: str) -> None:
        """Drops what is kept of a sender that is gone, as soon as no hand-over uses it."""
        peer = self._known(instance_id)
        if peer is not None:
            peer.suspect = True
            if peer.users == 0:
                await self._remove(peer)

    async def close(self) -> None:
        tasks = list(self._meetings.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._meetings.clear()

    def _known(self, instance_id: str) -> Peer | None:
        task = self._meetings.get(instance_id)
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    def _forget_failure(self, instance_id: str) -> None:
        if self._known(instance_id) is None:
            self._meetings.pop(instance_id, None)

    def _introduce(self, transports: tuple[str, ...], sender_instance_id: str) -> HandshakeRequest:
        ucx = self._staging.ucx
        return HandshakeRequest(
            self._identity,
            self._layout,
            transports,
            sender_instance_id,
            ucx.network.value,
            ucx.transports,
        )

    async def _ask_again(self, peer: Peer) -> None:
        """Keeps the way to the ring of a process that is still there, and forgets any other.

        To reach the ring of a living process anew would cost sockets on both sides for as long as
        both live: UCX does not close those of before.
        """
        try:
            async with asyncio.timeout(MEET_S):
                names = (peer.meeting.transport,)
                meeting = await peer.connection.meet(self._introduce(names, peer.instance_id))
            self._check(peer.meeting.sender, meeting)
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
                    introduction = self._introduce(tuple(names), sender.instance_id)
                    meeting = await connection.meet(introduction)
                    self._check(sender, meeting)
                    theirs = meeting.kv_network
                    try:
                        return await self._reach(meeting, connection)
                    except TransportError as error:
                        refused[meeting.transport] = str(error)
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

    def _check(self, sender: WorkerIdentity, meeting: Handshake) -> None:
        if meeting.sender.instance_id != sender.instance_id:
            raise Unavailable("this address now belongs to another process")
        misfit = difference(meeting.layout, (meeting.transport,), self._layout, self._staging.names)
        if not misfit and meeting.digest not in DIGESTS:
            misfit = f"digest: {meeting.digest or 'none'} against {', '.join(DIGESTS)}"
        if misfit:
            raise refusal(sender, self._identity, misfit)
        network = self._staging.ucx.network
        if meeting.digest not in network.accepts:
            raise Incompatible(
                f"the sender seals KV chunks with {meeting.digest}, for accidents only, and "
                f"kv_network is {network.value} here: declare the same on both"
            )

    async def _reach(self, meeting: Handshake, connection: GrpcSenderConnection) -> Peer:
        """Adds the peer and collects a probe, so that the first KV chunk finds a way that works.

        Raises TransportError when this transport does not carry it, and Unavailable.
        """
        reader, name = self._staging.readers[meeting.transport], meeting.sender.instance_id
        await reader.add_peer(name, meeting.transport_metadata, meeting.ring)
        peer = Peer(meeting, reader, connection, last_used=asyncio.get_running_loop().time())
        try:
            result = await self._prove(peer)
            why = result.error.message if result.error is not None else ""
            if result.outcome is ProbeOutcome.LOST:
                raise Unavailable(f"no probe came from {short_name(meeting.sender)}: {why}")
            if result.outcome is not ProbeOutcome.OK:
                raise TransportError(why)
        except BaseException:
            await reader.remove_peer(name)
            raise
        self._stats.peers_met += 1
        return peer

    async def _drop_replaced(self, peer: Peer) -> None:
        """A process at an address replaces the one before; and the number of peers is bounded."""
        if peer.instance_id in self._meetings:
            self._meetings.move_to_end(peer.instance_id)
        for instance_id in list(self._meetings):
            old = self._known(instance_id)
            if old is None or old is peer:
                continue
            replaced = old.meeting.sender.address == peer.meeting.sender.address
            if replaced or (len(self._meetings) > MAX_PEERS and old.users == 0):
                await self.forget(instance_id)

    async def _remove(self, peer: Peer) -> None:
        self._meetings.pop(peer.instance_id, None)
        try:
            await peer.reader.remove_peer(peer.instance_id)
        finally:
            peer.unused.set()


def as_handover_failure(error: BatonError) -> BatonError:
    """What a peer's or the stream's failure means to whoever wants the KV: prefill elsewhere."""
    return error if isinstance(error, Incompatible) else HandoverFailed(error.message)


log = logging.getLogger(__name__)


class IdleProbes:
    """`run` runs until cancelled. busy: whether hand-overs run. probing: whether one is probed."""

    def __init__(
        self,
        peers: Peers,
        probe: Callable[[Peer], Awaitable[Probe]],
        busy: Callable[[], bool],
        every_s: float,
    ) -> None:
        self._peers, self._probe, self._busy, self._every_s = peers, probe, busy, every_s
        self.probing = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            for peer in self._peers.unused_for(self._every_s / 2):
                if self._busy():
                    break
                if not self._peers.is_unused(peer):
                    continue
                try:
                    self.probing = True
                    await self._look_at(peer)
                except Exception:
                    log.exception("a sender could not be probed")
                finally:
                    self.probing = False

    async def _look_at(self, peer: Peer) -> None:
        async with self._peers.hold(peer):
            result = await self._probe(peer)
        if not peer.verdict.observe(result.outcome is ProbeOutcome.OK):
            return
        sender = peer.meeting.sender
        why = result.error.message if result.error is not None else ""
        log.warning("%s fails its probes and is met again: %s", short_name(sender), why)
        await self._peers.forget(sender.instance_id)
        try:
            await self._peers.meet(sender)
        except BatonError as error:
            log.warning("%s cannot be met: %s", short_name(sender), error.message)
