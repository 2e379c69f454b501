"""How many bytes a model takes on its device, and the pool that fits beside it on this machine.

The same sum is made twice: `foresee` before a weight is read, from shapes alone, and `size_pool`
once the model is loaded and before its linear layers are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.block_pool import blocks_for
from batonlm.core.request.model import row_bytes
from batonlm.core.request.prompt_logprobs import SCORED_POSITIONS
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import Chunk, SampleRow, Scored, StepPlan
from batonlm.engine.attention.kernels import choose_kernel, flash_cpu
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.config import EngineConfig
from batonlm.engine.drafting import draft_config, refused
from batonlm.engine.heads.load import WINDOW
from batonlm.engine.kept import KeptLinear, kept_in, stacks_of
from batonlm.engine.kv.cache import DTYPES
from batonlm.engine.lean import Conv1D
from batonlm.engine.linear import are_known_experts
from batonlm.engine.loader import AttentionShape, Cutting, LoadedModel, attach, outline
from batonlm.engine.memory import (
    LAYER_COPIES,
    LOGIT_COPIES,
    NO_DRAFTS,
    DraftBytes,
    MemoryPlan,
    host_free_bytes,
    plan_memory,
    quantized_bytes,
    size,
)


def weights_bytes(network: nn.Module, device: torch.device, quantize: str) -> int:
    """Parameters and buffers, tied ones once, except that packing on a CPU unties linear layers;
    and weights that are kept as they are stored."""
    total = sum(kept.num_bytes for kept in kept_in(network))
    seen: set[tuple[int, bool]] = set()
    for module in network.modules():
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            matrix = _matrix(module, name, tensor) if device.type == "cpu" else None
            if (id(tensor), matrix is not None) in seen:
                continue
            seen.add((id(tensor), matrix is not None))
            packed = 0
            if matrix is not None:
                outputs, inputs = matrix.shape
                packed = (
                    tensor.numel() // matrix.numel() * quantized_bytes(outputs, inputs, quantize)
                )
            total += packed or tensor.numel() * tensor.element_size()
    return total


def _matrix(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """What `linear.swap` binds, [outputs, inputs], one for all experts; None for all else."""
    if isinstance(module, nn.Linear) and name == "weight":
        return tensor
    if isinstance(module, Conv1D) and name == "weight":
        return tensor.t()
    if tensor.dim() == 3 and are_known_experts(module):
        return tensor[0].t() if module.is_transposed else tensor[0]
    return None


def activation_bytes(config: EngineConfig, loaded: LoadedModel, shape: AttentionShape) -> int:
    """An upper estimate for the largest step: max_step_tokens tokens, max_batch rows of logits to
    sample from, and as many to score as there may be."""
    network, layout = loaded.network, shape.layout
    element = next(network.parameters()).element_size()
    text = network.config.get_text_config()  # type: ignore[union-attr,operator]
    query_heads = layout.num_kv_heads * shape.per_head
    attention = (query_heads + 2 * layout.num_kv_heads) * max(layout.key_size, shape.value_size)
    if shape.own is not None:
        # A position's key is that of all layers; one is computed at a time.
        attention = 3 * layout.key_size // len(shape.own.kinds)
    width = int(text.hidden_size) + _widest(network, text) + attention
    tokens = config.max_step_tokens * width * LAYER_COPIES * element
    if shape.own is not None:
        # Of a chunk's positions with the whole sequence's: a mask, or scores and their softmax.
        copies = 1 if network._supports_sdpa else 2 * shape.per_head
        copies *= bool(shape.own.parts)
        tokens += copies * config.max_step_tokens * loaded.description.max_model_len * element
        tokens += config.max_step_tokens * shape.own.scan_bytes(text)
    vocab = loaded.description.vocab_size
    sampled = config.max_batch * vocab * (element + 4 * LOGIT_COPIES)
    scored = min(SCORED_POSITIONS, config.max_step_tokens) * vocab * element
    return tokens + sampled + scored


def largest_step(config: EngineConfig, max_model_len: int, state_positions: int = 0) -> StepPlan:
    """A step of max_step_tokens tokens that samples for as many sequences as it can, and scores
    about as many tokens as it may. state_positions: see `KvLayout`."""
    params = SamplingParams(temperature=0.0)
    count = min(config.max_batch, config.max_step_tokens)
    count = max(count, -(-config.max_step_tokens // max_model_len))
    length = config.max_step_tokens // count
    blocks = sum(blocks_for(count, config.block_size) for count in (state_positions, length))
    tokens = [0] * length
    scored = Scored(tokens[1:], 1)
    return StepPlan(
        0,
        tuple(
            Chunk(
                i,
                tokens,
                0,
                ((i * blocks, blocks),),
                (SampleRow(i, 0, 0, params),),
                scored if i * length < SCORED_POSITIONS else None,
            )
            for i in range(count)
        ),
    )


def _widest(network: nn.Module, text: object) -> int:
    """Most elements per token that one product of a layer makes."""
    head = set(network.get_output_embeddings().modules())  # type: ignore[operator]
    widths = [0]
    for module in network.modules():
        if isinstance(module, (nn.Linear, KeptLinear)) and module not in head:
            widths.append(module.out_features)
        elif isinstance(module, Conv1D):
            widths.append(int(module.nf))
    chosen = int(getattr(text, "num_experts_per_tok", None) or 1)
    stacks = (stack for module in network.modules() for stack in stacks_of(module).values())
    shapes = (*(weight.shape for weight in network.parameters()), *(each.shape for each in stacks))
    widths += [chosen * max(shape[1:]) for shape in shapes if len(shape) == 3]
    return max(widths)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ForeseenModel:
    """What a model would take, found without its weights."""

    model: LoadedModel
    shape: AttentionShape
    memory: MemoryPlan


def foresee(
    config: EngineConfig,
    free: int | None = None,
    *,
    total: int | None = None,
    cut: Cutting | None = None,
) -> ForeseenModel:
    """Plans a worker's memory, or a rank's, from the model's config.json.

    free: bytes; None reads them, and total, here. total: see `size_pool`. cut: of a rank, see
    `shards.cutting`. Raises what loading would raise: UnsupportedModel, and InvalidArgument when it
    does not fit or does not split.
    """
    model = outline(config, cut)
    shape = attach(model, config.kv_wire_dtype, config.kv_cache_dtype)
    if free is None:
        free, total = free_bytes(model.device), total_bytes(model.device)
    return ForeseenModel(model, shape, size_pool(config, model, shape, free=free, total=total))


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on a device. Raises InvalidArgument when there is no such one."""
    if device.type == "cpu":
        return host_free_bytes()
    return _gpu_memory(device)[0]


