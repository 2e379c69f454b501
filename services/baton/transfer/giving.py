"""One Collect stream from the sender's end: announce, pack, seal, send, release.

Knows the offer and the line it speaks on, neither gRPC nor the engine.

A buffer is taken for each KV chunk and is ours again when the receiver confirms it, or when the
stream ends. In the second case the receiver may still be reading the buffer. That is harmless:
whatever it reads, the digest it was told belongs to the old contents, so a buffer in use again
cannot verify.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.core.errors import HandoverFailed, Overloaded
from baton.core.handover.messages import (
    Announced,
    Completed,
    Credit,
    Failed,
    Finished,
    Full,
    Granted,
    KvChunkCollected,
    KvChunkReady,
    OpenHandover,
    ReceiverMessage,
    SenderMessage,
    Tokens,
)
from baton.core.handover.table import DOOR_S, HandoverEvent, Run, SenderState
from baton.transfer.buffers import StagingBuffer
from baton.transfer.ending import StateTimeout, TransferAborted, why
from baton.transfer.kv_chunk import HEADER_BYTES, Sealer
from baton.transfer.line import HeartbeatStream, PeerLost
from baton.transfer.offer import HandoverOutcome, Outcome, PendingTransfer
from baton.transfer.stats import now
from baton.transfer.tasks import race, to_end
from baton.transfer.ticket import NO_NAMES

if TYPE_CHECKING:
    from baton.transfer.sender import KvSender

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
