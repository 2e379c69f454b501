"""Reads a model's facts from its config.json alone, as the engine would build it, without weights.

Needs torch, which computes shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from baton_loadtest.planner.curves import ModelFacts
from batonlm.core.request.model import KvLayout
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import ForeseenModel, foresee
from batonlm.engine.memory import MemoryPlan


@dataclass(frozen=True, slots=True)
class Read:
    """The facts of a model."""

    facts: ModelFacts
    layout: KvLayout
    """Its digest is empty."""
    memory: MemoryPlan
    """Memory of one worker."""


def read(config: EngineConfig, memory_bytes: int) -> Read:
    """memory_bytes: the device's. Raises what loading would raise: UnsupportedModel, and
    InvalidArgument if the model does not fit."""
    outlook = foresee(config, memory_bytes)
    return Read(facts_of(outlook), outlook.shape.layout, outlook.memory)


def facts_of(outlook: ForeseenModel) -> ModelFacts:
    network: Any = outlook.model.network
    layout, memory = outlook.shape.layout, outlook.memory
    text = network.config.get_text_config()
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    looked_up = {id(module.weight) for module in network.modules() if type(module) is nn.Embedding}
    seen = {id(head.weight), *looked_up}
    body = experts = 0
    num_experts = 1
    for parameter in network.parameters():
        if id(parameter) in seen:
            continue
        if parameter.dim() == 3:
            experts += parameter.numel()
            num_experts = parameter.shape[0]
        elif parameter.dim() == 2:
            body += parameter.numel()
    tied = head.weight is embedding.weight
    element = embedding.weight.element_size()
    window = getattr(text, "sliding_window", None) or 0
    return ModelFacts(
        name=outlook.model.description.name,
        dtype=outlook.shape.dtype,
        weights=memory.weights_bytes,
        element=element,
        body=body,
        head=head.weight.numel(),
        experts=experts,
        num_experts=num_experts,
        chosen=int(getattr(text, "num_experts_per_tok", None) or 1),
        layers=layout.num_layers,
        query_heads=layout.num_kv_heads * outlook.shape.per_head,
        head_sizes=layout.key_size + outlook.shape.value_size,
        sliding=outlook.shape.sliding_layers if window else 0,
        window=int(window),
        kv_position=memory.block_bytes // memory.block_size,
        wire_position=layout.bytes_per_position,
        max_model_len=outlook.model.description.max_model_len,
        unread=0 if tied else embedding.weight.numel() * element,
    )
