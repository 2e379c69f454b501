"""The backend of GPUs: block-major KV memory and Triton kernels.

Chunks that decode go to the decode kernel, drafts too: each of their positions is a query of its
own there. All others go to the prefill kernel.
"""

from __future__ import annotations

import torch
import triton

from batonlm.core.kvcache.block_pool import Extents, blocks_for
from batonlm.core.request.model import SCALED
from batonlm.core.scheduler.plan import StepPlan
from batonlm.engine.attention.interface import Fill, ForwardPass, LayerArguments
from batonlm.engine.attention.triton import shapes
from batonlm.engine.attention.triton.decode import PartStates, decode_attention
from batonlm.engine.attention.triton.prefill import prefill_attention
from batonlm.engine.attention.triton.steps import DecodeBuffers, StepBuilder, StepTensors
from batonlm.engine.kv.cache import DTYPES, BlockCache
from batonlm.engine.loader import AttentionShape

# The interpreter has no bound; it takes the shapes that an H200 does.
_INTERPRETED_SHARED_BYTES = 227 * 1024


class TritonBackend:
    """A Backend. A row's bits never depend on what else is in the batch.

    exact: nor on whether it was computed in a chunk or as a token of decode, for which chunks are
    computed in decode's small tiles, slower. max_batch: most rows of a recorded step, for which
    memory is held.
    """

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
        layout, per_head = shape.layout, shape.per_head
        self.memory = BlockCache(layout, num_blocks, block_size, device, dtype=DTYPES[shape.kept])
        bytes_each = DTYPES[shape.dtype].itemsize
        sizes = layout.key_size, shape.value_size, bytes_each, _shared_bytes(device)
        if shape.latent_size:
            # One KV head has too many of them for a tile.
            per_head = shapes.latent_heads(per_head, *sizes)
        self._groups = layout.num_kv_heads * shape.per_head // per_head
        self._per_head = per_head
        self._latent_size = shape.latent_size
        self._value_size = shape.value_size
        self._exact = exact
        self._longest = blocks_for(max_model_len, block_size)
        latent = shape.latent_size > 0
        self._decode_shape = shapes.decode_shape(per_head, *sizes, latent=latent)
        self._prefill_shape = self._decode_shape
        if not exact:
            scaled = shape.kept in SCALED
            self._prefill_shape = shapes.prefill_shape(
                per_head, *sizes, latent=latent, scaled=scaled
            )
        self._most_parts = shapes.most_parts(self._groups, max_model_len)
        self._held = self._parts(max_batch)
        tile_positions = self._prefill_shape.positions(per_head)
        self._builder = StepBuilder(block_size, tile_positions, device)

    def begin(self, plan: StepPlan) -> ForwardPass:
        return self._forward_pass(self._builder.build(plan))

    def decode_buffers(self, max_rows: int) -> Fill:
        memory = self.memory
        buffers = DecodeBuffers(
            memory.block_size, memory.trash_block, max_rows, self._longest, memory.device
        )
        return lambda plan, rows: self._forward_pass(buffers.fill(plan, rows))

    def forget(self, extents: Extents) -> None:
        """Nothing to do: what was not written is never read."""

    def _forward_pass(self, tensors: StepTensors) -> ForwardPass:
        # A CUDA graph is recorded and replayed over the same memory for parts.
        parts = None
        if tensors.lone:
            held = tensors.lone <= len(self._held.top)
            parts = self._held if held else self._parts(tensors.lone)
        context = TritonStep(self, tensors, parts)
        return ForwardPass(tensors.token_ids, tensors.positions, tensors.sampled, context)

    def attend(
        self,
        tensors: StepTensors,
        parts: PartStates | None,
        arguments: LayerArguments,
        query: torch.Tensor,
    ) -> torch.Tensor:
        """See `TritonStep`."""
        keys, values = self.memory.layer(arguments.layer)
        if arguments.latent:
            values = keys[..., : self._latent_size]
        output = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])
        given = query, keys, values, tensors, arguments
        if parts is not None:
            decode_attention(*given, self._decode_shape, parts, output)
        if len(tensors.tiles):
            most_parts = self._most_parts if self._exact else 0
            prefill_attention(
                *given, self._prefill_shape, output, per_head=self._per_head, parts=most_parts
            )
        return output

    def _parts(self, queries: int) -> PartStates:
        per_head, size = self._per_head, self._value_size
        device = self.memory.device
        return PartStates(queries, self._groups, self._most_parts, per_head, size, device)


class TritonStep:
    """An AttentionContext of one step, and its two halves."""

    def __init__(self, backend: TritonBackend, tensors: StepTensors, parts: PartStates | None):
        self._backend = backend
        self._tensors = tensors
        self._parts = parts

    @property
    def places(self) -> torch.Tensor:
        """int32 [T], where each row's KV goes."""
        return self._tensors.places

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, see `BlockCache.layer`."""
        return self._backend.memory.layer(layer)

    def attend(self, arguments: LayerArguments, query: torch.Tensor) -> torch.Tensor:
        """query [heads, T, D], its last dimension contiguous -> output [T, heads, Dv], once the
        step's KV of this layer is in its places."""
        return self._backend.attend(self._tensors, self._parts, arguments, query)

    def __call__(
        self,
        arguments: LayerArguments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        self._backend.memory.write(arguments.layer, self.places, _rows(key), _rows(value))
        return self.attend(arguments, _rows(query))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels read a row's elements one behind the other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
