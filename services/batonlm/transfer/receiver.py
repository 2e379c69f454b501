"""Collects KV: meets senders, and on one stream per hand-over reserves, credits, reads, verifies,
unpacks and confirms.

A credit stands for a landing buffer that is held here. A KV chunk is read into its landing buffer,
its header and digest are verified, it is unpacked into blocks in the order of KV chunks, the buffer
is released and the KV chunk confirmed. Nothing is unpacked that did not verify. When the work ends
early, a read may still be running: its buffer is released all the same and stays orphaned until the
read has ended; the blocks behind it are touched only by unpacking, which is always waited for.

A probe is a hand-over of made-up KV that proves the whole way from a sender's buffer to ours. It
differs from others in this only: the receiver asks for it and no worker offers it, its KV follows
from its id, and it does not count as traffic.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoverFailed,
    Incompatible,
    InvalidArgument,
    NotFound,
    Overloaded,
)
from batonlm.core.handover.table import (
    HANDOVER_ID_BYTES,
    LIMITS,
    HandoverEvent,
    KvChunkRange,
    ReceiverSide,
    ReceiverState,
    State,
    StateLimit,
)
from batonlm.core.kvcache.prefix import Prefix
from batonlm.core.request.attempt import ChoiceTokens
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.scheduler.plan import KvPayload
from batonlm.rpc.convert import (
    choice_tokens_from_proto,
    error_from_proto,
    error_to_proto,
    identity_to_proto,
    prefix_to_proto,
)
from batonlm.transfer.kv_chunk import (
    HEADER_BYTES,
    PROBE_S,
    Sealer,
    Unpack,
    check_buffer_bytes,
    made_up,
    positions_per_kv_chunk,
    probe_positions,
)
from batonlm.transfer.peers import Connect, Peer, Peers, ProbeOutcome
from batonlm.transfer.staging import StagingBuffer, TransportError
from batonlm.transfer.stats import HandoverStats, now
from batonlm.transfer.stream import (
    NO_NAMES,
    HeartbeatStream,
    Liveness,
    Names,
    StateTimeout,
    TransferAborted,
    abortion,
    outlast,
    race,
    to_end,
)
from batonlm.transfer.transports import Staging
from batonlm.v1 import handover_pb2 as pb

MAX_IN_FLIGHT = 4
"""KV chunks of one hand-over under way: enough to overlap packing, reading and unpacking."""

READ_S = 5.0
"""A read that takes longer is given up. A frozen sender is found earlier, by its silence."""

Reserve = Callable[[], Awaitable[int | None]]
"""reserve(): holds blocks for the whole input and answers from which position KV is needed, or None
when there is no room. May be cancelled; whatever it holds then is the caller's to free."""

