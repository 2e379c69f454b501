"""A head's weights: made as transformers makes them, read as the network's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batonlm.core.errors import InvalidArgument
from batonlm.engine.checkpoint import Slice
from batonlm.engine.lean import transformers, without_compiler

FAMILIES = ("deepseek_v3", "glm4_moe", "mellum")
"""By transformers' model type: those with heads in their checkpoints that `MtpModel` computes, and
whose attention goes through `attention.interface`."""
WINDOW = 256
"""Positions that a head attends to, at most."""


@without_compiler()
def make_head(network: Any, settings: Any) -> Any:
    """A network's first head, whose layer has no weights yet; embedding and product into logits are
    the network's. Raises InvalidArgument naming `heads` for models without one."""
    text, name = settings.get_text_config(), settings.model_type
    if name not in FAMILIES:
        raise InvalidArgument(
            f"{name}: no heads of such models are computed, only of {', '.join(FAMILIES)}",
            field="heads",
        )
    if not getattr(text, "num_mtp_layers", None):
        raise InvalidArgument(
            f"{name}: its config.json names no heads (num_nextn_predict_layers)", field="heads"
        )
    from transformers.modeling_utils import local_torch_dtype

    with torch.device("meta"), local_torch_dtype(network.dtype):
        head: Any = transformers.modeling_layers.MtpModel(network, 1)
    return head.eval()


@without_compiler()
def read_head(
    network: Any, settings: Any, stored: Mapping[str, Slice], device: torch.device
) -> Any:
    """As `make_head`, with weights. stored: all weights of the model's files. Raises the same for
    files without those of the head."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    head = make_head(network, settings)
    # In files, a head is a layer behind the last one, or has a name of its own.
    prefixes = f"model.layers.{settings.get_text_config().num_hidden_layers}.", "mtp."
    own = {name: part for name, part in stored.items() if name.startswith(prefixes)}
    given = LoadStateDictConfig(
        weight_mapping=head.get_weight_conversions(network),
        device_map={"": device},
        dtype=network.dtype,
    )
    info, _ = convert_and_load_state_dict_in_model(model=head, state_dict=own, load_config=given)
    lacking = sorted(name for name in info.missing_keys if name.startswith("layers."))
    if lacking or info.mismatched_keys:
        raise InvalidArgument(
            f"{settings.model_type}: the files lack weights of its head, among them "
            f"{(lacking or sorted(info.mismatched_keys))[0]}",
            field="heads",
        )
    head.tie_with_main_model(network)
    return head
