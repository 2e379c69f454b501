"""One Collect stream from the giver's end: announce, pack, seal, send, release.

Knows the offer and the line it speaks on, neither gRPC nor the engine.

A slot is taken for each parcel and is ours again when the collector confirms it, or when the stream
ends. In the second case the collector may still be reading the slot. That is harmless: whatever it
reads, the digest it was told belongs to the old contents, so a slot in use again cannot verify.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.core.errors import HandoverFailed, Overloaded
from baton.core.handover import DOOR_S, GiverState, HandoverEvent, Run
from baton.core.handover_messages import (
    Announced,
    CollectorMessage,
    Completed,
    Credit,
    Failed,
    Finished,
    Full,
    GiverMessage,
    Granted,
    OpenHandover,
    ParcelCollected,
    ParcelReady,
    Tokens,
)
from baton.kv.ending import Ending, Patience, why
from baton.kv.line import Line, PeerLost
from baton.kv.offer import HandoverOutcome, Offer, Outcome
from baton.kv.parcel import HEADER_BYTES, Sealer
from baton.kv.slots import Slot
from baton.kv.stats import now
from baton.kv.tasks import race, to_end
from baton.kv.ticket import NO_NAMES

if TYPE_CHECKING:
    from baton.kv.giver import Giver

FAREWELL_S = 1.0


class Giving:
    """The work on one stream. `run` is called once."""

    def __init__(
        self,
        giver: Giver,
        incoming: AsyncIterator[CollectorMessage],
        send: Callable[[GiverMessage], Awaitable[None]],
    ) -> None:
        self._giver = giver
        faults = self._faults = giver.staging.faults
        self._line: Line[CollectorMessage, GiverMessage] = Line(
            faults.hearing("giver", incoming), faults.saying("giver", send), giver.liveness
        )
        self._opening: asyncio.Future[OpenHandover] = asyncio.get_running_loop().create_future()
        self._offer: Offer | None = None
        self._slots: dict[int, Slot] = {}
        self._announced_at = 0.0
        self._sent_at: dict[int, float] = {}

    async def run(self) -> None:
        """Returns when the hand-over has ended, with every slot released and the offer ended."""
        ending: Ending | None = None
        try:
            await race(self._open_and_give(), self._line.listen(self._hear), self._line.beat())
        except asyncio.CancelledError:
            ending = why(PeerLost("the collector left"))
            raise
        except Exception as error:
            ending = why(error, self._offer.about if self._offer else NO_NAMES)
            if not ending.peer_knows:
                await self._tell(ending)
        finally:
            try:
                await self._line.close(FAREWELL_S)
            finally:
                for slot in self._slots.values():
                    slot.release()
                self._slots.clear()
                self._end(ending)

    async def _open_and_give(self) -> None:
        try:
            async with asyncio.timeout(DOOR_S):
                opening = await asyncio.shield(self._opening)
        except TimeoutError:
            raise PeerLost("the collector did not say what it wants") from None
        offer = self._offer = await self._giver.claim(opening)
        offer.stats.took("open_wait", offer.made_at)
        self._sealer = Sealer(
            offer.handover_id,
            self._giver.identity.incarnation,
            self._giver.layout,
            self._giver.digest,
            wire_version=opening.wire_version,
        )
        self._patience = Patience(self._giver.limits, lambda: offer.side.state)
        await race(self._give(offer), offer.given_up(), self._patience.watch())

    async def _give(self, offer: Offer) -> None:
        side = offer.side
        while not side.ended:
            offer.changed.clear()
            if side.state is GiverState.OPENED and offer.announced:
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

    async def _tell_finished(self, offer: Offer) -> None:
        if offer.side.advanced(offer.finished):
            self._patience.moved()
            await self._line.say(Finished(offer.side.finished))

    async def _send(self, offer: Offer, run: Run) -> None:
        stats = offer.stats
        with stats.timed("slot_wait"):
            slot = await self._giver.staging.ring.wait(offer.collector_incarnation)
        self._slots[run.index] = slot
        await self._faults.at("giver.slot_taken")
        header = self._sealer.header(run)
        payload = slot.view[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        with stats.timed("pack"):
            await to_end(offer.pack(run.first_position, run.num_positions, payload))
        await self._faults.at("giver.packed")
        with stats.timed("seal"):
            if self._sealer.is_slow(header):
                digest = await to_end(asyncio.to_thread(self._sealer.seal, header, slot.view))
            else:
                digest = self._sealer.seal(header, slot.view)
        await self._faults.at("giver.sealed", slot.view[: HEADER_BYTES + header.payload_bytes])
        stats.parcels += 1
        stats.payload_bytes += header.payload_bytes
        offer.side.sent(run.index)
        self._sent_at[run.index] = now()
        await self._line.say(ParcelReady(replace(header, digest=digest), slot.index))

    def _hear(self, message: CollectorMessage) -> None:
        if isinstance(message, OpenHandover) and not self._opening.done():
            self._opening.set_result(message)
            return
        offer = self._offer
        if offer is None:
            raise HandoverFailed("the collector spoke before it was let in")
        match message:
            case Granted(from_position):
                offer.side.granted(from_position)
                offer.stats.took("grant_wait", self._announced_at)
                offer.granted = True
                offer.on_granted()
            case Full():
                offer.side.refused()
                offer.granted = False
            case Credit(num_parcels):
                offer.side.credited(num_parcels)
            case ParcelCollected(index):
                offer.side.collected(index)
                offer.stats.took("confirm_wait", self._sent_at.pop(index))
                self._slots.pop(index).release()
            case Completed():
                offer.side.completed()
            case Failed(error):
                raise Ending(HandoverEvent.PEER_FAILED, error)
            case _:
                raise HandoverFailed("the collector sent a message out of place")
        self._patience.moved()
        offer.changed.set()

    async def _tell(self, ending: Ending) -> None:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._line.say(Failed(ending.error))
        except Exception:
            # The stream is broken; the collector finds out by that.
            return

    def _end(self, ending: Ending | None) -> None:
        offer = self._offer
        if offer is None:
            return
        if ending is not None:
            offer.side.end(ending.event)
        match offer.side.state:
            case GiverState.COMPLETED:
                offer.end(HandoverOutcome(Outcome.COMPLETED))
            case GiverState.REFUSED:
                full = Overloaded("the collector has no room for the sequence")
                offer.end(HandoverOutcome(Outcome.FULL, full))
            case _:
                error = ending.error if ending else HandoverFailed("the hand-over was broken off")
                offer.end(HandoverOutcome(Outcome.FAILED, error))