ReservePrefix = Callable[[int], Awaitable[int | None]]
"""The same for a prefix, of which the sender has so many positions."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Names one hand-over to collect."""

    handover_id: bytes
    sender: WorkerIdentity
    num_positions: int
    """Of the input."""
    deadline_s: float = 30.0
    """For all of it."""
    is_probe: bool = False
    """Nobody offers it; the sender makes its KV up."""
    prefix: Prefix | None = None
    """Nobody offers it; the sender's cache may have it, or the beginning of it."""
    about: Names = field(default_factory=lambda: NO_NAMES, hash=False)


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected."""

    tokens: tuple[ChoiceTokens, ...]
    """Token 0 of every choice."""
    received_bytes: int
    cached_positions: int
    """Positions whose KV was here already."""


@dataclass(frozen=True, slots=True)
class PrefixOutcome:
    """How the collection of a prefix ended. Whatever was unpacked by then is of use."""

    label: str
    """completed; cached: all of it was here; gone: the sender does not have it (any more); busy:
    the sender offers no more; full: no room here; incompatible; late; or failed."""
    received_bytes: int = 0
    error: BatonError | None = None
    """None when completed or cached."""


class IncomingTransfer:
    """The work on one stream. `run` is called once, and `see_off` once after it."""

    def __init__(
        self,
        receiver: KvReceiver,
        request: TransferRequest,
        peer: Peer,
        reserve: ReservePrefix,
        unpack: Unpack,
        stats: HandoverStats,
    ) -> None:
        self.request, self.ring = request, receiver.staging.ring
        self.unreadable = False
        """A read failed or took too long."""
        self.aborted: TransferAborted | None = None
        """Why it ended early."""
        self._receiver, self._peer, self._stats = receiver, peer, stats
        self._reserve_blocks, self._unpack = reserve, unpack
        self._call = peer.connection.collect()
        faults = self._faults = receiver.staging.faults
        self._stream: HeartbeatStream[pb.CollectResponse, pb.CollectRequest] = HeartbeatStream(
            faults.incoming("receiver", aiter(self._call)),
            faults.outgoing("receiver", self._call.send),
            pb.CollectRequest(heartbeat=pb.HandoverHeartbeat()),
            receiver.liveness,
        )
        self._stream.joins = peer.handshake.several
        per_kv_chunk = positions_per_kv_chunk(receiver.buffer_bytes(peer), receiver.layout)
        state_positions = 0 if request.is_probe else receiver.layout.state_positions
        self.side = ReceiverSide(
            request.num_positions,
            per_kv_chunk,
            is_prefix=request.prefix is not None,
            state_positions=state_positions,
        )
        self._wire_version = receiver.layout.common_wire_version(peer.layout)
        self._sealer = Sealer(
            request.handover_id,
            request.sender.instance_id,
            receiver.layout,
            self.ring.memory,
            peer.handshake.digest,
            wire_version=self._wire_version,
        )
        self._timeout = StateTimeout(receiver.limits, lambda: self.side.state)
        self._changed = asyncio.Event()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credited: deque[StagingBuffer] = deque()
        self._landing: dict[int, StagingBuffer] = {}
        self._landings: set[asyncio.Task[None]] = set()
        self._newest: asyncio.Task[None] | None = None
        self._tokens: tuple[ChoiceTokens, ...] = ()
        self._received_bytes = self._cached_positions = 0
        self._opened_at = self._all_computed_at = 0.0
        self._received_when_computed = 0

    async def run(self) -> Collected:
        """Collects. On return or raise every buffer is released and nothing unpacks any more.

        Raises TransferAborted; Overloaded when `reserve` had no room.
        """
        try:
            await race(
                self._collect(),
                self._stream.listen(self._receive),
                self._stream.deliver(),
                self._stream.beat(),
                self._timeout.watch(),
                self._fail_with_landings(),
                self._run_out_of_time(),
            )
        except asyncio.CancelledError:
            gave_up = Cancelled("the receiver gave up")
            self.aborted = TransferAborted(HandoverEvent.CANCEL, gave_up)
            raise
        except Exception as error:
            if not self.side.ended:
                self.aborted = abortion(error, self.request.about)
                raise self.aborted from error
        finally:
            await self._clean_up()
        if self.side.state is ReceiverState.FULL:
            raise Overloaded("this worker has no room for the sequence")
        return Collected(self._tokens, self._received_bytes, self._cached_positions)

    async def see_off(self) -> None:
        """Sends the sender how it ended, if it does not know, and ends the stream. Bounded."""
        try:
            if self.aborted is not None and not self.aborted.peer_knows:
                failed = error_to_proto(self.aborted.error)
                await self._stream.send_last(pb.CollectRequest(failed=failed))
        finally:
            await self._call.close()
            await self._stream.close()

    async def _clean_up(self) -> None:
        if self.aborted is not None:
            self.side.end(self.aborted.event)
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

    async def _collect(self) -> None:
        side, sender = self.side, self.request.sender
        opening = pb.OpenHandover(
            handover_id=self.request.handover_id,
            receiver=identity_to_proto(self._receiver.identity),
            sender_instance_id=sender.instance_id,
            max_kv_chunk_bytes=self.ring.buffer_bytes,
            probe_positions=self.request.num_positions if self.request.is_probe else 0,
            wire_version=self._wire_version,
            digest=self._peer.handshake.digest,
            several=True,
            prefix=None if self.request.prefix is None else prefix_to_proto(self.request.prefix),
        )
        await self._stream.send(pb.CollectRequest(open=opening))
        self._opened_at = now()
        while not side.ended:
            self._changed.clear()
            if side.state is ReceiverState.RESERVING:
                await self._reserve()
            while side.wants_credit and self._in_flight < MAX_IN_FLIGHT:
                with self._stats.timed("buffer_wait"):
                    buffer = await self.ring.wait(sender.instance_id, landing=True)
                await self._credit(buffer)
            if side.all_in:
                side.completed()
                if self._all_computed_at:
                    self._stats.record("last_chunk", self._all_computed_at)
                    left = self._received_bytes - self._received_when_computed
                    self._stats.link.ended(left, now() - self._all_computed_at)
                await self._stream.send(pb.CollectRequest(completed=pb.HandoverCompleted()))
            elif not side.ended:
                await self._changed.wait()
        await self._stream.flush()

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
            peer = self.request.sender.instance_id
            buffer = self.ring.take(peer, landing=True) if more else None
        credit = pb.HandoverCredit(num_kv_chunks=num_kv_chunks)
        await self._stream.send(pb.CollectRequest(credit=credit))

    async def _reserve(self) -> None:
        with self._stats.timed("reserve"):
            from_position = await self._reserve_blocks(self.side.num_positions)
        await self._faults.at("receiver.reserved")
        self._timeout.restart()
        if from_position is None:
            self.side.full()
            await self._stream.send(pb.CollectRequest(full=pb.HandoverFull()))
        else:
            self.side.granted(from_position)
            self._cached_positions = from_position
            granted = pb.HandoverGranted(from_position=from_position)
            await self._stream.send(pb.CollectRequest(granted=granted))

    def _receive(self, message: pb.CollectResponse) -> None:
        match message.WhichOneof("message"):
            case "announced":
                self.side.announced(message.announced.num_positions)
                self._stats.record("announce_wait", self._opened_at)
            case "finished":
                self.side.advanced(message.finished.num_positions)
                if self.side.finished == self.side.end_position:
                    self._all_computed_at = now()
                    self._received_when_computed = self._received_bytes
            case "kv_chunk":
                self._arrive(message.kv_chunk)
            case "tokens":
                # Read first: once token 0 counts as in, the hand-over may complete.
                tokens = _tokens_of(message.tokens)
                self.side.tokens()
                self._tokens = tokens
            case "failed":
                error = error_from_proto(message.failed)
                raise TransferAborted(HandoverEvent.PEER_FAILED, error)
            case None:
                raise HandoverFailed("the sender sent a message that is empty or unknown")
            case _:
                raise HandoverFailed("the sender sent a message out of place")
        self._timeout.restart()
        self._changed.set()

    def _arrive(self, ready: pb.KvChunkReady) -> None:
        header = ready.header
        chunk = KvChunkRange(header.index, header.first_position, header.num_positions)
        if not self._sealer.expects(header, chunk):
            raise self._mismatch("announcement")
        self.side.arriving(chunk)
        self._landing[chunk.index] = self._credited.popleft()
        task = asyncio.create_task(self._land(header, ready.buffer, self._newest))
        self._newest = task
        self._landings.add(task)
        task.add_done_callback(self._landed)

    async def _land(
        self, header: pb.KvChunkHeader, remote_buffer: int, before: asyncio.Task[None] | None
    ) -> None:
        buffer, stats = self._landing[header.index], self._stats
        size = HEADER_BYTES + header.payload_bytes
        try:
            await self._faults.at("receiver.reading")
            try:
                began = now()
                with stats.timed("read"):
                    await self._peer.reader.read(
                        self.request.sender.instance_id, remote_buffer, buffer, size, READ_S
                    )
                stats.link.read(size, now() - began)
            except TransportError:
                self.unreadable = True
                stats.transfer_errors += 1
                raise HandoverFailed("a KV chunk could not be read") from None
            await self._faults.at("receiver.read", buffer.view[:size])
            with stats.timed("verify"):
                if self._sealer.is_slow(header):
                    verifying = asyncio.to_thread(self._sealer.mismatch, header, buffer.view)
                    wrong = await to_end(verifying)
                else:
                    wrong = self._sealer.mismatch(header, buffer.view)
            if wrong:
                raise self._mismatch(wrong)
            await self._faults.at("receiver.verified")
            if before is not None:
                # Reads end in any order. Unpacking must not: the places that follow a KV chunk in
                # its last tile are cleared.
                await asyncio.wait([before])
                # Raises what ended it: nothing follows a gap.
                before.result()
            payload = buffer.view[HEADER_BYTES:size]
            with stats.timed("unpack"):
                await to_end(self._unpack(header.first_position, header.num_positions, payload))
            await self._faults.at("receiver.unpacked")
        finally:
            self._landing.pop(header.index).release()
        self.side.landed(header.index)
        self._received_bytes += header.payload_bytes
        stats.kv_chunks += 1
        stats.payload_bytes += header.payload_bytes
        collected = pb.KvChunkCollected(index=header.index)
        await self._stream.send(pb.CollectRequest(collected=collected))
        self._timeout.restart()
        self._changed.set()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._landings.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._trouble.done():
            self._trouble.set_exception(error)

    def _mismatch(self, kind: str) -> HandoverFailed:
        self._stats.mismatches[kind] += 1
        return HandoverFailed("a KV chunk is not what was announced")

    async def _fail_with_landings(self) -> None:
        await self._trouble

    async def _run_out_of_time(self) -> None:
        await asyncio.sleep(self.request.deadline_s)
        error = DeadlineExceeded("the hand-over ran out of time")
        raise TransferAborted(HandoverEvent.DEADLINE, error)


class KvReceiver:
    """Collects KV into one staging pool. Lives on the event loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        staging: Staging,
        connect: Connect,
        *,
        liveness: Liveness | None = None,
        limits: Mapping[State, StateLimit] = LIMITS,
        stats: HandoverStats | None = None,
    ) -> None:
        """Raises InvalidArgument for buffers that hold no position."""
        check_buffer_bytes(staging.ring.buffer_bytes, layout)
        self.identity, self.layout, self.staging = identity, layout, staging
        self.liveness, self.limits = liveness or Liveness(), limits
        self.stats = stats or HandoverStats()
        self._peers = Peers(identity, layout, staging, connect, self._probe, self.stats)
        self._running = 0
        self._farewells: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """No hand-over runs and every ended one has taken its leave."""
        return not self._running and not self._farewells

    @property
    def probing(self) -> bool:
        """A sender is being probed, for want of traffic."""
        return self._peers.probing

    @property
    def holdings(self) -> dict[str, int]:
        """What hand-overs hold here, by kind; nothing when there are none and no probe runs."""
        return {"handovers": self._running, "farewells": len(self._farewells)}

    def buffer_bytes(self, peer: Peer) -> int:
        """Bytes of a buffer that both sides have."""
        return min(self.staging.ring.buffer_bytes, peer.handshake.ring.buffer_bytes)

    def start_probing(self, every_s: float) -> None:
        """Probes senders that nothing came from for so long, until closed. Called once at most."""
        probing = self._peers.probe_unused(every_s, busy=lambda: not self.idle)
        self._probing = asyncio.create_task(probing)

    async def meet(self, sender: WorkerIdentity) -> None:
        """Meets a sender ahead of traffic: layouts compared, a probe collected, result remembered.

        Raises Incompatible with a readable difference, and Unavailable.
        """
        await self._peers.meet(sender)

    async def forget(self, instance_id: str) -> None:
        """Drops what is kept of a sender that is gone."""
        await self._peers.forget(instance_id)

    async def collect(
        self, request: TransferRequest, reserve: Reserve, unpack: Unpack
    ) -> Collected:
        """Collects one hand-over.

        On return all KV from `Collected.cached_positions` on is unpacked, and the state that the
        layout has: unpack is called for it as pack is (`KvSender.offer`). When this raises or is
        cancelled, unpack runs no more and what `reserve` holds is the caller's to free. Raises
        HandoverFailed (prefill again elsewhere), Overloaded (reserve had no room), Incompatible,
        Cancelled (the sender was), and what reserve and unpack raise.
        """
        if len(request.handover_id) != HANDOVER_ID_BYTES:
            raise InvalidArgument(f"must be {HANDOVER_ID_BYTES} bytes", field="handover_id")
        outcome = "failed"
        self._running += 1
        try:
            collected = await self._collect(request, lambda _: reserve(), unpack)
            outcome = "completed"
            return collected
        except TransferAborted as aborted:
            error = _for_the_caller(aborted)
            if isinstance(error, Cancelled):
                outcome = "cancelled"
            raise error from None
        except Overloaded:
            outcome = "full"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except BatonError as error:
            # Meeting failed; what happens on the stream is a TransferAborted.
            raise as_handover_failure(error) from None
        finally:
            self._running -= 1
            self.stats.outcomes[outcome] += 1

    async def collect_prefix(
        self,
        prefix: Prefix,
        sender: WorkerIdentity,
        reserve: ReservePrefix,
        unpack: Unpack,
        *,
        deadline_s: float,
        about: Names = NO_NAMES,
    ) -> PrefixOutcome:
        """Collects what another worker's cache has of a prefix.

        unpack is called for one KV chunk after the other, without a gap from the position on that
        `reserve` answered, and runs no more when this returns or is cancelled. Never raises for
        what a peer does.
        """
        size, handover_id = len(prefix.token_ids), secrets.token_bytes(HANDOVER_ID_BYTES)
        request = TransferRequest(handover_id, sender, size, deadline_s, about=about, prefix=prefix)
        outcome = "cancelled"
        self._running += 1
        try:
            collected = await self._collect(request, reserve, unpack)
            outcome = "completed"
            label = outcome if collected.received_bytes else "cached"
            return PrefixOutcome(label, collected.received_bytes)
        except (TransferAborted, BatonError) as failure:
            ended = _without_prefix(failure)
            outcome = ended.label if ended.label in ("gone", "full") else "failed"
            return ended
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
        self, request: TransferRequest, reserve: ReservePrefix, unpack: Unpack
    ) -> Collected:
        """Raises TransferAborted for what happens on the stream, Overloaded when `reserve` had no
        room, and what meeting the sender raises."""
        clock = asyncio.get_running_loop().time
        deadline, began = clock() + request.deadline_s, now()
        async with self._peers.use(request.sender, request.deadline_s) as peer:
            if request.prefix is not None and not peer.handshake.prefixes:
                raise Incompatible("the sender offers no prefixes")
            self.stats.record("meet", began)
            request = replace(request, deadline_s=deadline - clock())
            work = IncomingTransfer(self, request, peer, reserve, unpack, self.stats)
            try:
                return await work.run()
            finally:
                aborted = work.aborted
                peer.doubted |= aborted is not None and aborted.event is HandoverEvent.PEER_LOST
                peer.suspect |= work.unreadable
                self._see_off(work)

    async def _probe(self, peer: Peer) -> tuple[ProbeOutcome, str]:
        """Collects a probe from a met peer and counts its outcome. Bounded; leaves `peer` as it is.

        Returns with it why it failed.
        """
        positions = probe_positions(self.buffer_bytes(peer), self.layout)
        handover_id = secrets.token_bytes(HANDOVER_ID_BYTES)
        request = TransferRequest(handover_id, peer.sender, positions, PROBE_S, is_probe=True)
        # Its numbers are not those of hand-overs.
        stats = HandoverStats()

        async def reserve(_: int) -> int | None:
            return 0

        async def unpack(first_position: int, count: int, payload: KvPayload) -> None:
            expected = made_up(handover_id, first_position, payload.nbytes)
            if self.staging.ring.memory.read(payload) != expected:
                stats.mismatches["payload"] += 1
                raise HandoverFailed("a probe brought other bytes than were sent")

        work = IncomingTransfer(self, request, peer, reserve, unpack, stats)
        outcome, why = ProbeOutcome.LOST, ""
        try:
            await work.run()
            outcome = ProbeOutcome.OK
        except TransferAborted as aborted:
            why = aborted.error.message
            if stats.mismatches:
                outcome = ProbeOutcome.MISMATCH
            elif work.unreadable:
                outcome = ProbeOutcome.UNREADABLE
        finally:
            self.stats.probes["peer", outcome.value] += 1
            await work.see_off()
        return outcome, why

    def _see_off(self, work: IncomingTransfer) -> None:
        # Not awaited here: a cancelled hand-over gives its memory back at once.
        farewell = asyncio.create_task(work.see_off())
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)


