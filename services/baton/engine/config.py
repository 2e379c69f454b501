"""What the operator chooses about the engine, and how its process uses threads and memory.

Nothing here imports torch: OpenMP reads its environment once, when its library is loaded, so a
process calls `configure_threads` before anything imports torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from baton.core.errors import Internal, InvalidArgument
from baton.core.request.model import DTYPE_BYTES

TILE = 16
"""Positions that attention handles together; a block holds whole tiles."""

MIB = 1024 * 1024

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "attention": ("auto", "reference", "cpu", "triton"),
    "quantize": ("none", "int8"),
    "kv_wire_dtype": ("auto", *DTYPE_BYTES),
}

_AT_LEAST_0 = (
    "num_blocks",
    "max_model_len",
    "threads",
    "kv_memory_bytes",
    "swap_host_bytes",
    "swap_disk_bytes",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Validated when made: a wrong value raises InvalidArgument that names the field.

    model: folder, or hub id. model_name: the name it is served under, else the folder's.
    dtype: auto is float32 on CPU, because exactness outranks speed, and the checkpoint's on a GPU.
    num_blocks: 0 takes as many as fit kv_memory_bytes, which at 0 is what weights and activations
    leave of memory_share of the memory that is free at start. max_model_len: positions, 0 is the
    model's, or as many as the pool holds.
    exact: a row's logits do not depend on what else is in the batch; None is yes on a CPU, where it
    costs little, and no on a GPU. threads: 0 is torch's default.
    max_batch: how many sequences are expected at once; bounds the pool when it is sized by memory.
    max_step_tokens: most tokens of a step; memory is kept free for their activations.
    tokenizer_digest: hex, passed on in the model's description. quantize: weights of linear layers.
    swap_host_bytes, swap_disk_bytes: for KV of preempted sequences; swap_folder: where the file for
    the latter is made, "" is the system's folder for temporary files. graphs: record CUDA graphs.
    kv_wire_dtype: of KV that is handed over, a name of core's DTYPE_BYTES; auto is the KV's own.
    """

    model: str
    model_name: str = ""
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int = 0
    kv_memory_bytes: int = 512 * MIB
    memory_share: float = 0.8
    max_model_len: int = 0
    exact: bool | None = None
    attention: str = "auto"
    threads: int = 0
    max_batch: int = 64
    max_step_tokens: int = 512
    tokenizer_digest: str = ""
    quantize: str = "none"
    swap_host_bytes: int = 0
    swap_disk_bytes: int = 0
    swap_folder: str = ""
    graphs: bool = True
    kv_wire_dtype: str = "auto"

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidArgument("model must name a folder or a hub id", field="model")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}", field=name)
        if self.block_size <= 0 or self.block_size % TILE:
            raise InvalidArgument(
                f"block_size must be a multiple of {TILE} positions", field="block_size"
            )
        for name in _AT_LEAST_0:
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must be 0 or more", field=name)
        for name in ("max_batch", "max_step_tokens"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be more than 0", field=name)
        if not 0.0 < self.memory_share <= 1.0:
            raise InvalidArgument("memory_share must be above 0, at most 1", field="memory_share")

    @property
    def served_name(self) -> str:
        return self.model_name or Path(self.model).name

    def describe(self) -> dict[str, str]:
        """Every field as text, for the one print at start."""
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}


_SPINS = "100000"
"""Of libgomp, some 250 microseconds: longer than from one parallel part to the next."""


def configure_threads(threads: int = 0) -> None:
    """Sets the thread count (0: torch's default) and how threads wait, in this process's
    environment.

    An OMP_NUM_THREADS that the operator has set is kept when threads is 0. Raises Internal when
    torch is already imported, because then nothing would change.
    """
    if "torch" in sys.modules:
        raise Internal("threads must be configured before torch is imported")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if threads:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["MKL_NUM_THREADS"] = str(threads)
