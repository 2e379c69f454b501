"""What the operator chooses about the engine, and how its process uses threads and memory.

Nothing here imports torch: OpenMP reads its environment once, when its library is loaded, so a
process calls `configure_threads` before anything imports torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.request.model import KV_DTYPES

TILE = 16
"""Positions that attention handles together; a block holds whole tiles."""

MIB = 1024 * 1024

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "attention": ("auto", "reference", "cpu", "triton"),
    "decoder": ("auto", "transformers"),
    "quantize": ("none", "int8", "int4", "fp8"),
    "kv_cache_dtype": ("auto", "int8", "fp8"),
    "kv_wire_dtype": ("auto", *KV_DTYPES),
}
"""The values of fields that name something."""

_AT_LEAST_0 = (
    "num_blocks",
    "max_model_len",
    "threads",
    "kv_memory_bytes",
    "swap_host_bytes",
    "swap_disk_bytes",
    "prefix_host_bytes",
    "adapter_memory_bytes",
    "adapter_host_bytes",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Validated when made: a wrong value raises InvalidArgument that names the field."""

    model: str
    """A folder, or a hub id."""
    model_name: str = ""
    """The name that the model is served under; "" is the folder's."""
    dtype: str = "auto"
    """auto is float32 on a CPU, because exactness outranks speed, and the checkpoint's on a GPU."""
    device: str = "auto"
    block_size: int = 16
    """Positions in a block."""
    num_blocks: int = 0
    """0 takes as many as fit `kv_memory_bytes`."""
    kv_memory_bytes: int = 512 * MIB
    """0 is what weights and activations leave of `memory_share`."""
    memory_share: float = 0.8
    """Of the memory that is free at start; on a GPU of all its memory, so that workers that share
    one get equal parts whichever starts first, and the same ones after a restart."""
    max_model_len: int = 0
    """Positions; 0 is the model's, or as many as the pool holds."""
    exact: bool | None = None
    """Whether a row's logits do not depend on what else is in the batch; None is yes on a CPU,
    where it costs little, and no on a GPU."""
    attention: str = "auto"
    decoder: str = "auto"
    """auto is the fused decoder for models that it covers; transformers is their own code."""
    threads: int = 0
    """Of torch; 0 is its default."""
    max_batch: int = 64
    """How many sequences are expected at once; bounds the pool when it is sized by memory."""
    max_step_tokens: int = 512
    """Most tokens of a step; memory is kept free for their activations."""
    tokenizer_digest: str = ""
    """Hex, passed on in the model's description."""
    quantize: str = "none"
    """Of the weights of linear layers: int8 and int4 on CPUs, fp8 (e4m3) on GPUs that multiply
    it."""
    swap_host_bytes: int = 0
    """Of host memory, for KV of preempted sequences."""
    swap_disk_bytes: int = 0
    """The same of a file."""
    swap_folder: str = ""
    """Where that file is made; "" is the system's folder for temporary files."""
    prefix_host_bytes: int = 0
    """Of host memory, for KV that is in the prefix cache no more; only left free here."""
    adapter_memory_bytes: int = 0
    """Of the device's memory, for adapters that are ready to compute; 0: none are loaded."""
    adapter_host_bytes: int = 0
    """Of host memory, for all adapters that are loaded, as they are stored; 0 is as much as
    adapter_memory_bytes."""
    heads: bool = False
    """Whether the model's own head is loaded, to draft tokens, see `heads`."""
    graphs: bool = True
    """Whether decode steps are recorded as CUDA graphs."""
    kv_cache_dtype: str = "auto"
    """Of KV in the pool: auto is the model's own, the others are core's SCALED."""
    kv_wire_dtype: str = "auto"
    """Of KV that is handed over, a name of core's KV_DTYPES; auto is the pool's."""
    draft_model: str = ""
    """A folder, or a hub id, of a small model that drafts tokens; "" is none."""

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidArgument("model must name a folder or a hub id", field="model")
        for name, allowed in CHOICES.items():
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
    def all_adapter_bytes(self) -> int:
        """Of host memory, for all adapters that are loaded."""
        return self.adapter_host_bytes or self.adapter_memory_bytes


_SPINS = "100000"
"""Of libgomp, some 250 microseconds: longer than from one parallel part to the next."""


_configured: int | None = None
"""The thread count that `configure_threads` has set in this process, or in the one that it is a
fork of."""


def configure_threads(threads: int = 0) -> None:
    """Sets the thread count (0: torch's default) and how threads wait, in this process's
    environment.

    How threads wait between two parallel parts decides much: a step has hundreds of them. Spinning
    threads are there at once, and a decode step of two threads took two thirds of the time; but
    spinning on cores that another engine computes on made that one up to five times slower. So
    threads spin for a moment only where the operator has set how many cores are theirs, and else
    sleep. Large arrays come in huge pages where the system gives them to those who ask: a step of
    prefill touches hundreds of megabytes of new memory, and was a tenth faster with fewer page
    faults.

    An OMP_NUM_THREADS that the operator has set is kept when threads is 0. Raises Internal when
    torch is already imported, because then nothing would change, unless that is set already.
    """
    global _configured
    if "torch" in sys.modules:
        if threads == _configured:
            return
        raise Internal("threads must be configured before torch is imported")
    _configured = threads
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if threads:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["MKL_NUM_THREADS"] = str(threads)
