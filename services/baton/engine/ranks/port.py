"""What a ranked runner needs of the processes that compute; knows messages as bytes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol


class Ranks(Protocol):
    """Ranks 0 to size - 1, each a `rank.Rank` that answers what it is told, in order.

    Called by the engine thread only. Real: `ray_ranks.RayRanks`; double: `local.LocalRanks`.
    """

    @property
    def size(self) -> int: ...

    def ask(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        """Tells all ranks the same and yields (rank, answer) as they come.

        Raises Internal when a rank has died, or takes longer than any step can. Who stops asking
        half way has to close: the ranks are out of step.
        """

    def on_death(self, died: Callable[[], None]) -> None:
        """Has `died` called, on a thread of its own, when a rank ends before `close`."""

    def close(self) -> None:
        """Ends the ranks and frees what they hold. Idempotent."""
