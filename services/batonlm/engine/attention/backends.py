"""Which backend a device and a model get."""

from __future__ import annotations

import importlib.util
import os

import torch

from batonlm.core.errors import InvalidArgument
from batonlm.engine.attention.interface import Backend
from batonlm.engine.attention.kernels import by_position, choose_kernel, fewest_rows, flash_cpu
from batonlm.engine.attention.own import OwnBackend
from batonlm.engine.attention.tiled import TiledBackend
from batonlm.engine.config import EngineConfig
from batonlm.engine.kv.cache import DTYPES, KvCache
from batonlm.engine.loader import AttentionShape, LoadedModel


def open_backend(
    config: EngineConfig, loaded: LoadedModel, shape: AttentionShape, num_blocks: int
) -> Backend | OwnBackend:
    """The block pool's memory and the attention over it. Raises InvalidArgument, naming attention,
    for kernels that this machine cannot run."""
    if shape.own is not None:
        dtype = DTYPES[shape.kept]
        return OwnBackend(
            shape.own, shape.layout, num_blocks, config.block_size, loaded.device, dtype
        )
    if runs_triton(config.attention, loaded.device):
        # Importing Triton's kernels takes Triton, which machines without a GPU need not have.
        from batonlm.engine.attention.triton.backend import TritonBackend

        return TritonBackend(
            shape,
            num_blocks,
            config.block_size,
            loaded.device,
            max_model_len=loaded.description.max_model_len,
            max_batch=config.max_batch,
            exact=bool(config.exact),
        )
    layout, device = shape.layout, loaded.device
    sizes = layout.key_size, layout.value_size
    kernel = choose_kernel(config.attention, device, *sizes, softcap=shape.softcap)
    dtype = DTYPES[shape.dtype]
    cache = KvCache(
        layout,
        num_blocks,
        config.block_size,
        device,
        even=kernel is flash_cpu,
        dtype=DTYPES[shape.kept],
    )
    if kernel is flash_cpu and not layout.value_size:
        kernel = by_position(shape.per_head)
    lone_rows: int | None = shape.per_head
    if config.exact:
        heads, size = layout.num_kv_heads, layout.key_size
        lone_rows = fewest_rows(kernel, heads, shape.per_head, size, dtype, device)
    return TiledBackend(cache, kernel, exact=bool(config.exact), lone_rows=lone_rows, dtype=dtype)


def runs_triton(attention: str, device: torch.device) -> bool:
    """Whether a configured attention means Triton's kernels: by default on every GPU.

    Raises InvalidArgument when they are asked for, or needed, and cannot be had.
    """
    if attention not in ("auto", "triton") or (attention == "auto" and device.type != "cuda"):
        return False
    if importlib.util.find_spec("triton") is None:
        raise InvalidArgument("attention on this device takes Triton", field="attention")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgument("triton runs on a GPU", field="attention")
    return True
