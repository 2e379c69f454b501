"""One offered hand-over as the worker that computes the KV sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from baton.core.errors import BatonError, Cancelled
from baton.core.handover.table import HandoverEvent, SenderSide, SenderState
from baton.core.request.attempt import ChoiceTokens
from baton.transfer.ending import TransferAborted
from baton.transfer.stats import HandoverStats, now
from baton.transfer.ticket import NO_NAMES, Names

Pack = Callable[[int, int, memoryview], Awaitable[None]]
"""pack(first_position, count, out): writes KV of these positions into `out` in the wire layout.

It is never cancelled; when it returns or raises, it touches `out` no more.
"""


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
