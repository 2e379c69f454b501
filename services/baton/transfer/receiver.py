"""Collects KV: meets senders, and on one stream per hand-over reserves, credits, reads, verifies,
unpacks and confirms.

A credit stands for a landing buffer that is held here. A KV chunk is read into its landing buffer,
its header and digest are verified, it is unpacked into blocks in the order of KV chunks, the buffer
is released and the KV chunk confirmed. Nothing is unpacked that did not verify. When the work ends
early, a read may still be running: its buffer is released all the same and stays orphaned until the
read has ended; the blocks behind it are touched only by unpacking, which is always waited for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoverFailed,
    Incompatible,
    InvalidArgument,
    Overloaded,
)
from baton.core.handover.messages import (
    HANDOVER_ID_BYTES,
    Announced,
    Completed,
    Credit,
    Failed,
    Finished,
    Full,
    Granted,
    KvChunkCollected,
    KvChunkHeader,
    KvChunkReady,
    OpenHandover,
    ReceiverMessage,
    SenderMessage,
    Tokens,
)
from baton.core.handover.table import (
    LIMITS,
    HandoverEvent,
    Limit,
    ReceiverSide,
    ReceiverState,
    Run,
    State,
)
from baton.core.request.attempt import ChoiceTokens
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.transfer.grpc import GrpcCollectStream
from baton.transfer.kv_chunk import (
    HEADER_BYTES,
    PROBE_S,
    Sealer,
    made_up,
    positions_per_kv_chunk,
    probe_positions,
)
from baton.transfer.peers import (
    Connect,
    IdleProbes,
    Peer,
    Peers,
    Probe,
    ProbeOutcome,
    as_handover_failure,
)
from baton.transfer.staging import Faults, StagingBuffer, StagingPool, TransportError
from baton.transfer.stats import HandoverStats, now
from baton.transfer.stream import (
    NO_NAMES,
    HeartbeatStream,
    Liveness,
    Names,
    StateTimeout,
    TransferAborted,
    outlast,
    race,
    to_end,
    why,
)
from baton.transfer.transports import Staging

Reserve = Callable[[], Awaitable[int | None]]
"""reserve(): holds blocks for the whole input and answers from which position KV is needed, or None
when there is no room. May be cancelled; whatever it holds then is the caller's to free."""

Unpack = Callable[[int, int, memoryview], Awaitable[None]]
"""unpack(first_position, count, payload): copies verified KV into the reserved blocks. Called for
one KV chunk after the other, in position order. It is never cancelled; when it returns or raises,
it reads `payload` no more."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected. tokens: token 0 of every choice. cached_positions: KV we had already."""

    tokens: tuple[ChoiceTokens, ...]
    received_bytes: int
    cached_positions: int


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Names one hand-over to collect. num_positions: of the input. deadline_s: for all of it.

    is_probe: nobody offers it; the sender makes its KV up. about: see
    Names.
    """

    handover_id: bytes
    sender: WorkerIdentity
    num_positions: int
    deadline_s: float = 30.0
    is_probe: bool = False
    about: Names = field(default_factory=lambda: NO_NAMES, hash=False)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all hand-overs of one receiver share."""

    identity: WorkerIdentity
    layout: KvLayout
    ring: StagingPool
    liveness: Liveness
    limits: Mapping[State, Limit]
    stats: HandoverStats
    faults: Faults


MAX_IN_FLIGHT = 4
"""KV chunks of one hand-over under way: enough to overlap packing, reading and unpacking."""

READ_S = 5.0
"""A read that takes longer is given up. A frozen sender is found earlier, by its silence."""


