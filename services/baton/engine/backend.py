"""What a runner needs of one kind of device: KV memory, and attention over it.

There is one backend for CPUs, which is also the plain one for every device, and one of Triton
kernels for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from baton.core.kvcache.block_pool import BlockCopy, Extents
from baton.core.request.model import KvLayout
from baton.core.scheduler.plan import StepPlan
from baton.engine.attention import AttentionContext, PagedAttention
from baton.engine.inputs import build_inputs
from baton.engine.kv_cache import KvCache
from baton.engine.spans import spans
from baton.engine.swap_stores import WholeBlocks


class KvMemory(WholeBlocks, Protocol):
    """The block pool's memory. pack, unpack: see ModelRunner; the others leave their work to the
    device's current stream."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def copy(self, copy: BlockCopy) -> None: ...

    def pack(self, extents: Extents, first_position: int, count: int, out: memoryview) -> None: ...

    def unpack(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What the network is run with: int64 token_ids and positions [1, T]; sampled, int64 [S], the
    rows whose logits are wanted; and what its attention layers are given.

    Token ids that are still to be sampled stand as they are in the plan.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor
    context: AttentionContext


class DecodeBuffers(Protocol):
    """Inputs of one-token steps in memory that stays where it is. Row i is the i-th chunk's."""

    def fill(self, plan: StepPlan, rows: int) -> None:
        """Puts in a plan of one token a chunk, and padding up to `rows`, without waiting for a GPU.

        The device may still be at the step before: the change has its turn in the current stream.
        """

    def forward_pass(self, rows: int) -> ForwardPass:
        """The first `rows` rows, all of them sampled. The same memory in every call."""


class Backend(Protocol):
    """A runner has one, and calls it from its one thread."""

    @property
    def memory(self) -> KvMemory: ...

    def begin(self, plan: StepPlan) -> ForwardPass:
        """Prepares memory and inputs for a plan with chunks, without waiting for a GPU."""

    def decode_buffers(self, max_rows: int) -> DecodeBuffers | None:
        """For steps that are recorded and run again; None where nothing can be recorded."""

    def forget(self, extents: Extents) -> None:
        """Leaves nothing in these blocks that their next owner could see."""


class TiledBackend:
    """Head-major memory and attention tile by tile, with a plain kernel or the CPU's own."""

    def __init__(self, cache: KvCache, attention: PagedAttention):
        self._cache = cache
        self._attention = attention

    @property
    def memory(self) -> KvCache:
        return self._cache

    def begin(self, plan: StepPlan) -> ForwardPass:
        inputs = build_inputs(plan, self._cache.block_size, self._cache.device)
        context = self._attention.step(inputs)
        return ForwardPass(inputs.token_ids, inputs.positions, inputs.sampled, context)

    def decode_buffers(self, max_rows: int) -> None:
        return None

    def forget(self, extents: Extents) -> None:
        size = self._cache.block_size
        positions = size * sum(count for _, count in extents)
        for start, length in spans(extents, 0, positions, size):
            places = torch.arange(start, start + length, device=self._cache.device)
            self._cache.clear(places)
