"""Gives KV away: what is on offer, which receiver may collect it, and one stream's work.

The worker that computes KV calls `offer`; receivers call Meet and Collect. On a stream the sender
announces, packs, seals, sends and releases. KV chunks are packed one after the other and sent in
order; where sealing takes long, it is done beside the packing of the next ones. A buffer is taken
for each KV chunk and is ours again when the receiver confirms it, or when the stream ends. In the
second case the receiver may still be reading the buffer. That is harmless: whatever it reads, the
digest that it was sent belongs to the old contents, so a buffer in use again cannot verify.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from batonlm.core.errors import (
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
from batonlm.core.handover.fit import difference, refusal
from batonlm.core.handover.table import (
    EARLY_STREAM_S,
    HANDOVER_ID_BYTES,
    LIMITS,
    HandoverEvent,
    KvChunkRange,
    SenderSide,
    SenderState,
    State,
    StateLimit,
)
from batonlm.core.kvcache.prefix import Prefix
from batonlm.core.request.attempt import ChoiceTokens
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.rpc.convert import (
    choice_tokens_to_proto,
    error_from_proto,
    error_to_proto,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
    layout_to_proto,
    prefix_from_proto,
)
from batonlm.transfer.kv_chunk import (
    HEADER_BYTES,
    PROBE_S,
    XXH3,
    Pack,
    Sealer,
    check_buffer_bytes,
    pack_made_up,
    positions_per_kv_chunk,
)
from batonlm.transfer.staging import StagingBuffer
from batonlm.transfer.stats import HandoverStats, now
from batonlm.transfer.stream import (
    NO_NAMES,
    HeartbeatStream,
    Liveness,
    Names,
    PeerLost,
    StateTimeout,
    TransferAborted,
    abortion,
    outlast,
    race,
    to_end,
)
from batonlm.transfer.transports import Staging, digests_differ
from batonlm.v1 import handover_pb2 as pb
from batonlm.v1 import handover_pb2_grpc

MAX_OFFERS = 4096
MAX_EARLY_STREAMS = 256
MAX_RECENT_IDS = 8192

PREFIX_S = 10.0
"""How long a prefix is on offer at most: a slow receiver must not keep the cache's blocks."""