class IncomingTransfer:
    """The work on one stream. `run` is called once, and `see_off` once after it."""

    def __init__(
        self,
        around: Surroundings,
        ticket: TransferRequest,
        peer: Peer,
        stream: GrpcCollectStream,
        reserve: Reserve,
        unpack: Unpack,
    ) -> None:
        self._around, self._ticket, self._peer, self._stream = around, ticket, peer, stream
        self._reserve_blocks, self._unpack = reserve, unpack
        self._line: HeartbeatStream[SenderMessage, ReceiverMessage] = HeartbeatStream(
            around.faults.hearing("receiver", aiter(stream)),
            around.faults.saying("receiver", stream.send),
            around.liveness,
        )
        buffer_bytes = min(around.ring.buffer_bytes, peer.meeting.ring.buffer_bytes)
        self.side = ReceiverSide(
            ticket.num_positions, positions_per_kv_chunk(buffer_bytes, around.layout)
        )
        self._wire_version = around.layout.common_wire_version(peer.meeting.layout)
        self._sealer = Sealer(
            ticket.handover_id,
            ticket.sender.instance_id,
            around.layout,
            peer.meeting.digest,
            wire_version=self._wire_version,
        )
        self._patience = StateTimeout(around.limits, lambda: self.side.state)
        self._changed = asyncio.Event()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credited: deque[StagingBuffer] = deque()
        self._landing: dict[int, StagingBuffer] = {}
        self._landings: set[asyncio.Task[None]] = set()
        self._newest: asyncio.Task[None] | None = None
        self._tokens: tuple[ChoiceTokens, ...] = ()
        self._received_bytes = self._cached_positions = 0
        self._opened_at = self._last_told_at = 0.0
        self._received_when_told = 0
        self.ending: TransferAborted | None = None

    async def run(self) -> Collected:
        """Collects. On return or raise every buffer is released and nothing unpacks any more.

        Raises Ending; Overloaded when `reserve` had no room.
        """
        try:
            await race(
                self._take(),
                self._line.listen(self._hear),
                self._line.beat(),
                self._patience.watch(),
                self._fail_with_landings(),
                self._run_out_of_time(),
            )
        except asyncio.CancelledError:
            self.ending = TransferAborted(HandoverEvent.CANCEL, Cancelled("the receiver gave up"))
            raise
        except Exception as error:
            if not self.side.ended:
                self.ending = why(error, self._ticket.about)
                raise self.ending from error
        finally:
            await self._clean_up()
        if self.side.state is ReceiverState.FULL:
            raise Overloaded("this worker has no room for the sequence")
        return Collected(self._tokens, self._received_bytes, self._cached_positions)

    async def see_off(self, timeout_s: float) -> None:
        """Tells the sender how it ended, if it does not know, and ends the stream. Bounded."""
        try:
            async with asyncio.timeout(timeout_s):
                if self.ending is not None and not self.ending.peer_knows:
                    await self._line.say(Failed(self.ending.error))
        except Exception:
            # The stream is broken; the sender finds out by that.
            pass
        finally:
            await self._stream.close()
            await self._line.close(timeout_s)

    async def _clean_up(self) -> None:
        if self.ending is not None:
            self.side.end(self.ending.event)
        landings = list(self._landings)
        for task in landings:
            task.cancel()
        try:
            await outlast(landings)
        finally:
            # A task that was cancelled before it began has not released its buffer.
            for buffer in (*self._credited, *self._landing.values()):
                buffer.release()
            self._credited.clear()
            self._landing.clear()

    async def _take(self) -> None:
        side, sender = self.side, self._ticket.sender
        await self._line.say(
            OpenHandover(
                self._ticket.handover_id,
                self._around.identity,
                sender.instance_id,
                self._around.ring.buffer_bytes,
                self._ticket.num_positions if self._ticket.is_probe else 0,
                self._wire_version,
            )
        )
        self._opened_at = now()
        while not side.ended:
            self._changed.clear()
            if side.state is ReceiverState.RESERVING:
                await self._reserve()
            while side.wants_credit and self._in_flight < MAX_IN_FLIGHT:
                with self._around.stats.timed("buffer_wait"):
                    buffer = await self._around.ring.wait(sender.instance_id)
                await self._credit(buffer)
            if side.all_in:
                side.completed()
                if self._last_told_at:
                    self._around.stats.took("last_chunk", self._last_told_at)
                    left = self._received_bytes - self._received_when_told
                    self._around.stats.link.ended(left, now() - self._last_told_at)
                await self._line.say(Completed())
            elif not side.ended:
                await self._changed.wait()

    @property
    def _in_flight(self) -> int:
        return self.side.credits + len(self.side.landing)

    async def _credit(self, buffer: StagingBuffer | None) -> None:
        """Sends credits for a buffer that was waited for and all others that are free, at once."""
        num_kv_chunks = 0
        while buffer is not None:
            self._credited.append(buffer)
            self.side.credited()
            num_kv_chunks += 1
            more = self.side.wants_credit and self._in_flight < MAX_IN_FLIGHT
            buffer = self._around.ring.take(self._ticket.sender.instance_id) if more else None
        await self._line.say(Credit(num_kv_chunks))

    async def _reserve(self) -> None:
        with self._around.stats.timed("reserve"):
            from_position = await self._reserve_blocks()
        await self._around.faults.at("receiver.reserved")
        self._patience.moved()
        if from_position is None:
            self.side.full()
            await self._line.say(Full())
        else:
            self.side.granted(from_position)
            self._cached_positions = from_position
            await self._line.say(Granted(from_position))

    def _hear(self, message: SenderMessage) -> None:
        match message:
            case Announced(num_positions):
                self.side.announced(num_positions)
                self._around.stats.took("announce_wait", self._opened_at)
            case Finished(num_positions):
                self.side.advanced(num_positions)
                if num_positions == self.side.num_positions:
                    self._last_told_at = now()
                    self._received_when_told = self._received_bytes
            case KvChunkReady(header, buffer):
                self._arrive(header, buffer)
            case Tokens(choices):
                self.side.tokens()
                self._tokens = choices
            case Failed(error):
                raise TransferAborted(HandoverEvent.PEER_FAILED, error)
            case _:
                raise HandoverFailed("the sender sent a message out of place")
        self._patience.moved()
        self._changed.set()

    def _arrive(self, header: KvChunkHeader, remote_buffer: int) -> None:
        run = Run(header.index, header.first_position, header.num_positions)
        if replace(header, digest=b"") != self._sealer.header(run):
            raise self._mismatch("announcement")
        self.side.arriving(run)
        self._landing[run.index] = self._credited.popleft()
        task = asyncio.create_task(self._land(header, remote_buffer, self._newest))
        self._newest = task
        self._landings.add(task)
        task.add_done_callback(self._landed)

    async def _land(
        self, header: KvChunkHeader, remote_buffer: int, before: asyncio.Task[None] | None
    ) -> None:
        buffer, stats = self._landing[header.index], self._around.stats
        faults = self._around.faults
        try:
            await faults.at("receiver.reading")
            size = HEADER_BYTES + header.payload_bytes
            try:
                began = now()
                with stats.timed("read"):
                    await self._peer.reader.read(
                        self._ticket.sender.instance_id, remote_buffer, buffer, size, READ_S
                    )
                stats.link.read(size, now() - began)
            except TransportError:
                self._peer.suspect = True
                stats.transfer_errors += 1
                raise HandoverFailed("a KV chunk could not be read") from None
            await faults.at("receiver.read", buffer.view[:size])
            with stats.timed("verify"):
                if self._sealer.is_slow(header):
                    wrong = await to_end(
                        asyncio.to_thread(self._sealer.mismatch, header, buffer.view)
                    )
                else:
                    wrong = self._sealer.mismatch(header, buffer.view)
            if wrong:
                raise self._mismatch(wrong)
            await faults.at("receiver.verified")
            if before is not None:
                # Reads end in any order. Unpacking must not: the places that follow a KV chunk in
                # its last tile are cleared.
                await asyncio.wait([before])
            payload = buffer.view[HEADER_BYTES:size]
            with stats.timed("unpack"):
                await to_end(self._unpack(header.first_position, header.num_positions, payload))
            await faults.at("receiver.unpacked")
        finally:
            self._landing.pop(header.index).release()
        self.side.landed(header.index)
        self._received_bytes += header.payload_bytes
        stats.kv_chunks += 1
        stats.payload_bytes += header.payload_bytes
        await self._line.say(KvChunkCollected(header.index))
        self._patience.moved()
        self._changed.set()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._landings.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._trouble.done():
            self._trouble.set_exception(error)

    def _mismatch(self, kind: str) -> HandoverFailed:
        self._around.stats.mismatches[kind] += 1
        return HandoverFailed("a KV chunk is not what was announced")

    async def _fail_with_landings(self) -> None:
        await self._trouble

    async def _run_out_of_time(self) -> None:
        await asyncio.sleep(self._ticket.deadline_s)
        error = DeadlineExceeded("the hand-over ran out of time")
        raise TransferAborted(HandoverEvent.DEADLINE, error)


