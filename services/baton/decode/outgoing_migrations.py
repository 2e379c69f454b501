"""Stops running sequences and gives their KV to other decode workers.

The engine holds a sequence: what it launched for it still counts, nothing more is launched. Then
all its KV goes on offer at once, with its newest token, which has none yet. Whatever becomes of it,
the caller frees the sequence, with the scheduler's `cancel`: packing that is queued comes before
that, and later packing finds nothing to pack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.core.errors import Cancelled
from baton.core.request.attempt import SequenceKey
from baton.core.scheduler.decode import DecodeScheduler
from baton.core.scheduler.events import Held
from baton.engine.thread import EngineThread
from baton.transfer.peers import as_handover_failure
from baton.transfer.sender import KvSender
from baton.transfer.ticket import Names


class OutgoingMigrations:
    """Lives on the event loop. handover_timeout_s: for a whole hand-over."""

    def __init__(
        self,
        engine: EngineThread[DecodeScheduler],
        sender: KvSender,
        *,
        handover_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._handover_timeout_s = handover_timeout_s
        self._waiting: dict[SequenceKey, asyncio.Future[Held]] = {}

    @property
    def holdings(self) -> dict[str, int]:
        return self._sender.holdings

    @property
    def probing(self) -> bool:
        return self._sender.probing

    async def hold(self, key: SequenceKey) -> Held | None:
        """Stops a sequence; None when it cannot be held now, and goes on.

        A token that is still awaited may end the sequence: then this waits until it is cancelled.
        """
        waiting: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        try:
            if not await self._engine.call(lambda loop: loop.scheduler.hold(key)):
                return None
            return await waiting
        finally:
            del self._waiting[key]

    def held(self, event: Held) -> None:
        """The engine tells that a sequence has stopped."""
        waiting = self._waiting.get(event.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(event)

    async def give(
        self,
        held: Held,
        handover_id: bytes,
        receiver_instance_id: str,
        offered: Callable[[], None],
        about: Names,
    ) -> None:
        """Offers the KV, says so, and returns when it was collected.

        Raises HandoverFailed when it was not, and what `KvSender.offer` raises. Cancelled, it takes
        the offer back.
        """
        key = held.key

        async def pack(first_position: int, count: int, out: memoryview) -> None:
            await self._engine.call_to_end(
                lambda loop: loop.runner.pack(
                    loop.scheduler.held_extents(key), first_position, count, out
                )
            )

        offer = self._sender.offer(
            handover_id,
            receiver_instance_id=receiver_instance_id,
            num_positions=held.num_positions,
            pack=pack,
            deadline_s=self._handover_timeout_s,
            about=about,
        )
        try:
            offer.announce()
            offer.advance(held.num_positions)
            offer.tokens((held.newest,))
            offered()
            outcome = await offer.wait()
        finally:
            offer.fail(Cancelled("cancelled"))
        if outcome.error is not None:
            # Out of time or refused: the hand-over is, not the request.
            raise as_handover_failure(outcome.error)

    async def close(self) -> None:
        """Ends what is still on offer."""
        await self._sender.close()
