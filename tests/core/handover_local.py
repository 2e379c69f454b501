"""One hand-over that moves: its two sides, the stream between them and the slots it holds.

The two sides are production's own. Modelled is what surrounds them: an engine that computes, a
stream of two FIFO queues, and reads that end well, late or never. Two hand-overs touch each other
only through slots, so this one knows its slots by number and says what it does to them (`SlotUse`);
whose they are is the business of `handover_rings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baton.core.handover import CollectorSide, CollectorState, GiverSide, GiverState, Run
from baton.core.handover import HandoverEvent as Event
from baton.core.slot_states import SlotEvent
from tests.core.handover_parts import (
    PER_PARCEL,
    Broken,
    Landing,
    Life,
    Local,
    Mutation,
    Phase,
    SlotUse,
    check,
    of_side,
    thawed,
)


class Handover:
    """A Local that moves. Made, moved once and frozen again."""

    def __init__(self, local: Local, mutation: Mutation | None):
        self.mutation = mutation
        self.local = local
        self.giver = GiverSide(*thawed(local.giver))
        self.collector = CollectorSide(*thawed(local.collector))
        self.to_giver, self.to_collector = list(local.to_giver), list(local.to_collector)
        self.unbroken, self.computed, self.packing = local.unbroken, local.computed, local.packing
        self.sent, self.credited = dict(local.sent), list(local.credited)
        self.landing = {each.run.index: each for each in local.landing}
        self.unpacked, self.cached, self.held = local.unpacked, local.cached, local.held
        self.giver_life, self.collector_life = local.giver_life, local.collector_life
        self.uses: list[SlotUse] = []

    def frozen(self) -> Local:
        """Checked, and without what makes no difference any more."""
        positions = self.giver.num_positions
        now = Local(
            of_side(self.giver),
            of_side(self.collector),
            tuple(self.to_giver),
            tuple(self.to_collector),
            self.unbroken,
            self.computed,
            self.packing,
            tuple(self.sent.items()),
            tuple(self.credited),
            tuple(self.landing.values()),
            tuple(sorted(self.unpacked)),
            self.cached,
            self.held,
            self.giver_life,
            self.collector_life,
        )
        check(now, self.giver.state, self.collector.state)
        if self.giver.ended:
            over = of_side(GiverSide(positions, self.giver.state))
            now = now._replace(giver=over, to_giver=(), computed=positions)
        if self.collector.ended:
            over = of_side(CollectorSide(positions, PER_PARCEL, self.collector.state))
            now = now._replace(collector=over, to_collector=())
            if not self.landing:
                all_in = self.collector.state is CollectorState.COMPLETED
                unpacked = tuple(range(positions)) if all_in else ()
                now = now._replace(unpacked=unpacked, cached=0)
        # Whether a stream is whole matters to who still hears from it what was sent before its end.
        deaf_giver = self.giver.ended or (self.collector.ended and not self.to_giver)
        deaf_collector = self.collector.ended or (self.giver.ended and not self.to_collector)
        if deaf_giver and deaf_collector:
            now = now._replace(unbroken=False)
        return now

    # The giver.

    def giver_hears(self) -> None:
        kind, *arguments = self.to_giver.pop(0)
        if self.giver.ended:
            return
        match kind:
            case "open":
                self.giver.opened(PER_PARCEL)
            case "granted":
                self.giver.granted(*arguments)
            case "full":
                self.giver.refused()
            case "credit":
                self.giver.credited(1)
            case "collected":
                self.giver.collected(*arguments)
                if arguments[0] in self.sent:
                    self._giver_use(self.sent.pop(*arguments), SlotEvent.RELEASE)
            case "completed":
                self.giver.completed()
            case "failed":
                self.end_giver(Event.PEER_FAILED)
        self.giver_goes_on()

    def giver_goes_on(self) -> None:
        """What follows in the same turn of the loop."""
        if self.giver.state is GiverState.OPENED and self.computed >= 0:
            self.giver.announced()
            self._tell_collector("announced")
        if self.giver.advanced(self.computed):
            self._tell_collector("finished", self.giver.finished)
        if self.giver.wants_tokens and self.computed == self.giver.num_positions:
            self.giver.tokens()
            self._tell_collector("tokens")

    def compute(self) -> None:
        self.computed += 1
        self.giver_goes_on()

    def pack(self, slot: int) -> None:
        run = self.giver.next_run()
        assert run is not None
        self._giver_use(slot, SlotEvent.TAKE)
        self.packing = run, slot

    def packed(self) -> None:
        assert self.packing is not None
        (run, slot), self.packing = self.packing, None
        self._giver_use(slot, None)
        if self.giver.ended:
            if self.mutation is not Mutation.FREE_WHILE_PACKING:
                self._giver_use(slot, SlotEvent.RELEASE)
            return
        self.giver.sent(run.index)
        self.sent[run.index] = slot
        self._tell_collector("parcel", run, slot)
        if self.mutation is Mutation.FREE_WHEN_SENT:
            self._giver_use(self.sent.pop(run.index), SlotEvent.RELEASE)
        self.giver_goes_on()

    def end_giver(self, event: Event, *, tell: bool = False) -> None:
        self.giver.end(event)
        if tell:
            self._tell_collector("failed")
        if self.mutation is Mutation.KEEP_SLOTS_AT_THE_END:
            return
        for slot in self.sent.values():
            self._giver_use(slot, SlotEvent.RELEASE)
        self.sent.clear()
        if self.packing is not None and self.mutation is Mutation.FREE_WHILE_PACKING:
            self._giver_use(self.packing[1], SlotEvent.RELEASE)

    # The collector.

    def collector_hears(self) -> None:
        kind, *arguments = self.to_collector.pop(0)
        if self.collector.ended:
            return
        match kind:
            case "announced":
                self.collector.announced(self.giver.num_positions)
            case "finished":
                self.collector.advanced(*arguments)
            case "parcel":
                self._arrive(*arguments)
            case "tokens":
                self.collector.tokens()
            case "failed":
                self.end_collector(Event.PEER_FAILED)
        self.collector_goes_on()

    def collector_goes_on(self) -> None:
        if self.collector.all_in:
            self.collector.completed()
            self._tell_giver("completed")

    def grant(self, from_position: int) -> None:
        self.cached, self.held = from_position, True
        self.collector.granted(from_position)
        self._tell_giver("granted", from_position)

    def refuse(self) -> None:
        self.collector.full()
        self._tell_giver("full")

    def credit(self, slot: int) -> None:
        self._collector_use(slot, SlotEvent.TAKE)
        self.credited.append(slot)
        self.collector.credited()
        self._tell_giver("credit")

    def credit_without_slot(self) -> None:
        self.collector.credited()
        self._tell_giver("credit")

    def _arrive(self, run: Run, source: int | None) -> None:
        self.collector.arriving(run)
        if not self.credited:
            raise Broken("a parcel has no slot to land in")
        slot = self.credited.pop(0)
        self._collector_use(slot, SlotEvent.LEND)
        self.landing[run.index] = Landing(run, slot, source, Phase.READ)

    def read(self, index: int) -> None:
        """The transfer is done, and the digest tells whether it read what was announced."""
        run, slot, source, _ = landing = self.landing[index]
        self._collector_use(slot, SlotEvent.SETTLE)
        if source is None:
            if self.mutation is Mutation.ACCEPT_UNVERIFIED:
                raise Broken("a parcel was accepted that was not sealed for this hand-over")
            self._collector_use(slot, SlotEvent.RELEASE)
            del self.landing[index]
            self.end_collector(Event.CANCEL, tell=True)
            return
        self.landing[index] = landing._replace(source=None, phase=Phase.UNPACK)
        if self.mutation is Mutation.CONFIRM_BEFORE_UNPACKING:
            self.collector.landed(run.index)
            self._tell_giver("collected", run.index)
            self.collector_goes_on()

    def fail_read(self, index: int) -> None:
        """The transfer was reported as failed: it writes no more."""
        slot = self.landing.pop(index).slot
        self._collector_use(slot, SlotEvent.SETTLE)
        self._collector_use(slot, SlotEvent.RELEASE)
        self.end_collector(Event.CANCEL, tell=True)

    def unpack(self, index: int) -> None:
        if not self.held:
            raise Broken("a parcel was unpacked into blocks that had been given back")
        run, slot, _, _ = self.landing.pop(index)
        if self.collector.state is CollectorState.COMPLETED:
            raise Broken("a parcel was unpacked into a sequence that runs already")
        self.unpacked += tuple(range(run.first_position, run.first_position + run.num_positions))
        self._collector_use(slot, SlotEvent.RELEASE)
        if self.collector.ended:
            self._give_blocks_back()
            return
        if self.mutation is Mutation.CONFIRM_BEFORE_UNPACKING:
            return
        self.collector.landed(index)
        if self.mutation is not Mutation.FORGET_TO_CONFIRM:
            self._tell_giver("collected", index)
        self.collector_goes_on()

    def end_collector(self, event: Event, *, tell: bool = False) -> None:
        self.collector.end(event)
        if tell:
            self._tell_giver("failed")
        for slot in self.credited:
            self._collector_use(slot, SlotEvent.RELEASE)
        self.credited.clear()
        for index, landing in list(self.landing.items()):
            if landing.phase is not Phase.UNPACK:
                if self.mutation is Mutation.FREE_WHILE_LENT:
                    self._collector_use(landing.slot, SlotEvent.SETTLE, pretended=True)
                self._collector_use(landing.slot, SlotEvent.RELEASE)
                del self.landing[index]
        self._give_blocks_back()

    def _give_blocks_back(self) -> None:
        """When the last unpacking is over."""
        self.held = self.held and bool(self.landing)

    # Faults.

    def stick(self, index: int) -> None:
        self.landing[index] = self.landing[index]._replace(source=None, phase=Phase.STUCK)

    def overwritten(self, slot: int) -> None:
        """A slot of the giver's is taken, by this hand-over or by another, and filled anew."""
        if self._forget(slot) and not self.giver.ended:
            raise Broken("a slot was written to while its parcel was on its way")

    def _forget(self, slot: int | None) -> bool:
        """No parcel lies in this slot, or in any, any more. Returns whether one was to be read."""
        gone = {slot} if slot is not None else {*self._sources()} - {None}
        found = bool(gone & {*self._sources()})
        self.to_collector = [
            (*each[:2], None) if each[0] == "parcel" and each[2] in gone else each
            for each in self.to_collector
        ]
        for index, landing in self.landing.items():
            if landing.source in gone:
                self.landing[index] = landing._replace(source=None)
        return found

    def _sources(self) -> Iterator[int | None]:
        yield from (each[2] for each in self.to_collector if each[0] == "parcel")
        yield from (landing.source for landing in self.landing.values())

    def disconnect(self) -> None:
        self.unbroken = False
        self.to_giver.clear()
        self.to_collector.clear()

    def lose_giver(self) -> None:
        """Its process is gone, with its memory."""
        self.giver_life, self.unbroken = Life.DEAD, False
        self.giver.end(Event.PEER_LOST)
        self.packing = None
        self.sent.clear()
        self.to_giver.clear()
        self._forget(None)

    def lose_collector(self) -> None:
        self.collector_life, self.unbroken = Life.DEAD, False
        self.collector.end(Event.PEER_LOST)
        self.credited.clear()
        self.landing.clear()
        self.held = False
        self.to_collector.clear()

    def _tell_giver(self, *message: Any) -> None:
        if self.unbroken:
            self.to_giver.append(message)

    def _tell_collector(self, *message: Any) -> None:
        if self.unbroken:
            self.to_collector.append(message)

    def _giver_use(self, slot: int, event: SlotEvent | None) -> None:
        self.uses.append(SlotUse("giver", slot, event))

    def _collector_use(self, slot: int, event: SlotEvent, *, pretended: bool = False) -> None:
        self.uses.append(SlotUse("collector", slot, event, pretended))
