"""Extents of blocks: their places in KV memory, and the checks of a plan that names them.

A place is block id * block size + offset in the block. A plan that fails the check is a fault of
the scheduler: refusing it before anything is computed keeps the fault from becoming wrong KV in
another sequence's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.scheduler.plan import PENDING, BlockSwap, ModelRunner, StepPlan, StepResult


def check_plan(plan: StepPlan, runner: ModelRunner) -> None:
    """Raises Internal for a plan that this runner cannot run.

    Beyond ranges it refuses two chunks, and two swaps of one kind, that write into the same block,
    because their order within a step is not defined.
    """
    num_blocks, block_size = runner.num_blocks, runner.block_size
    vocab_size, max_model_len = runner.model.vocab_size, runner.model.max_model_len
    state = runner.layout.state_blocks(block_size)
    stored = sum(runner.num_swap_blocks)
    _check_swaps(plan.swap_out, num_blocks, stored, "out")
    _check_swaps(plan.swap_in, num_blocks, stored, "in")
    written: set[int] = set()
    for chunk in plan.chunks:
        token_ids, first = chunk.token_ids, chunk.first_position
        if not token_ids:
            raise Internal(f"step {plan.step}: a chunk of sequence {chunk.sequence_id} is empty")
        end = first + len(token_ids)
        if first < 0 or end > max_model_len:
            raise Internal(
                f"step {plan.step}: positions {first} to {end} are outside the model's "
                f"{max_model_len}"
            )
        # Most chunks are one token, which may be still to come if something came before it.
        if len(token_ids) == 1:
            lowest = highest = 0 if first and token_ids[0] == PENDING else token_ids[0]
        else:
            lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= vocab_size:
            raise Internal(f"step {plan.step}: a token id is outside the vocabulary")
        if chunk.scored is not None:
            most = len(token_ids) - bool(chunk.samples)
            scored = chunk.scored.tokens
            if len(scored) > most or any(not 0 <= token < vocab_size for token in scored):
                raise Internal(f"step {plan.step}: a chunk cannot be scored as it asks")
            if not 0 <= chunk.scored.num_top <= vocab_size:
                raise Internal(f"step {plan.step}: a chunk asks for too many alternatives")
        if (drafts := chunk.num_drafts) and (
            not 0 < drafts < len(token_ids) or len(chunk.samples) != drafts + 1 or state
        ):
            # Positions are overwritten when their drafts were wrong; a state is not.
            raise Internal(f"step {plan.step}: a chunk cannot have {drafts} drafts")
        check_extents(chunk.extents, state * block_size + end, num_blocks, block_size)
        last = state + (end - 1) // block_size
        into = _written(chunk.extents, state + first // block_size, last)
        for blocks in chain(_written(chunk.extents, 0, state - 1), into) if state else into:
            before = len(written)
            written.update(blocks)
            if len(written) - before < len(blocks):
                raise Internal(f"step {plan.step}: two chunks write into the same block")
        behind = first
        for made in chunk.state_copies:
            if not state or not behind < made.position <= end:
                raise Internal(f"step {plan.step}: a state is copied out of order")
            behind = made.position
            check_extents(made.extents, state * block_size, num_blocks, block_size)
            for blocks in _written(made.extents, 0, state - 1):
                if written.intersection(blocks):
                    raise Internal(f"step {plan.step}: a state is copied onto what is written")
                written.update(blocks)
    for copy in plan.copies:
        inside = 0 <= copy.source < num_blocks and 0 <= copy.target < num_blocks
        if not inside or not 0 < copy.num_positions <= block_size:
            raise Internal(f"step {plan.step}: a block copy is out of range")


def check_extents(extents: Extents, end_position: int, num_blocks: int, block_size: int) -> None:
    """Raises Internal unless the extents lie in the pool and cover positions up to end_position."""
    covered = 0
    for first, count in extents:
        if count <= 0 or first < 0 or first + count > num_blocks:
            raise Internal("an extent is outside the block pool")
        covered += count * block_size
    if covered < end_position:
        raise Internal(f"extents cover {covered} positions of {end_position}")


def _check_swaps(swaps: tuple[BlockSwap, ...], num_blocks: int, num_stored: int, way: str) -> None:
    blocks = [block for swap in swaps for block in swap.blocks]
    stored = [place for swap in swaps for place in swap.stored]
    if any(len(swap.blocks) != len(swap.stored) for swap in swaps):
        raise Internal(f"a swap {way} names more blocks on one side")
    if any(not 0 <= block < num_blocks for block in blocks):
        raise Internal(f"a swap {way} is outside the block pool")
    if any(not 0 <= place < num_stored for place in stored):
        raise Internal(f"a swap {way} is outside swap memory")
    written = stored if way == "out" else blocks
    if len(set(written)) != len(written):
        raise Internal(f"a block is swapped {way} onto another one")


def _written(extents: Extents, first: int, last: int) -> Iterator[range]:
    """The blocks that hold the first-th to the last-th block of positions."""
    index = 0
    for start, count in extents:
        after = index + count
        if after > first:
            yield range(start + max(first - index, 0), start + min(last + 1 - index, count))
        if after > last:
            return
        index = after


def spans(
    extents: Extents, first_position: int, count: int, block_size: int
) -> Iterator[tuple[int, int]]:
    """Yields (first place, number of places), in position order, neighbours joined.

    The extents cover the range: see `check_extents`.
    """
    start, length = 0, 0
    position = 0
    end = first_position + count
    for block, blocks in extents:
        size = blocks * block_size
        low, high = max(first_position, position), min(end, position + size)
        if low < high:
            place = block * block_size + low - position
            if length and start + length == place:
                length += high - low
            else:
                if length:
                    yield start, length
                start, length = place, high - low
        position += size
        if position >= end:
            break
    if length:
        yield start, length


LOST = "its KV could not be read back from swap memory"


@dataclass(frozen=True, slots=True)
class Moved:
    """What moving blocks to and from swap memory means for a step."""

    seconds: float = 0.0
    """How long it took."""
    lost: frozenset[int] = frozenset()
    """The sequences whose KV did not come back."""

    def applied_to(self, result: StepResult) -> StepResult:
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