def total_bytes(device: torch.device) -> int | None:
    """A GPU's memory; None for the host's, of which others take what they like. Raises
    InvalidArgument like `free_bytes`."""
    return None if device.type == "cpu" else _gpu_memory(device)[1]


def _gpu_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes."""
    if not torch.cuda.is_available():
        raise InvalidArgument("there is no GPU here that torch can use", field="device")
    return torch.cuda.mem_get_info(device)


def size_pool(
    config: EngineConfig,
    model: LoadedModel,
    shape: AttentionShape,
    *,
    free: int,
    total: int | None = None,
    peak: Callable[[], int] | None = None,
) -> MemoryPlan:
    """The plan for a wired model whose linear layers are not packed yet.

    free: `free_bytes` before loading. total: `total_bytes`, None where the share is of what is
    free. peak: of a loaded model, runs the largest step and returns
    the bytes that it took at most. It counts on a GPU, whose libraries take memory that no shape
    tells of; a CPU's weights may still be file cache, so there the sum from shapes counts.
    """
    weights = weights_bytes(model.network, model.device, model.quantize)
    weights += _head_bytes(config, model, shape)
    activations = activation_bytes(config, model, shape)
    draft = draft_bytes(config)
    if peak is not None and model.device.type != "cpu":
        activations = max(activations, peak())
        torch.cuda.empty_cache()
        weights = max(weights, free - free_bytes(model.device))
    return plan_memory(
        config,
        device=model.device.type,
        model_len=model.description.max_model_len,
        free_bytes=free,
        total_bytes=total,
        weights=weights,
        activations=activations,
        position=_position_bytes(config, model, shape),
        state_positions=shape.layout.state_positions,
        draft=draft,
    )


def draft_bytes(config: EngineConfig) -> DraftBytes:
    """What a configured draft model takes, found without its weights. Raises InvalidArgument,
    naming draft_model, for one that cannot draft."""
    if not config.draft_model:
        return NO_DRAFTS
    try:
        config = draft_config(config)
        model = outline(config)
        shape = attach(model)
        if shape.own is not None:
            raise UnsupportedModel(f"{model.own_because}: its KV has to be in blocks")
        return DraftBytes(
            weights_bytes(model.network, model.device, model.quantize),
            activation_bytes(config, model, shape),
            _position_bytes(config, model, shape),
        )
    except InvalidArgument as error:
        raise refused(error) from error


def _head_bytes(config: EngineConfig, model: LoadedModel, shape: AttentionShape) -> int:
    """Of the model's own head, where it is loaded: its layer, and the KV of that."""
    if model.head is None:
        return 0
    positions = config.max_batch * WINDOW
    layer = _position_bytes(config, model, shape) // shape.layout.num_layers
    return weights_bytes(model.head.layers, model.device, "none") + positions * layer


def _position_bytes(config: EngineConfig, model: LoadedModel, shape: AttentionShape) -> int:
    """Of a position in the pool, where values may be padded to the size of keys, see `KvCache`; on
    the wire they never are. Latents have none."""
    layout = shape.layout
    if shape.own is not None:
        return layout.key_size * DTYPES[shape.kept].itemsize
    sizes = layout.key_size, layout.value_size
    kernel = choose_kernel(config.attention, model.device, *sizes, softcap=shape.softcap)
    even = kernel is flash_cpu and config.attention != "triton"
    stored = max(sizes) if even and layout.value_size else layout.value_size
    heads = layout.num_layers * layout.num_kv_heads
    return heads * (row_bytes(shape.kept, layout.key_size) + row_bytes(shape.kept, stored))


def allocate(plan: MemoryPlan, make: Callable[[], T]) -> T:
    """What `make` makes. Raises InvalidArgument, with the numbers, where memory is refused."""
    try:
        return make()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise InvalidArgument(
            f"{size(plan.kv_bytes)} of KV could not be allocated on {plan.device}, where "
            f"{size(plan.free_bytes)} were free before {size(plan.weights_bytes)} of weights",
            field="kv_memory_bytes",
        ) from None
