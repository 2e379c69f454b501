"""One hand-over that moves: its two sides, the stream between them and the buffers it holds.

The two sides are production's own. Modelled is what surrounds them: an engine that computes, a
stream of two FIFO queues, and reads that end well, late or never. Two hand-overs touch each other
only through buffers, so this one knows its buffers by number and uses them (`BufferUse`);

whose they are is the business of `handover_rings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batonlm.core.handover.table import (
    BufferEvent,
    KvChunkRange,
    ReceiverSide,
    ReceiverState,
    SenderSide,
    SenderState,
)
from batonlm.core.handover.table import HandoverEvent as Event
from tests.core.handover_parts import (
    PER_KV_CHUNK,
    Broken,
    BufferUse,
    Landing,
    Life,
    Local,
    Mutation,
    Phase,
    check,
    of_side,
    thawed,
)


class Handover:
    """A Local that moves. Made, moved once and frozen again."""

    def __init__(self, local: Local, mutation: Mutation | None):
        self.mutation = mutation
        self.local = local
        self.sender = SenderSide(*thawed(local.sender))
        self.receiver = ReceiverSide(*thawed(local.receiver))
        self.to_sender, self.to_receiver = list(local.to_sender), list(local.to_receiver)
        self.unbroken, self.computed, self.packing = local.unbroken, local.computed, local.packing
        self.sent, self.credited = dict(local.sent), list(local.credited)
        self.landing = {each.run.index: each for each in local.landing}
        self.unpacked, self.cached, self.held = local.unpacked, local.cached, local.held
        self.sender_life, self.receiver_life = local.sender_life, local.receiver_life
        self.uses: list[BufferUse] = []

    def frozen(self) -> Local:
        """Checked, and without what makes no difference any more."""
        positions, state_positions = self.sender.num_positions, self.sender.state_positions
        now = Local(
            of_side(self.sender),
            of_side(self.receiver),
            tuple(self.to_sender),
            tuple(self.to_receiver),
            self.unbroken,
            self.computed,
            self.packing,
            tuple(self.sent.items()),
            tuple(self.credited),
            tuple(self.landing.values()),
            tuple(sorted(self.unpacked)),
            self.cached,
            self.held,
            self.sender_life,
            self.receiver_life,
        )
        check(now, self.sender.state, self.receiver.state)
        if self.sender.ended:
            side = SenderSide(
                positions,
                self.sender.state,
                is_prefix=self.sender.is_prefix,
                state_positions=state_positions,
            )
            over = of_side(side)
            now = now._replace(sender=over, to_sender=(), computed=positions)
        if self.receiver.ended:
            received = ReceiverSide(
                positions,
                PER_KV_CHUNK,
                self.receiver.state,
                is_prefix=self.receiver.is_prefix,
                state_positions=state_positions,
            )
            over = of_side(received)
            now = now._replace(receiver=over, to_receiver=())
            if not self.landing:
                all_in = self.receiver.state is ReceiverState.COMPLETED
                unpacked = tuple(range(self.receiver.end_position)) if all_in else ()
                now = now._replace(unpacked=unpacked, cached=0)
        # Whether a stream is whole matters to who still hears from it what was sent before its end.
        deaf_sender = self.sender.ended or (self.receiver.ended and not self.to_sender)
        deaf_receiver = self.receiver.ended or (self.sender.ended and not self.to_receiver)
        if deaf_sender and deaf_receiver:
            now = now._replace(unbroken=False)
        return now

    # The sender.

    def sender_hears(self) -> None:
        kind, *arguments = self.to_sender.pop(0)
        if self.sender.ended:
            return
        match kind:
            case "open":
                self.sender.opened(PER_KV_CHUNK)
            case "granted":
                self.sender.granted(*arguments)
            case "full":
                self.sender.refused()
            case "credit":
                self.sender.credited(1)
            case "collected":
                self.sender.collected(*arguments)
                if arguments[0] in self.sent:
                    self._sender_use(self.sent.pop(*arguments), BufferEvent.RELEASE)
            case "completed":
                self.sender.completed()
            case "failed":
                self.end_sender(Event.PEER_FAILED)
        self.sender_goes_on()

    def sender_goes_on(self) -> None:
        """What follows in the same turn of the loop."""
        if self.sender.state is SenderState.OPENED and self.computed >= 0:
            self.sender.announced(self.computed if self.sender.is_prefix else None)
            self._tell_receiver("announced")
        early = self.mutation is Mutation.FINISH_EARLY and self.computed > 0
        if self.sender.advanced(self.computed + early):
            self._tell_receiver("finished", self.sender.finished)
        if self.sender.wants_tokens and self.computed == self.sender.num_positions:
            self.sender.tokens()
            self._tell_receiver("tokens")

    def compute(self) -> None:
        self.computed += 1
        self.sender_goes_on()

    def pin(self, num_positions: int) -> None:
        """So much of a prefix is in the cache; what is evicted by now is left out."""
        if num_positions:
            self.computed = num_positions
            self.sender_goes_on()
        else:
            self.end_sender(Event.CANCEL, tell=True)

    def evict(self) -> None:
        """Though it is on offer."""
        self.computed -= 1

    def pack(self, buffer: int) -> None:
        run = self.sender.next_chunk()
        assert run is not None
        self._sender_use(buffer, BufferEvent.TAKE)
        self.packing = run, buffer

    def packed(self) -> None:
        assert self.packing is not None
        (run, buffer), self.packing = self.packing, None
        self._sender_use(buffer, None)
        if self.sender.ended:
            if self.mutation is not Mutation.FREE_WHILE_PACKING:
                self._sender_use(buffer, BufferEvent.RELEASE)
            return
        self.sender.sent(run.index)
        self.sent[run.index] = buffer
        self._tell_receiver("kv_chunk", run, buffer)
        if self.mutation is Mutation.FREE_WHEN_SENT:
            self._sender_use(self.sent.pop(run.index), BufferEvent.RELEASE)
        self.sender_goes_on()

    def end_sender(self, event: Event, *, tell: bool = False) -> None:
        self.sender.end(event)
        if tell:
            self._tell_receiver("failed")
        if self.mutation is Mutation.KEEP_BUFFERS_AT_THE_END:
            return
        for buffer in self.sent.values():
            self._sender_use(buffer, BufferEvent.RELEASE)
        self.sent.clear()
        if self.packing is not None and self.mutation is Mutation.FREE_WHILE_PACKING:
            self._sender_use(self.packing[1], BufferEvent.RELEASE)

    # The receiver.

    def receiver_hears(self) -> None:
        kind, *arguments = self.to_receiver.pop(0)
        if self.receiver.ended:
            return
        match kind:
            case "announced":
                self.receiver.announced(self.sender.num_positions)
            case "finished":
                self.receiver.advanced(*arguments)
            case "kv_chunk":
                self._arrive(*arguments)
            case "tokens":
                self.receiver.tokens()
            case "failed":
                self.end_receiver(Event.PEER_FAILED)
        self.receiver_goes_on()

    def receiver_goes_on(self) -> None:
        if self.receiver.all_in:
            self.receiver.completed()
            self._tell_sender("completed")

    def grant(self, from_position: int) -> None:
        self.cached, self.held = from_position, True
        self.receiver.granted(from_position)
        self._tell_sender("granted", from_position)

    def refuse(self) -> None:
        self.receiver.full()
        self._tell_sender("full")

    def credit(self, buffer: int) -> None:
        self._receiver_use(buffer, BufferEvent.TAKE)
        self.credited.append(buffer)
        self.receiver.credited()
        self._tell_sender("credit")

    def credit_without_buffer(self) -> None:
        self.receiver.credited()
        self._tell_sender("credit")

    def _arrive(self, run: KvChunkRange, source: int | None) -> None:
        self.receiver.arriving(run)
        if not self.credited:
            raise Broken("a KV chunk has no buffer to land in")
        buffer = self.credited.pop(0)
        self._receiver_use(buffer, BufferEvent.LEND)
        self.landing[run.index] = Landing(run, buffer, source, Phase.READ)

    def read(self, index: int) -> None:
        """The transfer is done, and the digest tells whether it read what was announced."""
        run, buffer, source, _ = landing = self.landing[index]
        self._receiver_use(buffer, BufferEvent.SETTLE)
        if source is None:
            if self.mutation is Mutation.ACCEPT_UNVERIFIED:
                raise Broken("a KV chunk was accepted that was not sealed for this hand-over")
            self._receiver_use(buffer, BufferEvent.RELEASE)
            del self.landing[index]
            self.end_receiver(Event.CANCEL, tell=True)
            return
        self.landing[index] = landing._replace(source=None, phase=Phase.UNPACK)
        if self.mutation is Mutation.CONFIRM_BEFORE_UNPACKING:
            self.receiver.landed(run.index)
            self._tell_sender("collected", run.index)
            self.receiver_goes_on()

    def fail_read(self, index: int) -> None:
        """The transfer was reported as failed: it writes no more."""
        buffer = self.landing.pop(index).buffer
        self._receiver_use(buffer, BufferEvent.SETTLE)
        self._receiver_use(buffer, BufferEvent.RELEASE)
        self.end_receiver(Event.CANCEL, tell=True)

    def may_unpack(self, landing: Landing) -> bool:
        """Of a prefix, whatever has been unpacked is of use at any end, so its KV chunks are
        unpacked in order; of an input any order will do."""
        if not self.receiver.is_prefix or self.mutation is Mutation.UNPACK_OUT_OF_ORDER:
            return True
        return landing.run.first_position == self.cached + len(self.unpacked)

    def unpack(self, index: int) -> None:
        if not self.held:
            raise Broken("a KV chunk was unpacked into blocks that had been given back")
        run, buffer, _, _ = self.landing.pop(index)
        if self.receiver.state is ReceiverState.COMPLETED:
            raise Broken("a KV chunk was unpacked into a sequence that runs already")
        self.unpacked += tuple(range(run.first_position, run.first_position + run.num_positions))
        self._receiver_use(buffer, BufferEvent.RELEASE)
        if self.receiver.ended:
            self._give_blocks_back()
            return
        if self.mutation is Mutation.CONFIRM_BEFORE_UNPACKING:
            return
        self.receiver.landed(index)
        if self.mutation is not Mutation.FORGET_TO_CONFIRM:
            self._tell_sender("collected", index)
        self.receiver_goes_on()

    def end_receiver(self, event: Event, *, tell: bool = False) -> None:
        self.receiver.end(event)
        if tell:
            self._tell_sender("failed")
        for buffer in self.credited:
            self._receiver_use(buffer, BufferEvent.RELEASE)
        self.credited.clear()
        for index, landing in list(self.landing.items()):
            if landing.phase is not Phase.UNPACK or not self.may_unpack(landing):
                if self.mutation is Mutation.FREE_WHILE_LENT:
                    self._receiver_use(landing.buffer, BufferEvent.SETTLE, pretended=True)
                self._receiver_use(landing.buffer, BufferEvent.RELEASE)
                del self.landing[index]
        self._give_blocks_back()

    def _give_blocks_back(self) -> None:
        """When the last unpacking is over."""
        self.held = self.held and bool(self.landing)

    # Faults.

    def stick(self, index: int) -> None:
        self.landing[index] = self.landing[index]._replace(source=None, phase=Phase.STUCK)

    def overwritten(self, buffer: int) -> None:
        """A buffer of the sender's is taken, by this hand-over or by another, and filled anew."""
        if self._forget(buffer) and not self.sender.ended:
            raise Broken("a buffer was written to while its KV chunk was on its way")

    def _forget(self, buffer: int | None) -> bool:
        """No KV chunk lies in this buffer, or in any, any more. Returns whether one was due."""
        gone = {buffer} if buffer is not None else {*self._sources()} - {None}
        found = bool(gone & {*self._sources()})
        self.to_receiver = [
            (*each[:2], None) if each[0] == "kv_chunk" and each[2] in gone else each
            for each in self.to_receiver
        ]
        for index, landing in self.landing.items():
            if landing.source in gone:
                self.landing[index] = landing._replace(source=None)
        return found

    def _sources(self) -> Iterator[int | None]:
        yield from (each[2] for each in self.to_receiver if each[0] == "kv_chunk")
        yield from (landing.source for landing in self.landing.values())

    def disconnect(self) -> None:
        self.unbroken = False
        self.to_sender.clear()
        self.to_receiver.clear()

    def lose_sender(self) -> None:
        """Its process is gone, with its memory."""
        self.sender_life, self.unbroken = Life.DEAD, False
        self.sender.end(Event.PEER_LOST)
        self.packing = None
        self.sent.clear()
        self.to_sender.clear()
        self._forget(None)

    def lose_receiver(self) -> None:
        self.receiver_life, self.unbroken = Life.DEAD, False
        self.receiver.end(Event.PEER_LOST)
        self.credited.clear()
        self.landing.clear()
        self.held = False
        self.to_receiver.clear()

    def _tell_sender(self, *message: Any) -> None:
        if self.unbroken:
            self.to_sender.append(message)

    def _tell_receiver(self, *message: Any) -> None:
        if self.unbroken:
            self.to_receiver.append(message)

    def _sender_use(self, buffer: int, event: BufferEvent | None) -> None:
        self.uses.append(BufferUse("sender", buffer, event))

    def _receiver_use(self, buffer: int, event: BufferEvent, *, pretended: bool = False) -> None:
        self.uses.append(BufferUse("receiver", buffer, event, pretended))
