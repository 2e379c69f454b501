"""Hand-overs in memory: the sender's and receiver's calls as services make them, without buffers.

What a hand-over may meet is here (either side dies or hangs, the room is full, time is over), how
its bytes travel is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from batonlm.core.errors import BatonError, Cancelled, HandoverFailed, Overloaded
from batonlm.core.handover.table import LIMITS, SenderState
from batonlm.core.request.attempt import ChoiceTokens
from batonlm.transfer.kv_chunk import Unpack
from batonlm.transfer.receiver import Collected, Reserve, TransferRequest, as_handover_failure
from batonlm.transfer.stream import NO_NAMES, Names
from tests.sim.hosts import Host
from tests.sim.network import Network

Pack = Callable[[int, int, memoryview], Awaitable[None]]

DOOR_S = 2.0
OFFERED_S = LIMITS[SenderState.OFFERED].seconds
SILENCE_S = 2.0
LOOK_S = 0.1
KV_CHUNK = 8
"""Positions."""
POSITION_BYTES = 16


@dataclass(frozen=True)
class Ended:
    """error: None when everything was collected."""

    error: BatonError | None


@dataclass
class PendingTransfer:
    """KV on offer. changed: set when anything of it is."""

    sender: Host
    boot: int
    num_positions: int
    pack: Pack
    on_granted: Callable[[], None] = lambda: None
    met: bool = False
    announced: bool = False
    computed: int = 0
    first: tuple[ChoiceTokens, ...] = ()
    outcome: Ended | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def given(self) -> bool:
        """Whether the process lives that gives it."""
        return self.sender.alive and self.sender.boots == self.boot

    def announce(self) -> None:
        self.announced = True
        self.changed.set()

    def advance(self, num_positions: int) -> None:
        self.computed = num_positions
        self.changed.set()

    def tokens(self, tokens: tuple[ChoiceTokens, ...]) -> None:
        self.first = tokens
        self.changed.set()

    def fail(self, error: BatonError) -> None:
        self.end(error)

    def end(self, error: BatonError | None) -> None:
        if self.outcome is None:
            self.outcome = Ended(error)
            self.changed.set()

    async def wait(self) -> Ended:
        while self.outcome is None:
            await self.next_change()
        return self.outcome

    async def next_change(self) -> None:
        # Several may wait: whoever is first makes the next event.
        if self.changed.is_set():
            self.changed = asyncio.Event()
        await self.changed.wait()


class KvNetwork:
    """All that is on offer, by hand-over id."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.offers: dict[bytes, PendingTransfer] = {}

    def open_offers(self) -> list[PendingTransfer]:
        """Those of processes that live."""
        return [offer for offer in self.offers.values() if offer.outcome is None and offer.given]


class SimSender:
    """In place of `batonlm.transfer.sender.KvSender`."""

    probing = False

    def __init__(self, host: Host, kv: KvNetwork) -> None:
        self._host, self._kv = host, kv
        self._offers: dict[bytes, PendingTransfer] = {}

    @property
    def holdings(self) -> dict[str, int]:
        return {"offers": sum(offer.outcome is None for offer in self._offers.values())}

    def offer(
        self,
        handover_id: bytes,
        *,
        receiver_instance_id: str,
        num_positions: int,
        pack: Pack,
        deadline_s: float,
        about: Names = NO_NAMES,
    ) -> PendingTransfer:
        """about: for log lines, of which there are none here."""
        offer = PendingTransfer(self._host, self._host.boots, num_positions, pack)
        self._kv.offers[handover_id] = self._offers[handover_id] = offer
        loop, late = asyncio.get_running_loop(), HandoverFailed("the hand-over took too long")
        loop.call_later(deadline_s, offer.end, late)
        loop.call_later(OFFERED_S, lambda: None if offer.met else offer.end(late))
        return offer

    async def close(self) -> None:
        for offer in self._offers.values():
            offer.end(Cancelled("the sender leaves"))


class SimReceiver:
    """In place of `batonlm.transfer.receiver.KvReceiver`."""

    probing = False

    def __init__(self, host: Host, kv: KvNetwork) -> None:
        self._host, self._kv = host, kv
        self._running = 0

    @property
    def holdings(self) -> dict[str, int]:
        return {"handovers": self._running}

    async def close(self) -> None:
        pass

    async def collect(self, ticket: TransferRequest, reserve: Reserve, unpack: Unpack) -> Collected:
        self._running += 1
        offer: PendingTransfer | None = None
        try:
            async with asyncio.timeout(ticket.deadline_s):
                offer = await self._find(ticket.handover_id)
                return await self._take(offer, reserve, unpack)
        except BatonError as error:
            if offer is not None:
                offer.end(error)
            raise
        finally:
            self._running -= 1
            if offer is not None:
                offer.end(Cancelled("the receiver left"))

    async def _find(self, handover_id: bytes) -> PendingTransfer:
        """Either side may come first."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DOOR_S
        while loop.time() < until:
            offer = self._kv.offers.get(handover_id)
            await self._pause(offer)
            if offer is not None:
                offer.met = True
                return await self._announced(offer)
            await asyncio.sleep(0.02)
        raise HandoverFailed("the sender does not know this hand-over")

    async def _announced(self, offer: PendingTransfer) -> PendingTransfer:
        while not offer.announced:
            await self._change(offer)
        return offer

    async def _take(self, offer: PendingTransfer, reserve: Reserve, unpack: Unpack) -> Collected:
        position = await reserve()
        if position is None:
            raise Overloaded("there is no room for this", retry_after_s=0.05)
        offer.on_granted()
        got = position
        while got < offer.num_positions or not offer.first:
            self._check(offer)
            count = min(KV_CHUNK, offer.computed - got)
            if count <= 0:
                await self._change(offer)
                continue
            kv_chunk = memoryview(bytearray(count * POSITION_BYTES))
            await self._packed(offer, got, count, kv_chunk)
            await self._pause(offer)
            self._check(offer)
            await asyncio.shield(unpack(got, count, kv_chunk))
            got += count
        offer.end(None)
        return Collected(offer.first, (got - position) * POSITION_BYTES, position)

    async def _packed(
        self, offer: PendingTransfer, first: int, count: int, out: memoryview
    ) -> None:
        """A sender that dies meanwhile never answers."""
        packing = asyncio.ensure_future(offer.pack(first, count, out))
        try:
            while not packing.done():
                await asyncio.wait([packing], timeout=LOOK_S)
                self._check(offer)
            await packing
        finally:
            packing.cancel()

    async def _change(self, offer: PendingTransfer) -> None:
        """Waits for news of an offer; a sender that died tells nothing."""
        try:
            async with asyncio.timeout(LOOK_S):
                await offer.next_change()
        except TimeoutError:
            await self._pause(offer)
        self._check(offer)

    async def _pause(self, offer: PendingTransfer | None) -> None:
        """A message's way. Two that do not hear of each other for long part."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SILENCE_S
        ends = [self._host] if offer is None else [self._host, offer.sender]
        await asyncio.sleep(self._kv.network.delay())
        while any(end.frozen or any(end.held) for end in ends):
            if loop.time() > until:
                raise HandoverFailed("the sender is silent")
            await asyncio.sleep(LOOK_S)

    def _check(self, offer: PendingTransfer) -> None:
        if not offer.given:
            raise HandoverFailed("the sender is gone")
        if offer.outcome is not None:
            error = offer.outcome.error or Cancelled("it was collected")
            raise error if isinstance(error, Cancelled) else as_handover_failure(error)
