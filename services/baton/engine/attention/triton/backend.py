"""The backend of GPUs: block-major KV memory and Triton kernels.

Chunks of one token go to the decode kernel, all others to the prefill kernel.
"""

from __future__ import annotations

import torch
import triton

from baton.core.kvcache.block_pool import Extents
from baton.core.scheduler.plan import StepPlan
from baton.engine.attention.interface import ForwardPass, LayerArguments
from baton.engine.attention.triton import shapes
from baton.engine.attention.triton.decode import PartStates, decode_attention
from baton.engine.attention.triton.prefill import prefill_attention
from baton.engine.attention.triton.steps import DecodeBuffers, StepBuilder, StepTensors
from baton.engine.attention.triton.tiles import Chunks, Scores, Sequences
from baton.engine.kv.cache import DTYPES, BlockCache
from baton.engine.loader import AttentionShape

# The interpreter has no bound; it takes the shapes that an H200 does.
_INTERPRETED_SHARED_BYTES = 227 * 1024


class TritonAttention:
    """Runs the attention of steps over one BlockCache.

    A row's bits never depend on what else is in the batch. exact: nor on whether it was computed in
    a chunk or as a token of decode, for which chunks are computed in decode's small tiles, slower.
    max_batch: sequences of a decode step for which memory is held; more are possible outside CUDA
    graphs.
    """

    def __init__(
        self,
        cache: BlockCache,
        *,
        per_head: int,
        max_model_len: int,
        max_batch: int,
        exact: bool,
    ):
        """per_head: query heads per KV head."""
        layout = cache.layout
        sizes = layout.key_size, layout.value_size, cache.storage.element_size()
        shared = _shared_bytes(cache.device)
        self._cache = cache
        self._per_head = per_head
        self._exact = exact
        self._decode_shape = shapes.decode_shape(per_head, *sizes, shared)
        self._prefill_shape = shapes.prefill_shape(per_head, *sizes, shared)
        if exact:
            self._prefill_shape = self._decode_shape
        self._most_parts = shapes.most_parts(layout.num_kv_heads, max_model_len)
        self._held = self._parts(max_batch)

    @property
    def tile_positions(self) -> int:
        """Positions in a tile of the prefill kernel, as StepBuilder wants them."""
        return self._prefill_shape.positions(self._per_head)

    def step(self, tensors: StepTensors) -> TritonStep:
        """The context of one step. For CUDA graphs: record and replay over the same tensors."""
        return TritonStep(self, tensors, self._memory(tensors.lone))

    def attend(
        self,
        arguments: LayerArguments,
        step: TritonStep,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Stores the step's KV, then attends. Shapes as in AttentionContext."""
        query, key, value = _rows(query), _rows(key), _rows(value)
        self._cache.write(arguments.layer, step.places, key, value)
        keys, values = self._cache.layer(arguments.layer)
        scores = Scores(
            scale=arguments.scale,
            window=arguments.window or 0,
            softcap=arguments.softcap or 0.0,
            sinks=arguments.sinks,
        )
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        if step.parts is not None:
            decode_attention(
                query, keys, values, step.lone, scores, self._decode_shape, step.parts, output
            )
        if len(step.chunks.tiles):
            prefill_attention(
                query,
                keys,
                values,
                step.chunks,
                scores,
                self._prefill_shape,
                output,
                parts=self._most_parts if self._exact else 0,
            )
        return output

    def _memory(self, sequences: int) -> PartStates | None:
        if not sequences:
            return None
        return self._held if sequences <= len(self._held.top) else self._parts(sequences)

    def _parts(self, sequences: int) -> PartStates:
        layout = self._cache.layout
        return PartStates(
            sequences,
            layout.num_kv_heads,
            self._most_parts,
            self._per_head,
            layout.value_size,
            self._cache.device,
        )


class TritonStep:
    """The context object of one step."""

    def __init__(self, attention: TritonAttention, tensors: StepTensors, parts: PartStates | None):
        every = Sequences(tensors.first_rows, tensors.ends, tensors.table_starts, tensors.tables)
        self.places = tensors.places
        self.parts = parts
        self.lone = every.first(tensors.lone)
        self.chunks = Chunks(every, tensors.first_positions, tensors.tiles)
        self._attention = attention

    def attend(
        self,
        arguments: LayerArguments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        return self._attention.attend(arguments, self, query, key, value)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels read a row's elements one behind the other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


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
