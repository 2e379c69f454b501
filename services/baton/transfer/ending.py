"""How a hand-over ends early: as one exception that carries the table's event."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from baton.core.errors import BatonError, DeadlineExceeded, Internal
from baton.core.handover.table import HandoverEvent, Limit, State
from baton.transfer.line import PeerLost
from baton.transfer.ticket import NO_NAMES, Names

_log = logging.getLogger(__name__)
_OVER = Limit("nobody", math.inf)


class TransferAborted(Exception):
    """Ends a stream's work. event: what to follow in the table. error: what to tell."""

    def __init__(self, event: HandoverEvent, error: BatonError) -> None:
        super().__init__(error.message)
        self.event, self.error = event, error

    @property
    def peer_knows(self) -> bool:
        return self.event in (HandoverEvent.PEER_FAILED, HandoverEvent.PEER_LOST)


def why(exception: BaseException, about: Names = NO_NAMES) -> TransferAborted:
    """The Ending for whatever stopped the work on a hand-over. about: for log lines."""
    match exception:
        case TransferAborted():
            return exception
        case PeerLost():
            return TransferAborted(HandoverEvent.PEER_LOST, exception)
        case BatonError():
            return TransferAborted(HandoverEvent.CANCEL, exception)
        case _:
            _log.error("a hand-over failed for a fault of our own", exc_info=exception, extra=about)
            return TransferAborted(HandoverEvent.CANCEL, Internal("the hand-over failed"))


class StateTimeout:
    """Watches that no state of a side lasts longer than its limit."""

    def __init__(self, limits: Mapping[State, Limit], state: Callable[[], State]) -> None:
        self._limits, self._state = limits, state
        self.moved()

    def moved(self) -> None:
        """The hand-over made progress: its state's time starts again."""
        self._since = asyncio.get_running_loop().time()

    async def watch(self) -> None:
        """Raises Ending(DEADLINE), up to a second late, when a state has outlasted its limit."""
        while True:
            limit = self._limits.get(self._state(), _OVER)
            left = self._since + limit.seconds - asyncio.get_running_loop().time()
            if left <= 0:
                error = DeadlineExceeded(f"the hand-over waited too long for {limit.owner}")
                raise TransferAborted(HandoverEvent.DEADLINE, error)
            await asyncio.sleep(min(left, 1.0))
