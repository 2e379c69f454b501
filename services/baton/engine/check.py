"""Checks that a StepPlan fits a runner's memory; knows block ids and positions, but no tensors.

A plan that fails here is a fault of the scheduler. Refusing it before anything is computed keeps
the fault from becoming wrong KV in another sequence's blocks.
"""

from __future__ import annotations

from baton.core.errors import Internal
from baton.core.plan import Chunk, Extents, StepPlan


def check_plan(
    plan: StepPlan, *, num_blocks: int, block_size: int, vocab_size: int, max_model_len: int
) -> None:
    """Raises Internal for a plan that a runner of this size cannot run.

    Beyond ranges it refuses two chunks that write into the same block, because their order within a
    step is not defined.
    """
    written: set[int] = set()
    for chunk in plan.chunks:
        if not chunk.token_ids:
            raise Internal(f"step {plan.step}: a chunk of sequence {chunk.sequence_id} is empty")
        if chunk.first_position < 0 or chunk.end_position > max_model_len:
            raise Internal(
                f"step {plan.step}: positions {chunk.first_position} to {chunk.end_position} are "
                f"outside the model's {max_model_len}"
            )
        if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= vocab_size:
            raise Internal(f"step {plan.step}: a token id is outside the vocabulary")
        check_extents(chunk.extents, chunk.end_position, num_blocks, block_size)
        own = _written_blocks(chunk, block_size)
        if written & own:
            raise Internal(f"step {plan.step}: two chunks write into the same block")
        written |= own
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


def _written_blocks(chunk: Chunk, block_size: int) -> set[int]:
    first = chunk.first_position // block_size
    last = (chunk.end_position - 1) // block_size
    found: set[int] = set()
    index = 0
    for start, count in chunk.extents:
        low, high = max(first, index), min(last + 1, index + count)
        found.update(range(start + low - index, start + high - index))
        index += count
    return found
