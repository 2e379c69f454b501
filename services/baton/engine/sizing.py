"""Sizes a model's pool on this machine: reads what is free, and lets `plan_memory` decide.

Twice the same sum: `foresee` before a weight is read, `size_pool` once the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from baton.core.errors import InvalidArgument
from baton.engine.config import EngineConfig
from baton.engine.footprint import footprint
from baton.engine.free_memory import host_free_bytes
from baton.engine.loader import LoadedModel, outline
from baton.engine.memory import MemoryPlan, plan_memory, size
from baton.engine.probe import AttentionShape, probe_attention

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a model would take, found without its weights."""

    model: LoadedModel
    shape: AttentionShape
    memory: MemoryPlan


def foresee(config: EngineConfig, free: int | None = None) -> Outlook:
    """Plans a worker's memory from the model's config.json. free: bytes, None reads them here.

    Raises what loading would raise: UnsupportedModel, and InvalidArgument when it does not fit.
    """
    model = outline(config)
    shape = probe_attention(model, config.kv_wire_dtype)
    if free is None:
        free = free_bytes(model.device)
    return Outlook(model, shape, _plan(config, model, shape, free))


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on a device. Raises InvalidArgument when there is no such one."""
    if device.type == "cpu":
        return host_free_bytes()
    if not torch.cuda.is_available():
        raise InvalidArgument("there is no GPU here that torch can use", field="device")
    return torch.cuda.mem_get_info(device)[0]


def size_pool(
    config: EngineConfig,
    loaded: LoadedModel,
    shape: AttentionShape,
    *,
    free: int,
    peak: Callable[[], int],
) -> MemoryPlan:
    """The plan for a loaded, wired model whose linear layers are not packed yet.

    free: `free_bytes` before loading. peak: runs the largest step and returns the bytes that it
    took at most, on a GPU, whose libraries take memory that no shape tells of; a CPU's weights may
    still be file cache, so there the sum from shapes counts.
    """
    if loaded.device.type == "cpu":
        return _plan(config, loaded, shape, free)
    activations = peak()
    torch.cuda.empty_cache()
    taken = free - free_bytes(loaded.device)
    return _plan(config, loaded, shape, free, taken=taken, activations=activations)


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


def _plan(
    config: EngineConfig,
    model: LoadedModel,
    shape: AttentionShape,
    free: int,
    *,
    taken: int = 0,
    activations: int = 0,
) -> MemoryPlan:
    """taken, activations: what was measured, where it was; the larger number counts."""
    needs = footprint(config, model, shape)
    return plan_memory(
        config,
        replace(
            needs,
            weights=max(needs.weights, taken),
            activations=max(needs.activations, activations),
        ),
        device=model.device.type,
        model_len=model.description.max_model_len,
        free_bytes=free,
    )