def _tokens_of(message: pb.HandoverTokens) -> tuple[ChoiceTokens, ...]:
    try:
        return tuple(map(choice_tokens_from_proto, message.choices))
    except InvalidArgument:
        # The sender's fault, and not the client's.
        raise HandoverFailed("the sender sent tokens that are malformed") from None


def _for_the_caller(aborted: TransferAborted) -> BatonError:
    """Our own failures as they are; the sender's, the stream's and lost time: prefill elsewhere."""
    ours = aborted.event is HandoverEvent.CANCEL
    if ours or isinstance(aborted.error, Cancelled | Incompatible):
        return aborted.error
    return as_handover_failure(aborted.error)


def _without_prefix(failure: TransferAborted | BatonError) -> PrefixOutcome:
    """What ended the collection of a prefix early."""
    aborted = failure if isinstance(failure, TransferAborted) else None
    by_sender = aborted is not None and aborted.event is HandoverEvent.PEER_FAILED
    error = failure.error if isinstance(failure, TransferAborted) else failure
    match error:
        case NotFound():
            label = "gone"
        case Overloaded():
            label = "busy" if by_sender else "full"
        case Incompatible():
            label = "incompatible"
        case DeadlineExceeded():
            label = "late"
        case _:
            label = "failed"
    return PrefixOutcome(label, error=error)


def as_handover_failure(error: BatonError) -> BatonError:
    """What a peer's or the stream's failure means to whoever wants the KV: prefill elsewhere."""
    return error if isinstance(error, Incompatible) else HandoverFailed(error.message)
