"""Paged attention by our Triton kernels over a BlockCache: the AttentionContext of CUDA devices.

Knows which kernel takes which rows, and their memory. Chunks of one token go to the decode kernel,
all others to the prefill kernel.
"""

from __future__ import annotations

import torch
import triton

from baton.engine.attention import LayerArguments
from baton.engine.block_cache import BlockCache
from baton.engine.step_tensors import StepTensors
from baton.engine.triton import shapes
from baton.engine.triton.arguments import Chunks, Scores, Sequences
from baton.engine.triton.decode import decode_attention
from baton.engine.triton.merge import Parts
from baton.engine.triton.prefill import prefill_attention

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

    def _memory(self, sequences: int) -> Parts | None:
        if not sequences:
            return None
        return self._held if sequences <= len(self._held.top) else self._parts(sequences)

    def _parts(self, sequences: int) -> Parts:
        layout = self._cache.layout
        return Parts(
            sequences,
            layout.num_kv_heads,
            self._most_parts,
            self._per_head,
            layout.value_size,
            self._cache.device,
        )


class TritonStep:
    """The context object of one step."""

    def __init__(self, attention: TritonAttention, tensors: StepTensors, parts: Parts | None):
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
