"""The backend of GPUs: block-major memory and Triton kernels; knows plans and tensors."""

from __future__ import annotations

import torch

from baton.core.kvcache.block_pool import Extents
from baton.core.scheduler.plan import StepPlan
from baton.engine.backend import ForwardPass
from baton.engine.block_cache import BlockCache
from baton.engine.decode_buffers import DecodeBuffers
from baton.engine.probe import AttentionShape
from baton.engine.step_builder import StepBuilder
from baton.engine.step_tensors import StepTensors
from baton.engine.triton_attention import TritonAttention
from baton.engine.wire import DTYPES


class TritonBackend:
    """A Backend. exact: see TritonAttention. max_batch: most sequences of a recorded step."""

    def __init__(
        self,
        shape: AttentionShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        max_model_len: int,
        max_batch: int,
        exact: bool,
    ):
        kept_as = DTYPES[shape.dtype]
        self.memory = BlockCache(shape.layout, num_blocks, block_size, device, dtype=kept_as)
        self._longest = -(-max_model_len // block_size)
        self._attention = TritonAttention(
            self.memory,
            per_head=shape.per_head,
            max_model_len=max_model_len,
            max_batch=max_batch,
            exact=exact,
        )
        self._builder = StepBuilder(block_size, self._attention.tile_positions, device)

    def begin(self, plan: StepPlan) -> ForwardPass:
        return _forward_pass(self._attention, self._builder.build(plan))

    def decode_buffers(self, max_rows: int) -> TritonBuffers:
        return TritonBuffers(self.memory, self._attention, max_rows, self._longest)

    def forget(self, extents: Extents) -> None:
        """Nothing to do: what was not written is never read."""


class TritonBuffers:
    """A backend's DecodeBuffers over the kernels' own."""

    def __init__(
        self, cache: BlockCache, attention: TritonAttention, max_rows: int, max_blocks: int
    ):
        self._attention = attention
        self._buffers = DecodeBuffers(
            cache.block_size, cache.trash_block, max_rows, max_blocks, cache.device
        )

    def fill(self, plan: StepPlan, rows: int) -> None:
        self._buffers.fill(plan, rows)

    def forward_pass(self, rows: int) -> ForwardPass:
        return _forward_pass(self._attention, self._buffers.tensors(rows))


def _forward_pass(attention: TritonAttention, tensors: StepTensors) -> ForwardPass:
    context = attention.step(tensors)
    return ForwardPass(tensors.token_ids, tensors.positions, tensors.sampled, context)
