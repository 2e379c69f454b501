"""SwapMemory, where KV of preempted sequences waits.

Blocks move whole and raw, as the pool stores them: nobody but this runner reads them, so nothing is
permuted, and what a block holds behind its last written place (see `kv_cache`) comes back too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from baton.core.errors import InvalidArgument
from baton.core.scheduler.plan import BlockSwap, StepPlan
from baton.engine.moved import Moved, joined, owners
from baton.engine.swap_stores import FileStore, HostStore, Run, WholeBlocks, settle


class SwapMemory:
    """Blocks of swap memory count from 0: first those in host memory, then those in a file.

    host_bytes, disk_bytes: how much at most, in whole blocks; 0 is none. folder: where the file is
    made, "" is the system's folder for temporary files. Raises InvalidArgument, with the field, for
    what cannot be had.
    """

    def __init__(
        self, blocks: WholeBlocks, *, host_bytes: int = 0, disk_bytes: int = 0, folder: str = ""
    ):
        self._device = blocks.device
        num_host = _whole_blocks(host_bytes, blocks.block_bytes, "swap_host_bytes")
        num_disk = _whole_blocks(disk_bytes, blocks.block_bytes, "swap_disk_bytes")
        self.num_blocks = num_host, num_disk
        self._host = HostStore(blocks, num_host)
        self._disk = FileStore(blocks, num_disk, folder) if num_disk else None

    @torch.inference_mode()
    def move(self, plan: StepPlan) -> Moved:
        """Swaps a plan's blocks out, then in; to be called before the rest of the plan is done.

        A disk that fails costs the sequences of this plan whose blocks it does not give back.
        """
        if not plan.swap_out and not plan.swap_in:
            return Moved()
        # On a GPU this waits for the steps before, so that only the moving is timed.
        settle(self._device)
        began = time.perf_counter()
        for store, run in self._runs(plan.swap_out):
            store.put(run)
        missing = {b for store, run in self._runs(plan.swap_in) for b in store.get(run)}
        settle(self._device)
        return Moved(time.perf_counter() - began, owners(plan, missing))

    def close(self) -> None:
        """Gives memory and file back. Idempotent."""
        self._host.close()
        if self._disk is not None:
            self._disk.close()

    def _runs(self, swaps: Iterable[BlockSwap]) -> Iterator[tuple[HostStore | FileStore, Run]]:
        """Neighbours move together, as far as they are neighbours on both sides."""
        num_host = self.num_blocks[0]
        for block, stored, count in joined(swaps, num_host):
            if self._disk is not None and stored >= num_host:
                yield self._disk, Run(block, stored - num_host, count)
            else:
                yield self._host, Run(block, stored, count)


def _whole_blocks(num_bytes: int, block_bytes: int, field: str) -> int:
    if 0 < num_bytes < block_bytes:
        raise InvalidArgument(
            f"{num_bytes} bytes hold no block: one takes {block_bytes}", field=field
        )
    return num_bytes // block_bytes
