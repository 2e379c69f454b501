"""The giving side of hand-overs: what is on offer, who may collect it, and how peers meet.

The gRPC servicer calls `meet` and `serve`, the worker that computes calls `offer`. One stream's
work is `OutgoingTransfer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoverFailed,
    Incompatible,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
)
from baton.core.handover.fit import difference, refusal
from baton.core.handover.messages import (
    HANDOVER_ID_BYTES,
    Announced,
    Completed,
    Credit,
    Failed,
    Finished,
    Full,
    Granted,
    Handshake,
    HandshakeRequest,
    KvChunkCollected,
    KvChunkReady,
    OpenHandover,
    ReceiverMessage,
    SenderMessage,
    Tokens,
)
from baton.core.handover.table import (
    DOOR_S,
    LIMITS,
    HandoverEvent,
    Limit,
    Run,
    SenderSide,
    SenderState,
    State,
)
from baton.core.request.attempt import ChoiceTokens
from baton.core.request.model import KvLayout, WorkerIdentity
from baton.transfer.kv_chunk import (
    HEADER_BYTES,
    PROBE_S,
    Pack,
    Sealer,
    pack_made_up,
    positions_per_kv_chunk,
)
from baton.transfer.staging import StagingBuffer
from baton.transfer.stats import HandoverStats, now
from baton.transfer.stream import (
    NO_NAMES,
    HeartbeatStream,
    Liveness,
    Names,
    PeerLost,
    StateTimeout,
    TransferAborted,
    outlast,
    race,
    to_end,
    why,
)
from baton.transfer.transports import Staging


class Outcome(Enum):
    COMPLETED = "completed"
    FULL = "full"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class HandoverOutcome:
    """How a hand-over ended for the sender. error: None only when completed."""

    outcome: Outcome
    error: BatonError | None = None

    @property
    def counted(self) -> str:
        """Its label among the totals: nobody wanting the KV any more is no failure."""
        return "cancelled" if isinstance(self.error, Cancelled) else self.outcome.value


class PendingTransfer:
    """A hand-over from offer to end. Made by `Sender.offer`; all methods on the event loop.

    The worker reports what it computes with `announce`, `advance` and `tokens`, may give up with
    `fail`, and keeps the KV in place until `wait` returns; after that nothing packs from it.
    on_granted: called once when the receiver has reserved its blocks. stats: where it is counted.
    is_probe: the receiver asked for made-up KV; no worker stands behind it. about: see `Names`.
    """

    def __init__(
        self,
        handover_id: bytes,
        receiver_instance_id: str,
        num_positions: int,
        pack: Pack,
        on_end: Callable[[PendingTransfer, HandoverOutcome], None],
        stats: HandoverStats,
        *,
        is_probe: bool = False,
        about: Names = NO_NAMES,
    ) -> None:
        self.handover_id, self.receiver_instance_id = handover_id, receiver_instance_id
        self.pack, self.stats, self.is_probe, self.about = pack, stats, is_probe, about
        self.made_at = now()
        self.side = SenderSide(num_positions)
        self.on_granted: Callable[[], None] = lambda: None
        self.granted: bool | None = None
        self.announced = False
        self.finished = 0
        self.first_tokens: tuple[ChoiceTokens, ...] | None = None
        self.changed = asyncio.Event()
        self._on_end = on_end
        self._gave_up: asyncio.Future[TransferAborted] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[HandoverOutcome] = asyncio.get_running_loop().create_future()

    @property
    def num_positions(self) -> int:
        return self.side.num_positions

    def announce(self) -> None:
        """The first chunk has entered a plan."""
        self.announced = True
        self.changed.set()

    def advance(self, num_positions: int) -> None:
        """KV of all positions below num_positions is computed and may be packed."""
        self.finished = max(self.finished, num_positions)
        self.changed.set()

    def tokens(self, choices: Sequence[ChoiceTokens]) -> None:
        """Token 0 of every choice was sampled."""
        self.first_tokens = tuple(choices)
        self.changed.set()

    def fail(self, error: BatonError) -> None:
        """The worker gives up: cancelled, out of memory, leaving. Without effect after the end."""
        self._give_up(TransferAborted(HandoverEvent.CANCEL, error))

    async def wait(self) -> HandoverOutcome:
        """Returns when the hand-over has ended and none of its packing runs any more."""
        return await asyncio.shield(self._ended)

    def expire(self, error: BatonError) -> None:
        """For the sender: time is up."""
        self._give_up(TransferAborted(HandoverEvent.DEADLINE, error))

    def end(self, outcome: HandoverOutcome) -> None:
        """For the sender: the hand-over has ended and nothing packs. The first call counts."""
        if not self._ended.done():
            self._ended.set_result(outcome)
            self._on_end(self, outcome)

    async def given_up(self) -> None:
        """For the stream: waits for `fail` or `expire` and raises their Ending."""
        raise await asyncio.shield(self._gave_up)

    def _give_up(self, ending: TransferAborted) -> None:
        if self._ended.done() or self._gave_up.done():
            return
        self._gave_up.set_result(ending)
        if self.side.state is SenderState.OFFERED:
            # No stream was opened that would notice.
            self.side.end(ending.event)
            self.end(HandoverOutcome(Outcome.FAILED, ending.error))


# One Collect stream from the sender's end: announce, pack, seal, send, release.
#
# A buffer is taken for each KV chunk and is ours again when the receiver confirms it, or when the
# stream ends. In the second case the receiver may still be reading the buffer. That is harmless:
# whatever it reads, the digest it was told belongs to the old contents, so a buffer in use again
# cannot verify.

FAREWELL_S = 1.0


class OutgoingTransfer:
    """The work on one stream. `run` is called once."""

    def __init__(
        self,
        sender: KvSender,
        incoming: AsyncIterator[ReceiverMessage],
        send: Callable[[SenderMessage], Awaitable[None]],
    ) -> None:
        self._sender = sender
        faults = self._faults = sender.staging.faults
        self._line: HeartbeatStream[ReceiverMessage, SenderMessage] = HeartbeatStream(
            faults.hearing("sender", incoming), faults.saying("sender", send), sender.liveness
        )
        self._opening: asyncio.Future[OpenHandover] = asyncio.get_running_loop().create_future()
        self._offer: PendingTransfer | None = None
        self._buffers: dict[int, StagingBuffer] = {}
        self._announced_at = 0.0
        self._sent_at: dict[int, float] = {}

    async def run(self) -> None:
        """Returns when the hand-over has ended, with every buffer released and the offer ended."""
        ending: TransferAborted | None = None
        try:
            await race(self._open_and_give(), self._line.listen(self._hear), self._line.beat())
        except asyncio.CancelledError:
            ending = why(PeerLost("the receiver left"))
            raise
        except Exception as error:
            ending = why(error, self._offer.about if self._offer else NO_NAMES)
            if not ending.peer_knows:
                await self._tell(ending)
        finally:
            try:
                await self._line.close(FAREWELL_S)
            finally:
                for buffer in self._buffers.values():
                    buffer.release()
                self._buffers.clear()
                self._end(ending)

    async def _open_and_give(self) -> None:
        try:
            async with asyncio.timeout(DOOR_S):
                opening = await asyncio.shield(self._opening)
        except TimeoutError:
            raise PeerLost("the receiver did not say what it wants") from None
        offer = self._offer = await self._sender.claim(opening)
        offer.stats.took("open_wait", offer.made_at)
        self._sealer = Sealer(
            offer.handover_id,
            self._sender.identity.instance_id,
            self._sender.layout,
            self._sender.digest,
            wire_version=opening.wire_version,
        )
        self._patience = StateTimeout(self._sender.limits, lambda: offer.side.state)
        await race(self._give(offer), offer.given_up(), self._patience.watch())

    async def _give(self, offer: PendingTransfer) -> None:
        side = offer.side
        while not side.ended:
            offer.changed.clear()
            if side.state is SenderState.OPENED and offer.announced:
                side.announced()
                self._patience.moved()
                self._announced_at = now()
                await self._line.say(Announced(side.num_positions))
            await self._tell_finished(offer)
            while (run := side.next_run()) is not None:
                await self._send(offer, run)
                await self._tell_finished(offer)
            if side.wants_tokens and offer.first_tokens is not None:
                side.tokens()
                await self._line.say(Tokens(offer.first_tokens))
            if not side.ended:
                await offer.changed.wait()

    async def _tell_finished(self, offer: PendingTransfer) -> None:
        if offer.side.advanced(offer.finished):
            self._patience.moved()
            await self._line.say(Finished(offer.side.finished))

    async def _send(self, offer: PendingTransfer, run: Run) -> None:
        stats = offer.stats
        with stats.timed("buffer_wait"):
            buffer = await self._sender.staging.ring.wait(offer.receiver_instance_id)
        self._buffers[run.index] = buffer
        await self._faults.at("sender.buffer_taken")
        header = self._sealer.header(run)
        payload = buffer.view[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        with stats.timed("pack"):
            await to_end(offer.pack(run.first_position, run.num_positions, payload))
        await self._faults.at("sender.packed")
        with stats.timed("seal"):
            if self._sealer.is_slow(header):
                digest = await to_end(asyncio.to_thread(self._sealer.seal, header, buffer.view))
            else:
                digest = self._sealer.seal(header, buffer.view)
        await self._faults.at("sender.sealed", buffer.view[: HEADER_BYTES + header.payload_bytes])
        stats.kv_chunks += 1
        stats.payload_bytes += header.payload_bytes
        offer.side.sent(run.index)
        self._sent_at[run.index] = now()
        await self._line.say(KvChunkReady(replace(header, digest=digest), buffer.index))

    def _hear(self, message: ReceiverMessage) -> None:
        if isinstance(message, OpenHandover) and not self._opening.done():
            self._opening.set_result(message)
            return
        offer = self._offer
        if offer is None:
            raise HandoverFailed("the receiver spoke before it was let in")
        match message:
            case Granted(from_position):
                offer.side.granted(from_position)
                offer.stats.took("grant_wait", self._announced_at)
                offer.granted = True
                offer.on_granted()
            case Full():
                offer.side.refused()
                offer.granted = False
            case Credit(num_kv_chunks):
                offer.side.credited(num_kv_chunks)
            case KvChunkCollected(index):
                offer.side.collected(index)
                offer.stats.took("confirm_wait", self._sent_at.pop(index))
                self._buffers.pop(index).release()
            case Completed():
                offer.side.completed()
            case Failed(error):
                raise TransferAborted(HandoverEvent.PEER_FAILED, error)
            case _:
                raise HandoverFailed("the receiver sent a message out of place")
        self._patience.moved()
        offer.changed.set()

    async def _tell(self, ending: TransferAborted) -> None:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._line.say(Failed(ending.error))
        except Exception:
            # The stream is broken; the receiver finds out by that.
            return

    def _end(self, ending: TransferAborted | None) -> None:
        offer = self._offer
        if offer is None:
            return
        if ending is not None:
            offer.side.end(ending.event)
        match offer.side.state:
            case SenderState.COMPLETED:
                offer.end(HandoverOutcome(Outcome.COMPLETED))
            case SenderState.REFUSED:
                full = Overloaded("the receiver has no room for the sequence")
                offer.end(HandoverOutcome(Outcome.FULL, full))
            case _:
                error = ending.error if ending else HandoverFailed("the hand-over was broken off")
                offer.end(HandoverOutcome(Outcome.FAILED, error))


MAX_OFFERS = 4096
MAX_AT_THE_DOOR = 256
MAX_RECENT_IDS = 8192

log = logging.getLogger(__name__)


class KvSender:
    """Gives KV away through one staging ring. Lives on the event loop.

    digest: how KV chunks are sealed, "xxh3-128" or "blake2b"; "": as the staging's network wants
    it.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        staging: Staging,
        *,
        digest: str = "",
        liveness: Liveness | None = None,
        limits: Mapping[State, Limit] = LIMITS,
        stats: HandoverStats | None = None,
    ) -> None:
        if positions_per_kv_chunk(staging.ring.buffer_bytes, layout) == 0:
            raise InvalidArgument(
                f"a buffer must hold one position, {layout.bytes_per_position} bytes and a header",
                field="slot_mib",
            )
        self.identity, self.layout, self.staging = identity, layout, staging
        self.digest = digest or staging.ucx.network.digest
        self.liveness, self.limits = liveness or Liveness(), limits
        self.stats = stats or HandoverStats()
        self._offers: dict[bytes, PendingTransfer] = {}
        self._door: dict[bytes, asyncio.Future[PendingTransfer]] = {}
        self._recent_ids: OrderedDict[bytes, None] = OrderedDict()
        self._timers: dict[bytes, tuple[asyncio.TimerHandle, ...]] = {}
        self._streams: set[asyncio.Task[object]] = set()
        self._num_probes = 0

    @property
    def num_offers(self) -> int:
        """Hand-overs that have not ended."""
        return len(self._offers)

    @property
    def num_at_the_door(self) -> int:
        """Streams that wait for an offer they overtook."""
        return len(self._door)

    @property
    def num_recent_ids(self) -> int:
        """Ended ids that are remembered."""
        return len(self._recent_ids)

    @property
    def probing(self) -> bool:
        """A receiver probes the way from here."""
        return self._num_probes > 0

    @property
    def holdings(self) -> dict[str, int]:
        """What hand-overs hold here, by kind; nothing when there are none and no probe runs."""
        return {"offers": len(self._offers), "streams": len(self._streams)}

    def offer(
        self,
        handover_id: bytes,
        receiver_instance_id: str,
        num_positions: int,
        pack: Pack,
        *,
        deadline_s: float,
        is_probe: bool = False,
        about: Names = NO_NAMES,
    ) -> PendingTransfer:
        """Puts one input's KV on offer to one receiver, for at most deadline_s seconds.

        Raises InvalidArgument (an id that is malformed or was used), Overloaded.
        """
        if len(handover_id) != HANDOVER_ID_BYTES:
            raise InvalidArgument(f"must be {HANDOVER_ID_BYTES} bytes", field="handover_id")
        if handover_id in self._offers or handover_id in self._recent_ids:
            raise InvalidArgument("was used before", field="handover_id")
        if len(self._offers) >= MAX_OFFERS:
            raise Overloaded("too many hand-overs are on offer")
        stats = HandoverStats() if is_probe else self.stats
        offer = PendingTransfer(
            handover_id,
            receiver_instance_id,
            num_positions,
            pack,
            self._bury,
            stats,
            is_probe=is_probe,
            about=about,
        )
        self._num_probes += is_probe
        self._offers[handover_id] = offer
        loop = asyncio.get_running_loop()
        self._timers[handover_id] = (
            loop.call_later(deadline_s, _expire, offer),
            loop.call_later(self.limits[SenderState.OFFERED].seconds, _unclaimed, offer),
        )
        waiting = self._door.pop(handover_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(offer)
        return offer

    def meet(self, introduction: HandshakeRequest) -> Handshake:
        """Answers a receiver that introduces itself.

        Raises Unavailable (it looks for an older process at this address), InvalidArgument, and
        Incompatible with what differs.
        """
        self._check_instance_id(introduction.sender_instance_id)
        if not introduction.transports:
            raise InvalidArgument("must not be empty", field="transports")
        misfit = difference(
            self.layout, self.staging.names, introduction.layout, introduction.transports
        )
        if misfit:
            error = refusal(self.identity, introduction.receiver, misfit)
            log.warning("%s", error.message)
            raise error
        name = next(name for name in introduction.transports if name in self.staging.readers)
        return Handshake(
            sender=self.identity,
            layout=self.layout,
            transport=name,
            transport_metadata=self.staging.readers[name].metadata,
            ring=self.staging.ring.describe(),
            digest=self.digest,
            kv_network=self.staging.ucx.network.value,
            ucx_transports=self.staging.ucx.transports,
        )

    async def serve(
        self,
        incoming: AsyncIterator[ReceiverMessage],
        send: Callable[[SenderMessage], Awaitable[None]],
    ) -> None:
        """Drives one Collect stream to its end. Failures are told in the stream, never raised.

        incoming: ends or raises when the receiver leaves. send: writes one message; it is not
        called concurrently. Cancelling this ends the hand-over like a broken stream.
        """
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await OutgoingTransfer(self, incoming, send).run()
        finally:
            self._streams.discard(task)

    async def close(self) -> None:
        """Ends all hand-overs and waits until nothing packs and no stream runs."""
        for offer in list(self._offers.values()):
            offer.fail(Unavailable("this worker is leaving"))
        for waiting in self._door.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("this worker is leaving"))
        await outlast(list(self._streams))

    async def claim(self, opening: OpenHandover) -> PendingTransfer:
        """Finds what a stream asks for; a stream that came too early waits at the door.

        Raises NotFound (unknown, ended, taken, or another receiver's: all look alike),
        Unavailable (meant for an older process), Incompatible and Overloaded.
        """
        self._check_instance_id(opening.sender_instance_id)
        oldest, newest = self.layout.min_wire_version, self.layout.max_wire_version
        if not oldest <= opening.wire_version <= newest:
            raise Incompatible(
                f"this worker speaks wire versions {oldest}-{newest}, not {opening.wire_version}"
            )
        if opening.probe_positions:
            self._offer_probe(opening)
        offer = self._offers.get(opening.handover_id)
        if offer is None:
            offer = await self._wait_at_the_door(opening.handover_id)
        if (
            offer.receiver_instance_id != opening.receiver.instance_id
            or offer.side.state is not SenderState.OFFERED
        ):
            raise _gone()
        buffer_bytes = min(self.staging.ring.buffer_bytes, opening.max_kv_chunk_bytes)
        offer.side.opened(positions_per_kv_chunk(buffer_bytes, self.layout))
        return offer

    def _offer_probe(self, opening: OpenHandover) -> None:
        """Raises InvalidArgument for a probe larger than one KV chunk, and what `offer` raises."""
        buffer_bytes = min(self.staging.ring.buffer_bytes, opening.max_kv_chunk_bytes)
        if opening.probe_positions > positions_per_kv_chunk(buffer_bytes, self.layout):
            raise InvalidArgument("a probe must be one KV chunk", field="probe_positions")
        offer = self.offer(
            opening.handover_id,
            opening.receiver.instance_id,
            opening.probe_positions,
            pack_made_up(opening.handover_id),
            deadline_s=PROBE_S,
            is_probe=True,
        )
        offer.announce()
        offer.advance(offer.num_positions)
        offer.tokens(())

    async def _wait_at_the_door(self, handover_id: bytes) -> PendingTransfer:
        if handover_id in self._recent_ids or handover_id in self._door:
            raise _gone()
        if len(self._door) >= MAX_AT_THE_DOOR:
            raise Overloaded("too many receivers came before their hand-over")
        arrives: asyncio.Future[PendingTransfer] = asyncio.get_running_loop().create_future()
        self._door[handover_id] = arrives
        try:
            async with asyncio.timeout(DOOR_S):
                return await arrives
        except TimeoutError:
            raise _gone() from None
        finally:
            if self._door.get(handover_id) is arrives:
                del self._door[handover_id]

    def _check_instance_id(self, meant: str) -> None:
        if meant != self.identity.instance_id:
            raise Unavailable("this address now belongs to another process")

    def _bury(self, offer: PendingTransfer, outcome: HandoverOutcome) -> None:
        for timer in self._timers.pop(offer.handover_id):
            timer.cancel()
        del self._offers[offer.handover_id]
        offer.stats.outcomes[outcome.counted] += 1
        if offer.is_probe:
            # Its bytes are worth nothing, and the recent ids of others must not be pushed out.
            self._num_probes -= 1
            return
        self._recent_ids[offer.handover_id] = None
        while len(self._recent_ids) > MAX_RECENT_IDS:
            self._recent_ids.popitem(last=False)


def _expire(offer: PendingTransfer) -> None:
    offer.expire(DeadlineExceeded("the hand-over ran out of time"))


def _unclaimed(offer: PendingTransfer) -> None:
    if offer.side.state is SenderState.OFFERED:
        offer.expire(DeadlineExceeded("nobody came to collect the hand-over"))


def _gone() -> BatonError:
    return NotFound("this hand-over is not on offer (any more)")