if TYPE_CHECKING:
    from baton.transfer.peers import Peer

FAREWELL_S = 1.0


async def probe(around: Surroundings, peer: Peer) -> Probe:
    """Collects a probe from a met peer and counts its outcome. Bounded; leaves `peer` as it is."""
    buffer_bytes = min(around.ring.buffer_bytes, peer.meeting.ring.buffer_bytes)
    positions = probe_positions(buffer_bytes, around.layout)
    ticket = TransferRequest(
        secrets.token_bytes(HANDOVER_ID_BYTES),
        peer.meeting.sender,
        positions,
        PROBE_S,
        is_probe=True,
    )

    async def reserve() -> int | None:
        return 0

    async def unpack(first_position: int, count: int, payload: memoryview) -> None:
        if payload != made_up(ticket.handover_id, first_position, len(payload)):
            around_it.stats.mismatches["payload"] += 1
            raise HandoverFailed("a probe brought other bytes than were sent")

    # Neither its numbers nor its suspicions are those of hand-overs.
    around_it, copy = replace(around, stats=HandoverStats()), replace(peer)
    work = IncomingTransfer(around_it, ticket, copy, peer.connection.collect(), reserve, unpack)
    result = Probe(ProbeOutcome.LOST)
    try:
        await work.run()
        result = Probe(ProbeOutcome.OK)
    except TransferAborted as ending:
        result = Probe(_outcome(copy, around_it.stats), ending.error)
    finally:
        around.stats.probes["peer", result.outcome.value] += 1
        await work.see_off(FAREWELL_S)
    return result


