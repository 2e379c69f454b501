"""What moving blocks to and from swap memory means for a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from baton.core.scheduler.plan import BlockSwap, StepPlan, StepResult

LOST = "its KV could not be read back from swap memory"


@dataclass(frozen=True, slots=True)
class Moved:
    """How many seconds it took, and the sequences that lack KV since."""

    seconds: float = 0.0
    lost: frozenset[int] = frozenset()

    def told_in(self, result: StepResult) -> StepResult:
        """The step's result with this in it: a sequence without its KV failed, whatever it drew."""
        if not self.seconds and not self.lost:
            return result
        kept = tuple(entry for entry in result.failed if entry[0] not in self.lost)
        return replace(
            result,
            tokens=tuple(t for t in result.tokens if t.sequence_id not in self.lost),
            failed=(*kept, *((sequence, LOST) for sequence in sorted(self.lost))),
            swap_s=self.seconds,
        )


def owners(plan: StepPlan, blocks: AbstractSet[int]) -> frozenset[int]:
    """Sequences of a plan whose tables name one of the blocks."""
    found: set[int] = set()
    for chunk in plan.chunks if blocks else ():
        if any(
            first <= block < first + count for first, count in chunk.extents for block in blocks
        ):
            found.add(chunk.sequence_id)
            found.update(row.sequence_id for row in chunk.samples)
    return frozenset(found)


def joined(swaps: Iterable[BlockSwap], border: int) -> Iterator[tuple[int, int, int]]:
    """Yields (block, place in swap memory, count) of runs that are consecutive in both, none of
    them across the border in swap memory."""
    block = stored = count = 0
    for swap in swaps:
        for next_block, next_stored in zip(swap.blocks, swap.stored, strict=True):
            follows = (next_block, next_stored) == (block + count, stored + count)
            if count and follows and next_stored != border:
                count += 1
                continue
            if count:
                yield block, stored, count
            block, stored, count = next_block, next_stored, 1
    if count:
        yield block, stored, count
