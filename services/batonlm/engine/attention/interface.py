"""Paged attention behind transformers' AttentionInterface: what a runner needs of a kind of device.

A `Backend` is KV memory and the attention over it. The model passes our context through its layers
as the keyword argument `baton_context`; every attention layer ends up in `paged`, which calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batonlm.core.errors import Internal
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.scheduler.plan import StepPlan
from batonlm.engine.kv.cache import KvMemory
from batonlm.engine.latent import projection_of

# No mask function is registered under this name, so transformers builds no masks at all. The name
# avoids the substrings that transformers treats specially.
INTERFACE = "baton_paged"


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """What a model says about one attention layer beside its tensors."""

    layer: int
    scale: float
    """Of products of queries and keys."""
    window: int | None
    """Positions a query sees, itself among them; None for all before it."""
    softcap: float | None
    sinks: torch.Tensor | None
    """[heads], scores that take weight and give no value."""
    latent: bool = False
    """Whether a position's value is the start of its key, so that keys alone are kept."""

    @property
    def score_factor(self) -> float:
        """From products to scores in units of log 2; under a soft cap, to twice their share of
        it."""
        return self.scale * math.log2(math.e) * (2.0 / self.softcap if self.softcap else 1.0)


AttentionContext = Callable[
    [LayerArguments, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""(arguments, query [heads, T, D], key [kv_heads, T, D], value [kv_heads, T, Dv]) -> output [T,
heads, Dv].

It stores a layer's KV of the step, then attends. Of latents, value is a view of key. Rows behind
those of the step's chunks are padding: nothing is stored for them, and what comes out means
nothing.
"""


def paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    baton_context: AttentionContext | None = None,
    position_bias: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: [1, heads, T, D] in, [1, T, heads, Dv] out.

    Raises Internal for anything that would silently give other attention than the model's own; the
    loader turns that into a refusal.
    """
    if baton_context is None:
        raise Internal("the model does not pass keyword arguments on to attention")
    if attention_mask is not None or position_bias is not None:
        raise Internal("the model passes a mask or bias of its own to attention")
    if not getattr(module, "is_causal", True):
        raise Internal("the model's attention looks ahead")
    if query.shape[0] != 1:
        raise Internal("the model splits the flattened batch")
    arguments = LayerArguments(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap,
        sinks=s_aux,
        latent=(projection := projection_of(module)) is not None,
    )
    # Attention is exact by itself: catching its many small calls would only cost time.
    with torch._C.DisableTorchFunction():
        if projection is None:
            return baton_context(arguments, query[0], key[0], value[0])[None], None
        sums = baton_context(arguments, projection.queries(query[0]), key[0], value[0])
        return projection.outputs(sums)[None], None


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What the network is run with. T: the step's rows, one per token, chunk by chunk."""

    token_ids: torch.Tensor
    """int64 [1, T]. Token ids that are still to be sampled stand as they are in the plan."""
    positions: torch.Tensor
    """int64 [1, T]."""
    sampled: torch.Tensor
    """int64 [S], the rows whose logits are wanted, in order."""
    context: AttentionContext | None
    """What attention layers are given; None for the model's own attention."""


Fill = Callable[[StepPlan, int], ForwardPass]
"""(plan whose chunks all decode, rows) -> the inputs of so many rows, each time in the same memory.

The plan's tokens are rows in their order, what is behind them is padding, and every row is sampled.
The device may still be at the step before: the change has its turn in the current stream.
"""


class Backend(Protocol):
    """KV memory and attention over it. A runner has one, and calls it from its one thread."""

    @property
    def memory(self) -> KvMemory: ...

    def begin(self, plan: StepPlan) -> ForwardPass:
        """Prepares memory and inputs for a plan with chunks, without waiting for a GPU."""

    def decode_buffers(self, max_rows: int) -> Fill | None:
        """For steps that are recorded and run again; None where nothing can be recorded."""

    def forget(self, extents: Extents) -> None:
        """Leaves nothing in these blocks that their next owner could see."""