def _outcome(peer: Peer, stats: HandoverStats) -> ProbeOutcome:
    if stats.mismatches:
        return ProbeOutcome.MISMATCH
    return ProbeOutcome.UNREADABLE if peer.suspect else ProbeOutcome.LOST


FAREWELL_S = 1.0


class KvReceiver:
    """Collects KV into one staging ring. Lives on the event loop.

    connect: how a sender is spoken to, one connection per sender.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        staging: Staging,
        connect: Connect,
        *,
        liveness: Liveness | None = None,
        limits: Mapping[State, Limit] = LIMITS,
        stats: HandoverStats | None = None,
    ) -> None:
        if positions_per_kv_chunk(staging.ring.buffer_bytes, layout) == 0:
            raise InvalidArgument(
                f"a buffer must hold one position, {layout.bytes_per_position} bytes and a header",
                field="slot_mib",
            )
        self.stats = stats or HandoverStats()
        self._around = Surroundings(
            identity, layout, staging.ring, liveness or Liveness(), limits, self.stats,
            staging.faults,
        )  # fmt: skip
        self._peers = Peers(identity, layout, staging, connect, self._probe, self.stats)
        self._running = 0
        self._farewells: set[asyncio.Task[None]] = set()
        self._probes: IdleProbes | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """No hand-over runs and every ended one has taken its leave."""
        return not self._running and not self._farewells

    @property
    def probing(self) -> bool:
        """A sender is being probed, for want of traffic."""
        return self._probes is not None and self._probes.probing

    @property
    def holdings(self) -> dict[str, int]:
        """What hand-overs hold here, by kind; nothing when there are none and no probe runs."""
        return {"handovers": self._running, "farewells": len(self._farewells)}

    def start_probing(self, every_s: float) -> None:
        """Probes senders that nothing came from for so long, until closed. Called once at most."""
        self._probes = IdleProbes(
            self._peers, self._probe, busy=lambda: not self.idle, every_s=every_s
        )
        self._probing = asyncio.create_task(self._probes.run())

    async def meet(self, sender: WorkerIdentity) -> None:
        """Meets a sender ahead of traffic: layouts compared, a probe collected, result remembered.

        Raises Incompatible with a readable difference, and Unavailable.
        """
        await self._peers.meet(sender)

    async def forget(self, instance_id: str) -> None:
        """Drops what is kept of a sender that is gone."""
        await self._peers.forget(instance_id)

    async def collect(self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack) -> Collected:
        """Collects one hand-over.

        On return all KV from `Collected.cached_positions` on is unpacked. When this raises or is
        cancelled, unpack runs no more and what `reserve` holds is the caller's to free. Raises
        HandoverFailed (prefill again elsewhere), Overloaded (reserve had no room), Incompatible,
        Cancelled (the sender was), and what reserve and unpack raise.
        """
        if len(ticket.handover_id) != HANDOVER_ID_BYTES:
            raise InvalidArgument(f"must be {HANDOVER_ID_BYTES} bytes", field="handover_id")
        outcome = "failed"
        self._running += 1
        try:
            collected = await self._collect(ticket, reserve, unpack)
            outcome = "completed"
            return collected
        except Overloaded:
            outcome = "full"
            raise
        except (Cancelled, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self._running -= 1
            self.stats.outcomes[outcome] += 1

    async def close(self) -> None:
        """Waits for farewells under way and forgets all peers. Collections are ended before."""
        if self._probing is not None:
            self._probing.cancel()
            await outlast([self._probing])
        await outlast(list(self._farewells))
        await self._peers.close()

    async def _collect(
        self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack
    ) -> Collected:
        clock = asyncio.get_running_loop().time
        deadline, began = clock() + ticket.deadline_s, now()
        try:
            async with self._peers.use(ticket.sender, ticket.deadline_s) as peer:
                self.stats.took("meet", began)
                ticket = replace(ticket, deadline_s=deadline - clock())
                stream = peer.connection.collect()
                work = IncomingTransfer(self._around, ticket, peer, stream, reserve, unpack)
                try:
                    return await work.run()
                finally:
                    peer.doubted |= work.ending is not None and (
                        work.ending.event is HandoverEvent.PEER_LOST
                    )
                    self._see_off(work)
        except TransferAborted as ending:
            raise _for_the_caller(ending) from None
        except Overloaded:
            raise
        except BatonError as error:
            # Meeting failed; what happened on the stream is an Ending.
            raise as_handover_failure(error) from None

    async def _probe(self, peer: Peer) -> Probe:
        return await probe(self._around, peer)

    def _see_off(self, work: IncomingTransfer) -> None:
        # Not awaited here: a cancelled hand-over gives its memory back at once.
        farewell = asyncio.create_task(work.see_off(FAREWELL_S))
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)


def _for_the_caller(ending: TransferAborted) -> BatonError:
    """Our own failures as they are; the sender's, the stream's and lost time: prefill elsewhere."""
    if ending.event is HandoverEvent.CANCEL or isinstance(ending.error, Cancelled | Incompatible):
        return ending.error
    return as_handover_failure(ending.error)