Send = Callable[[pb.CollectResponse], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandoverOutcome:
    """How a hand-over ended for the sender."""

    label: str
    """completed, full, failed, cancelled when nobody wants the KV any more, or gone when it was not
    in the prefix cache: as it is counted."""
    error: BatonError | None = None
    """None only when completed."""


class PendingTransfer:
    """A hand-over from offer to end. Made by `KvSender.offer`; all methods on the event loop.

    The worker reports what it computes with `announce`, `advance` and `tokens`, may give up with
    `fail`, and keeps the KV in place until `wait` returns; after that nothing packs from it.
    """

    def __init__(
        self,
        sender: KvSender,
        handover_id: bytes,
        receiver_instance_id: str,
        side: SenderSide,
        pack: Pack,
        is_probe: bool,
        about: Names,
    ) -> None:
        self._sender = sender
        self.handover_id, self.receiver_instance_id = handover_id, receiver_instance_id
        self.pack, self.about = pack, about
        self.stats = HandoverStats() if is_probe else sender.stats
        """Where it is counted."""
        self.is_probe = is_probe
        """The receiver asked for made-up KV; no worker stands behind it."""
        self.made_at = now()
        self.side = side
        self.on_granted: Callable[[], None] = lambda: None
        """Called once when the receiver has reserved its blocks."""
        self.granted: bool | None = None
        """Whether the receiver has reserved blocks; None: it has not answered."""
        self.announced = False
        self.pinned: int | None = None
        """Of a prefix: how many of its positions are here, once that is known."""
        self.finished = 0
        """KV of all positions below is computed."""
        self.first_tokens: tuple[ChoiceTokens, ...] | None = None
        self.changed = asyncio.Event()
        self.timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        self._gave_up: asyncio.Future[TransferAborted] = loop.create_future()
        self._ended: asyncio.Future[HandoverOutcome] = loop.create_future()

    @property
    def num_positions(self) -> int:
        """Of the input."""
        return self.side.num_positions

    def announce(self) -> None:
        """The first chunk has entered a plan."""
        self.announced = True
        self.changed.set()

    def give_prefix(self, num_positions: int, pack: Pack) -> None:
        """So many positions of the prefix that was asked for are here, all at once."""
        self.pack, self.pinned = pack, num_positions
        self.announce()
        self.advance(num_positions)
        self.tokens(())

    def advance(self, num_positions: int) -> None:
        """KV of all positions below num_positions is computed and may be packed; with the input's
        last one, the state behind it, too."""
        self.finished = max(self.finished, num_positions)
        self.changed.set()

    def tokens(self, choices: Sequence[ChoiceTokens]) -> None:
        """Token 0 of every choice was sampled."""
        self.first_tokens = tuple(choices)
        self.changed.set()

    def fail(self, error: BatonError, event: HandoverEvent = HandoverEvent.CANCEL) -> None:
        """The worker gives up: cancelled, out of memory, leaving. Without effect after the end."""
        if self._ended.done() or self._gave_up.done():
            return
        self._gave_up.set_result(TransferAborted(event, error))
        if self.side.state is SenderState.OFFERED:
            # No stream was opened that would notice.
            self.end(TransferAborted(event, error))

    async def wait(self) -> HandoverOutcome:
        """Returns when the hand-over has ended and none of its packing runs any more."""
        return await asyncio.shield(self._ended)

    def end(self, aborted: TransferAborted | None) -> None:
        """For the sender: the hand-over has ended and nothing packs. The first call counts."""
        if self._ended.done():
            return
        if aborted is not None:
            self.side.end(aborted.event)
        match self.side.state:
            case SenderState.COMPLETED:
                outcome = HandoverOutcome("completed")
            case SenderState.REFUSED:
                full = Overloaded("the receiver has no room for the sequence")
                outcome = HandoverOutcome("full", full)
            case _:
                error = aborted.error if aborted else HandoverFailed("the hand-over was broken off")
                labels = {Cancelled: "cancelled", NotFound: "gone"}
                label = labels.get(type(error), "failed")
                outcome = HandoverOutcome(label, error)
        self._ended.set_result(outcome)
        self._sender.forget(self, outcome)

    async def given_up(self) -> None:
        """For the stream: waits for `fail` and raises its TransferAborted."""
        raise await asyncio.shield(self._gave_up)


class OutgoingTransfer:
    """The work on one stream. `run` is called once."""

    def __init__(
        self, sender: KvSender, incoming: AsyncIterator[pb.CollectRequest], send: Send
    ) -> None:
        self._sender = sender
        faults = self._faults = sender.staging.faults
        self._stream: HeartbeatStream[pb.CollectRequest, pb.CollectResponse] = HeartbeatStream(
            faults.incoming("sender", incoming),
            faults.outgoing("sender", send),
            pb.CollectResponse(heartbeat=pb.HandoverHeartbeat()),
            sender.liveness,
        )
        self._opening: asyncio.Future[pb.OpenHandover] = asyncio.get_running_loop().create_future()
        self._offer: PendingTransfer | None = None
        self._buffers: dict[int, StagingBuffer] = {}
        self._sealings: set[asyncio.Task[None]] = set()
        self._newest: asyncio.Task[None] | None = None
        """Of these tasks."""
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """What one of them raised."""
        self._announced_at = 0.0
        self._sent_at: dict[int, float] = {}

    async def run(self) -> None:
        """Returns when the hand-over has ended, with every buffer released and the offer ended."""
        aborted: TransferAborted | None = None
        try:
            await race(
                self._open_and_give(),
                self._stream.listen(self._receive),
                self._stream.deliver(),
                self._stream.beat(),
            )
        except asyncio.CancelledError:
            aborted = abortion(PeerLost("the receiver left"))
            raise
        except Exception as error:
            aborted = abortion(error, self._offer.about if self._offer else NO_NAMES)
            if not aborted.peer_knows:
                failed = error_to_proto(aborted.error)
                await self._stream.send_last(pb.CollectResponse(failed=failed))
        finally:
            try:
                await self._stream.close()
            finally:
                for buffer in self._buffers.values():
                    buffer.release()
                self._buffers.clear()
                if self._offer is not None:
                    self._offer.end(aborted)

    async def _open_and_give(self) -> None:
        try:
            async with asyncio.timeout(EARLY_STREAM_S):
                opening = await asyncio.shield(self._opening)
        except TimeoutError:
            raise PeerLost("the receiver did not say what it wants") from None
        self._stream.joins = opening.several
        offer = self._offer = await self._sender.claim(opening)
        offer.stats.record("open_wait", offer.made_at)
        self._sealer = Sealer(
            offer.handover_id,
            self._sender.identity.instance_id,
            self._sender.layout,
            self._sender.staging.ring.memory,
            opening.digest or XXH3,
            wire_version=opening.wire_version or 1,
        )
        self._timeout = StateTimeout(self._sender.limits, lambda: offer.side.state)
        try:
            await race(
                self._give(offer),
                offer.given_up(),
                self._timeout.watch(),
                self._fail_with_sealing(),
            )
        finally:
            sealings = list(self._sealings)
            for task in sealings:
                task.cancel()
            await outlast(sealings)

    async def _fail_with_sealing(self) -> None:
        await self._trouble

    async def _give(self, offer: PendingTransfer) -> None:
        side = offer.side
        while not side.ended:
            offer.changed.clear()
            if side.state is SenderState.OPENED and offer.announced:
                side.announced(offer.pinned)
                self._timeout.restart()
                self._announced_at = now()
                announced = pb.HandoverAnnounced(num_positions=side.num_positions)
                await self._stream.send(pb.CollectResponse(announced=announced))
            await self._send_finished(offer)
            while (chunk := side.next_chunk()) is not None:
                await self._pack_chunk(offer, chunk)
                await self._send_finished(offer)
            if side.wants_tokens and offer.first_tokens is not None:
                side.tokens()
                choices = map(choice_tokens_to_proto, offer.first_tokens)
                tokens = pb.HandoverTokens(choices=choices)
                await self._stream.send(pb.CollectResponse(tokens=tokens))
            if not side.ended:
                await offer.changed.wait()

    async def _send_finished(self, offer: PendingTransfer) -> None:
        if offer.side.advanced(offer.finished):
            self._timeout.restart()
            finished = pb.PositionsFinished(num_positions=offer.side.finished)
            await self._stream.send(pb.CollectResponse(finished=finished))

    async def _pack_chunk(self, offer: PendingTransfer, chunk: KvChunkRange) -> None:
        stats = offer.stats
        with stats.timed("buffer_wait"):
            buffer = await self._sender.staging.ring.wait(offer.receiver_instance_id)
        self._buffers[chunk.index] = buffer
        await self._faults.at("sender.buffer_taken")
        header = self._sealer.header(chunk)
        size = HEADER_BYTES + header.payload_bytes
        with stats.timed("pack"):
            payload = buffer.view[HEADER_BYTES:size]
            await to_end(offer.pack(chunk.first_position, chunk.num_positions, payload))
        await self._faults.at("sender.packed")
        sealing = self._seal_and_send(offer, header, buffer, self._newest)
        if not self._sealer.is_slow(header):
            await sealing
            if offer.side.next_position < offer.side.finished:
                # Its message goes out before the next copy takes the core.
                await self._stream.flush()
            return
        task = self._newest = asyncio.create_task(sealing)
        self._sealings.add(task)
        task.add_done_callback(self._sealed)

    def _sealed(self, task: asyncio.Task[None]) -> None:
        self._sealings.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._trouble.done():
            self._trouble.set_exception(error)

    async def _seal_and_send(
        self,
        offer: PendingTransfer,
        header: pb.KvChunkHeader,
        buffer: StagingBuffer,
        before: asyncio.Task[None] | None,
    ) -> None:
        stats, size = offer.stats, HEADER_BYTES + header.payload_bytes
        with stats.timed("seal"):
            if self._sealer.is_slow(header):
                await to_end(asyncio.to_thread(self._sealer.seal, header, buffer.view))
            else:
                self._sealer.seal(header, buffer.view)
        await self._faults.at("sender.sealed", buffer.view[:size])
        if before is not None:
            await asyncio.wait([before])
            # Raises what ended it: nothing follows a gap.
            before.result()
        stats.kv_chunks += 1
        stats.payload_bytes += header.payload_bytes
        offer.side.sent(header.index)
        self._sent_at[header.index] = now()
        ready = pb.KvChunkReady(header=header, buffer=buffer.index)
        await self._stream.send(pb.CollectResponse(kv_chunk=ready))
        offer.changed.set()

    def _receive(self, message: pb.CollectRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "open" and not self._opening.done():
            self._opening.set_result(message.open)
            return
        offer = self._offer
        if kind is None:
            raise HandoverFailed("the receiver sent a message that is empty or unknown")
        if offer is None:
            raise HandoverFailed("the receiver spoke before it was let in")
        match kind:
            case "granted":
                offer.side.granted(message.granted.from_position)
                offer.stats.record("grant_wait", self._announced_at)
                offer.granted = True
                offer.on_granted()
            case "full":
                offer.side.refused()
                offer.granted = False
            case "credit":
                offer.side.credited(message.credit.num_kv_chunks)
            case "collected":
                index = message.collected.index
                offer.side.collected(index)
                offer.stats.record("confirm_wait", self._sent_at.pop(index))
                self._buffers.pop(index).release()
            case "completed":
                offer.side.completed()
            case "failed":
                error = error_from_proto(message.failed)
                raise TransferAborted(HandoverEvent.PEER_FAILED, error)
            case _:
                raise HandoverFailed("the receiver sent a message out of place")
        self._timeout.restart()
        offer.changed.set()


class KvSender(handover_pb2_grpc.HandoverServicer):
    """Gives KV away through one staging pool, and serves `baton.v1.Handover`. Lives on the event
    loop."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        staging: Staging,
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
        self._offers: dict[bytes, PendingTransfer] = {}
        self._early_streams: dict[bytes, asyncio.Future[PendingTransfer]] = {}
        self._recent_ids: OrderedDict[bytes, None] = OrderedDict()
        self._streams: set[asyncio.Task[object]] = set()
        self._num_probes = 0
        self.serve_prefix: Callable[[PendingTransfer, Prefix], None] | None = None
        """Called with each prefix that is asked for, to call `give_prefix` or `fail`. None: this
        worker offers none."""

    @property
    def num_offers(self) -> int:
        """Hand-overs that have not ended."""
        return len(self._offers)

    @property
    def num_early_streams(self) -> int:
        """Streams that wait for an offer which they overtook."""
        return len(self._early_streams)

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
        is_prefix: bool = False,
        about: Names = NO_NAMES,
    ) -> PendingTransfer:
        """Puts one input's KV on offer to one receiver, for at most deadline_s seconds.

        pack: is called for positions of the input, and then, behind them, for those of the state
        that the layout has (`KvLayout.place`), never for some of both.

        Raises InvalidArgument (an id that is malformed or was used), Overloaded.
        """
        if len(handover_id) != HANDOVER_ID_BYTES:
            raise InvalidArgument(f"must be {HANDOVER_ID_BYTES} bytes", field="handover_id")
        if handover_id in self._offers or handover_id in self._recent_ids:
            raise InvalidArgument("was used before", field="handover_id")
        if len(self._offers) >= MAX_OFFERS:
            raise Overloaded("too many hand-overs are on offer")
        # A probe's made-up KV has no state.
        state_positions = 0 if is_probe else self.layout.state_positions
        side = SenderSide(num_positions, is_prefix=is_prefix, state_positions=state_positions)
        offer = PendingTransfer(
            self, handover_id, receiver_instance_id, side, pack, is_probe, about
        )
        self._num_probes += is_probe
        self._offers[handover_id] = offer
        loop = asyncio.get_running_loop()
        unclaimed_s = self.limits[SenderState.OFFERED].seconds
        offer.timers = [
            loop.call_later(deadline_s, _expire, offer),
            loop.call_later(unclaimed_s, _expire_unclaimed, offer),
        ]
        early = self._early_streams.pop(handover_id, None)
        if early is not None and not early.done():
            early.set_result(offer)
        return offer

    def meet(self, request: pb.MeetRequest) -> pb.MeetResponse:
        """Answers a receiver's handshake.

        Raises Unavailable (it looks for an older process at this address), InvalidArgument, and
        Incompatible with what differs.
        """
        receiver, theirs = identity_from_proto(request.receiver), layout_from_proto(request.layout)
        self._check_instance_id(request.sender_instance_id)
        if not request.transports:
            raise InvalidArgument("must not be empty", field="transports")
        misfit = difference(self.layout, self.staging.names, theirs, tuple(request.transports))
        accepted = tuple(request.digests) or (XXH3,)
        digest = next((each for each in self.staging.digests if each in accepted), "")
        if not misfit and not digest:
            misfit = digests_differ(", ".join(accepted), self.staging)
        if misfit:
            error = refusal(self.identity, receiver, misfit)
            log.warning("%s", error.message)
            raise error
        name = next(name for name in request.transports if name in self.staging.readers)
        return pb.MeetResponse(
            sender=identity_to_proto(self.identity),
            layout=layout_to_proto(self.layout),
            transport=name,
            transport_metadata=self.staging.readers[name].metadata,
            ring=self.staging.ring.describe(),
            digest=digest,
            kv_network=self.staging.ucx.network.value,
            ucx_transports=self.staging.ucx.transports,
            several=True,
            prefixes=self.serve_prefix is not None,
        )

    async def serve(self, incoming: AsyncIterator[pb.CollectRequest], send: Send) -> None:
        """Drives one Collect stream to its end. Failures are sent in the stream, never raised.

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

    async def Meet(
        self,
        request: pb.MeetRequest,
        context: grpc.aio.ServicerContext[pb.MeetRequest, pb.MeetResponse],
    ) -> pb.MeetResponse:
        return self.meet(request)

    async def Collect(  # type: ignore[override]  # the stubs know handlers that yield only
        self,
        request_iterator: AsyncIterator[pb.CollectRequest],
        context: grpc.aio.ServicerContext[pb.CollectRequest, pb.CollectResponse],
    ) -> None:
        async def incoming() -> AsyncIterator[pb.CollectRequest]:
            try:
                async for request in request_iterator:
                    yield request
            except BatonError:
                raise
            except Exception:
                raise Unavailable("the receiver left") from None

        async def send(message: pb.CollectResponse) -> None:
            try:
                await context.write(message)
            except Exception:
                # gRPC has several exceptions for a stream that is no more.
                raise Unavailable("the receiver left") from None

        await self.serve(incoming(), send)

    async def close(self) -> None:
        """Ends all hand-overs and waits until nothing packs and no stream runs."""
        for offer in list(self._offers.values()):
            offer.fail(Unavailable("this worker is leaving"))
        for early in self._early_streams.values():
            if not early.done():
                early.set_exception(Unavailable("this worker is leaving"))
        await outlast(list(self._streams))

    async def claim(self, opening: pb.OpenHandover) -> PendingTransfer:
        """Finds what a stream asks for; a stream that overtook its offer waits for it.

        Raises NotFound (unknown, ended, taken, or another receiver's: all look alike),
        Unavailable (meant for an older process), Incompatible and Overloaded.
        """
        self._check_instance_id(opening.sender_instance_id)
        oldest, newest = self.layout.min_wire_version, self.layout.max_wire_version
        version = opening.wire_version or 1
        if not oldest <= version <= newest:
            raise Incompatible(f"this worker speaks wire versions {oldest}-{newest}, not {version}")
        if (opening.digest or XXH3) not in self.staging.digests:
            raise Incompatible(digests_differ(opening.digest, self.staging))
        buffer_bytes = min(self.staging.ring.buffer_bytes, opening.max_kv_chunk_bytes)
        per_kv_chunk = positions_per_kv_chunk(buffer_bytes, self.layout)
        if opening.probe_positions:
            self._offer_probe(opening, per_kv_chunk)
        elif opening.HasField("prefix"):
            self._offer_prefix(opening)
        offer = self._offers.get(opening.handover_id)
        if offer is None:
            offer = await self._wait_for_offer(opening.handover_id)
        if (
            offer.receiver_instance_id != opening.receiver.instance_id
            or offer.side.state is not SenderState.OFFERED
        ):
            raise _gone()
        offer.side.opened(per_kv_chunk)
        return offer

    def _offer_probe(self, opening: pb.OpenHandover, per_kv_chunk: int) -> None:
        """Raises InvalidArgument for a probe larger than one KV chunk, and what `offer` raises."""
        if opening.probe_positions > per_kv_chunk:
            raise InvalidArgument("a probe must be one KV chunk", field="probe_positions")
        offer = self.offer(
            opening.handover_id,
            opening.receiver.instance_id,
            opening.probe_positions,
            pack_made_up(opening.handover_id, self.staging.ring.memory),
            deadline_s=PROBE_S,
            is_probe=True,
        )
        offer.announce()
        offer.advance(offer.num_positions)
        offer.tokens(())

    def _offer_prefix(self, opening: pb.OpenHandover) -> None:
        """Raises NotFound for a worker without prefixes, InvalidArgument, and as `offer` does."""
        prefix = prefix_from_proto(opening.prefix)
        if self.serve_prefix is None:
            raise NotFound("this worker offers no prefixes")
        offer = self.offer(
            opening.handover_id,
            opening.receiver.instance_id,
            len(prefix.token_ids),
            _pack_nothing,
            deadline_s=PREFIX_S,
            is_prefix=True,
        )
        self.serve_prefix(offer, prefix)

    async def _wait_for_offer(self, handover_id: bytes) -> PendingTransfer:
        if (
            # Never to be offered.
            len(handover_id) != HANDOVER_ID_BYTES
            or handover_id in self._recent_ids
            or handover_id in self._early_streams
        ):
            raise _gone()
        if len(self._early_streams) >= MAX_EARLY_STREAMS:
            raise Overloaded("too many receivers came before their hand-over")
        offered: asyncio.Future[PendingTransfer] = asyncio.get_running_loop().create_future()
        self._early_streams[handover_id] = offered
        try:
            async with asyncio.timeout(EARLY_STREAM_S):
                return await offered
        except TimeoutError:
            raise _gone() from None
        finally:
            if self._early_streams.get(handover_id) is offered:
                del self._early_streams[handover_id]

    def _check_instance_id(self, meant: str) -> None:
        if meant != self.identity.instance_id:
            raise Unavailable("this address now belongs to another process")

    def forget(self, offer: PendingTransfer, outcome: HandoverOutcome) -> None:
        """For an offer: it has ended, and only its id is remembered."""
        for timer in offer.timers:
            timer.cancel()
        del self._offers[offer.handover_id]
        offer.stats.outcomes[outcome.label] += 1
        if offer.is_probe:
            # Its bytes are worth nothing, and the recent ids of others must not be pushed out.
            self._num_probes -= 1
            return
        self._recent_ids[offer.handover_id] = None
        while len(self._recent_ids) > MAX_RECENT_IDS:
            self._recent_ids.popitem(last=False)


def _expire(offer: PendingTransfer) -> None:
    error = DeadlineExceeded("the hand-over ran out of time")
    offer.fail(error, HandoverEvent.DEADLINE)


def _expire_unclaimed(offer: PendingTransfer) -> None:
    if offer.side.state is SenderState.OFFERED:
        error = DeadlineExceeded("nobody came to collect the hand-over")
        offer.fail(error, HandoverEvent.DEADLINE)


async def _pack_nothing(first_position: int, count: int, out: object) -> None:
    raise HandoverFailed("nothing was announced")


def _gone() -> BatonError:
    return NotFound("this hand-over is not on offer (any more)")
