"""One Collect stream from the collector's end: reserve, credit, read, verify, unpack, confirm.

Knows the peer and the line it speaks on, neither gRPC nor the engine.

A credit stands for a landing slot that is held here. A parcel goes: read into its landing slot,
header and digest verified, unpacked into blocks in the order of parcels, slot released, confirmed.
Nothing is unpacked that did not verify. When the work ends early, a read may still be running: its
slot is released all the same and stays in limbo until the read has ended; the blocks behind it are
touched only by unpacking, which is always waited for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from baton.core.attempt import ChoiceTokens
from baton.core.errors import Cancelled, DeadlineExceeded, HandoverFailed, Overloaded
from baton.core.handover import CollectorSide, CollectorState, HandoverEvent, Run
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
    ParcelHeader,
    ParcelReady,
    Tokens,
)
from baton.kv.connection import CollectStream
from baton.kv.ending import Ending, Patience, why
from baton.kv.line import Line
from baton.kv.parcel import HEADER_BYTES, Sealer, positions_per_parcel
from baton.kv.peers import Peer
from baton.kv.slots import Slot
from baton.kv.stats import now
from baton.kv.tasks import outlast, race, to_end
from baton.kv.ticket import Collected, Reserve, Surroundings, Ticket, Unpack
from baton.kv.transport import TransportError

MAX_IN_FLIGHT = 4
"""Parcels of one hand-over under way: enough to overlap packing, reading and unpacking."""

READ_S = 5.0
"""A read that takes longer is given up. A frozen giver is found earlier, by its silence."""


class Collecting:
    """The work on one stream. `run` is called once, and `see_off` once after it."""

    def __init__(
        self,
        around: Surroundings,
        ticket: Ticket,
        peer: Peer,
        stream: CollectStream,
        reserve: Reserve,
        unpack: Unpack,
    ) -> None:
        self._around, self._ticket, self._peer, self._stream = around, ticket, peer, stream
        self._reserve_blocks, self._unpack = reserve, unpack
        self._line: Line[GiverMessage, CollectorMessage] = Line(
            around.faults.hearing("collector", aiter(stream)),
            around.faults.saying("collector", stream.send),
            around.liveness,
        )
        slot_bytes = min(around.ring.slot_bytes, peer.meeting.ring.slot_bytes)
        self.side = CollectorSide(
            ticket.num_positions, positions_per_parcel(slot_bytes, around.layout)
        )
        self._wire_version = around.layout.common_wire_version(peer.meeting.layout)
        self._sealer = Sealer(
            ticket.handover_id,
            ticket.giver.incarnation,
            around.layout,
            peer.meeting.digest,
            wire_version=self._wire_version,
        )
        self._patience = Patience(around.limits, lambda: self.side.state)
        self._changed = asyncio.Event()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credited: deque[Slot] = deque()
        self._landing: dict[int, Slot] = {}
        self._landings: set[asyncio.Task[None]] = set()
        self._newest: asyncio.Task[None] | None = None
        self._tokens: tuple[ChoiceTokens, ...] = ()
        self._received_bytes = self._cached_positions = 0
        self._opened_at = self._last_told_at = 0.0
        self._received_when_told = 0
        self.ending: Ending | None = None

    async def run(self) -> Collected:
        """Collects. On return or raise every slot is released and nothing unpacks any more.

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
            self.ending = Ending(HandoverEvent.CANCEL, Cancelled("the collector gave up"))
            raise
        except Exception as error:
            if not self.side.ended:
                self.ending = why(error, self._ticket.about)
                raise self.ending from error
        finally:
            await self._clean_up()
        if self.side.state is CollectorState.FULL:
            raise Overloaded("this worker has no room for the sequence")
        return Collected(self._tokens, self._received_bytes, self._cached_positions)

    async def see_off(self, timeout_s: float) -> None:
        """Tells the giver how it ended, if it does not know, and ends the stream. Bounded."""
        try:
            async with asyncio.timeout(timeout_s):
                if self.ending is not None and not self.ending.peer_knows:
                    await self._line.say(Failed(self.ending.error))
        except Exception:
            # The stream is broken; the giver finds out by that.
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
            # A task that was cancelled before it began has not released its slot.
            for slot in (*self._credited, *self._landing.values()):
                slot.release()
            self._credited.clear()
            self._landing.clear()

    async def _take(self) -> None:
        side, giver = self.side, self._ticket.giver
        await self._line.say(
            OpenHandover(
                self._ticket.handover_id,
                self._around.identity,
                giver.incarnation,
                self._around.ring.slot_bytes,
                self._ticket.num_positions if self._ticket.is_probe else 0,
                self._wire_version,
            )
        )
        self._opened_at = now()
        while not side.ended:
            self._changed.clear()
            if side.state is CollectorState.RESERVING:
                await self._reserve()
            while side.wants_credit and self._in_flight < MAX_IN_FLIGHT:
                with self._around.stats.timed("slot_wait"):
                    slot = await self._around.ring.wait(giver.incarnation)
                await self._credit(slot)
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

    async def _credit(self, slot: Slot | None) -> None:
        """Tells of a slot that was waited for and of all others that can be had, in one message."""
        num_parcels = 0
        while slot is not None:
            self._credited.append(slot)
            self.side.credited()
            num_parcels += 1
            more = self.side.wants_credit and self._in_flight < MAX_IN_FLIGHT
            slot = self._around.ring.take(self._ticket.giver.incarnation) if more else None
        await self._line.say(Credit(num_parcels))

    async def _reserve(self) -> None:
        with self._around.stats.timed("reserve"):
            from_position = await self._reserve_blocks()
        await self._around.faults.at("collector.reserved")
        self._patience.moved()
        if from_position is None:
            self.side.full()
            await self._line.say(Full())
        else:
            self.side.granted(from_position)
            self._cached_positions = from_position
            await self._line.say(Granted(from_position))

    def _hear(self, message: GiverMessage) -> None:
        match message:
            case Announced(num_positions):
                self.side.announced(num_positions)
                self._around.stats.took("announce_wait", self._opened_at)
            case Finished(num_positions):
                self.side.advanced(num_positions)
                if num_positions == self.side.num_positions:
                    self._last_told_at = now()
                    self._received_when_told = self._received_bytes
            case ParcelReady(header, slot):
                self._arrive(header, slot)
            case Tokens(choices):
                self.side.tokens()
                self._tokens = choices
            case Failed(error):
                raise Ending(HandoverEvent.PEER_FAILED, error)
            case _:
                raise HandoverFailed("the giver sent a message out of place")
        self._patience.moved()
        self._changed.set()

    def _arrive(self, header: ParcelHeader, remote_slot: int) -> None:
        run = Run(header.index, header.first_position, header.num_positions)
        if replace(header, digest=b"") != self._sealer.header(run):
            raise self._mismatch("announcement")
        self.side.arriving(run)
        self._landing[run.index] = self._credited.popleft()
        task = asyncio.create_task(self._land(header, remote_slot, self._newest))
        self._newest = task
        self._landings.add(task)
        task.add_done_callback(self._landed)

    async def _land(
        self, header: ParcelHeader, remote_slot: int, before: asyncio.Task[None] | None
    ) -> None:
        slot, stats = self._landing[header.index], self._around.stats
        faults = self._around.faults
        try:
            await faults.at("collector.reading")
            size = HEADER_BYTES + header.payload_bytes
            try:
                began = now()
                with stats.timed("read"):
                    await self._peer.reader.read(
                        self._ticket.giver.incarnation, remote_slot, slot, size, READ_S
                    )
                stats.link.read(size, now() - began)
            except TransportError:
                self._peer.suspect = True
                stats.transfer_errors += 1
                raise HandoverFailed("a parcel could not be read") from None
            await faults.at("collector.read", slot.view[:size])
            with stats.timed("verify"):
                if self._sealer.is_slow(header):
                    wrong = await to_end(
                        asyncio.to_thread(self._sealer.mismatch, header, slot.view)
                    )
                else:
                    wrong = self._sealer.mismatch(header, slot.view)
            if wrong:
                raise self._mismatch(wrong)
            await faults.at("collector.verified")
            if before is not None:
                # Reads end in any order. Unpacking must not: the places that follow a parcel in its
                # last tile are cleared.
                await asyncio.wait([before])
            payload = slot.view[HEADER_BYTES:size]
            with stats.timed("unpack"):
                await to_end(self._unpack(header.first_position, header.num_positions, payload))
            await faults.at("collector.unpacked")
        finally:
            self._landing.pop(header.index).release()
        self.side.landed(header.index)
        self._received_bytes += header.payload_bytes
        stats.parcels += 1
        stats.payload_bytes += header.payload_bytes
        await self._line.say(ParcelCollected(header.index))
        self._patience.moved()
        self._changed.set()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._landings.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._trouble.done():
            self._trouble.set_exception(error)

    def _mismatch(self, kind: str) -> HandoverFailed:
        self._around.stats.mismatches[kind] += 1
        return HandoverFailed("a parcel is not what was announced")

    async def _fail_with_landings(self) -> None:
        await self._trouble

    async def _run_out_of_time(self) -> None:
        await asyncio.sleep(self._ticket.deadline_s)
        error = DeadlineExceeded("the hand-over ran out of time")
        raise Ending(HandoverEvent.DEADLINE, error)
