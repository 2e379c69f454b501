"""Decides how many blocks a worker's pool gets, and reports where its memory goes.

The arithmetic is pure: the worker and `baton plan memory` both call it, so the plan is what the
worker does. Free host memory is the kernel's own estimate for the machine, or what the process's
control groups leave, whichever is less; in both, file cache counts as free, because the kernel
drops it when memory runs short. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.core.kvcache.block_pool import blocks_for
from batonlm.engine.config import MIB, EngineConfig

_LEAST_POSITIONS = 128
"""A pool that holds fewer is of no use, unless the model's longest sequence is even shorter."""

LAYER_COPIES = 4
"""How many tensors of a layer's width live at once while it is computed: residual, normed input,
two branches of a gated product or a rotation and its parts."""

LOGIT_COPIES = 6
"""float32 tensors of a row of logits that sampling makes: distances, counts of tokens (whose memory
doubles when it grows), and the softmax of rows that want log-probabilities, from copies."""

CHECKED_POSITIONS = 45, 22
"""Lengths of the prompts by which a model is checked at load, where it has that many positions. A
pool has to hold them side by side."""


INT4_GROUP = 32
"""Inputs that share a scale and an offset."""
# Outputs fewer than an eighth of the inputs: routers and gates, whose errors weigh most, are among
# these layers, and all of them together cost little.
_NARROW = 8
# Matrices of fewer columns or rows, or of other multiples, are not taken by a GPU's fp8 product,
# nor by a CPU's int4 product.
_MULTIPLE = 16


def quantized_bytes(outputs: int, inputs: int, quantize: str) -> int:
    """What a matrix takes: numbers, scales and offsets; 0 where it stays as it is. quantize: as
    `quantized.settle` returns it."""
    if quantize == "none" or outputs * _NARROW < inputs:
        return 0
    if quantize in ("fp8", "int4") and outputs % _MULTIPLE:
        return 0
    if inputs % {"fp8": _MULTIPLE, "int4": INT4_GROUP}.get(quantize, 1):
        return 0
    if quantize == "int4":
        return outputs * (inputs // 2 + 2 * 2 * (inputs // INT4_GROUP))
    return outputs * (inputs + {"int8": 8, "int8-weights": 2, "fp8": 4}[quantize])


@dataclass(frozen=True, slots=True)
class DraftBytes:
    """What a draft model takes, in bytes."""

    weights: int = 0
    activations: int = 0
    """Of its largest step, which never runs beside the large model's."""
    position: int = 0
    """KV of one position."""


NO_DRAFTS = DraftBytes()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where a worker's memory goes."""

    device: str
    free_bytes: int
    """On the device, before the weights were loaded."""
    usable_bytes: int
    """What the worker may take of these."""
    weights_bytes: int
    activation_bytes: int
    """Of the largest step, while it runs."""
    block_size: int
    block_bytes: int
    """KV of one block as stored."""
    num_blocks: int
    swap_host_blocks: int
    swap_disk_blocks: int
    model_len: int
    """Positions of the longest sequence that was asked for."""
    adapter_bytes: int = 0
    """For adapters; on a CPU also those that are not ready to compute."""
    prefix_host_bytes: int = 0
    """Of host memory, for KV that is in the prefix cache no more."""
    state_blocks: int = 0
    """Blocks that each sequence takes beside those of its positions, for its state."""
    draft_weights_bytes: int = 0
    draft_block_bytes: int = 0
    """KV of one block of the draft model, beside the model's own."""

    @property
    def num_positions(self) -> int:
        """Tokens whose KV fits into the pool."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def draft_bytes(self) -> int:
        """Weights and KV of the draft model."""
        return self.draft_weights_bytes + self.num_blocks * self.draft_block_bytes

    @property
    def max_model_len(self) -> int:
        """Positions of the longest sequence that is served."""
        left = self.num_blocks - self.state_blocks
        return min(self.model_len, max(0, left) * self.block_size)

    @property
    def sequences(self) -> int:
        """Sequences of max_model_len that fit at once."""
        return self.num_blocks // self.blocks_of(self.max_model_len)

    @property
    def sequence_bytes(self) -> int:
        """KV of one sequence of max_model_len, and its state."""
        return self.blocks_of(self.max_model_len) * self.block_bytes

    def blocks_of(self, length: int) -> int:
        """Of a sequence of so many positions."""
        return self.state_blocks + blocks_for(length, self.block_size)

    @property
    def beside(self) -> str:
        """What to say of a sequence's state behind what its positions take."""
        if not self.state_blocks:
            return ""
        return f", and a sequence's state {size(self.state_blocks * self.block_bytes)}"

    def needed_bytes(self, sequences: int) -> int:
        """For so many sequences of model_len at once, with all else."""
        blocks = sequences * self.blocks_of(self.model_len)
        others = self.weights_bytes + self.activation_bytes + self.adapter_bytes
        others += self.draft_weights_bytes
        return others + blocks * (self.block_bytes + self.draft_block_bytes)

    @property
    def swap_host_bytes(self) -> int:
        return self.swap_host_blocks * self.block_bytes

    @property
    def swap_disk_bytes(self) -> int:
        return self.swap_disk_blocks * self.block_bytes

    @property
    def taken_bytes(self) -> int:
        """Of the device's memory; what is swapped out of a GPU is in the host's."""
        in_host = self.swap_host_bytes + self.prefix_host_bytes if self.device == "cpu" else 0
        others = self.weights_bytes + self.activation_bytes + self.adapter_bytes
        return others + self.kv_bytes + self.draft_bytes + in_host

    @property
    def left_bytes(self) -> int:
        return self.free_bytes - self.taken_bytes

    def lines(self) -> list[tuple[str, str]]:
        """What an operator should know, as (name, text)."""
        several = "" if self.sequences == 1 else "s"
        longest = f"{self.sequences} sequence{several} of {self.max_model_len}"
        if self.max_model_len < self.model_len:
            longest += f" (the model's {self.model_len} do not fit)"
        state = self.state_blocks * self.block_bytes
        return [
            ("free", f"{size(self.free_bytes)} on {self.device} before loading"),
            ("weights", size(self.weights_bytes)),
            ("activations", f"{size(self.activation_bytes)} for the largest step"),
            *([("adapters", size(self.adapter_bytes))] if self.adapter_bytes else []),
            (
                "KV",
                f"{size(self.kv_bytes)} in {self.num_blocks} blocks of {self.block_size} positions"
                f" = {self.num_positions} tokens: {longest}",
            ),
            *([("state", f"{size(state)} of each sequence")] if state else []),
            *(
                [("draft model", f"{size(self.draft_bytes)} of weights, and KV in the same blocks")]
                if self.draft_bytes
                else []
            ),
            (
                "swap",
                f"{size(self.swap_host_bytes)} in host memory, "
                f"{size(self.swap_disk_bytes)} on disk",
            ),
            *(
                [("prefixes", f"{size(self.prefix_host_bytes)} in host memory beside the pool")]
                if self.prefix_host_bytes
                else []
            ),
            ("left", size(self.left_bytes)),
        ]


def plan_memory(
    config: EngineConfig,
    *,
    device: str,
    model_len: int,
    free_bytes: int,
    total_bytes: int | None = None,
    weights: int,
    activations: int,
    position: int,
    state_positions: int = 0,
    draft: DraftBytes = NO_DRAFTS,
) -> MemoryPlan:
    """Sizes the pool: as configured, or so that all fits into memory_share of what is free.

    device: "cpu" or "cuda". model_len: positions of the longest sequence, the configured or else
    the model's own. Bytes: free_bytes on the device, before the weights are loaded; total_bytes of
    the device, None where memory_share is of what is free; weights as the engine keeps them;
    activations of the largest step while it runs; position is KV of one position in the pool.
    state_positions: see `KvLayout`. draft: of the draft model, if there is one. The pool is never
    larger than max_batch sequences of model_len need, unless num_blocks says so.

    Raises InvalidArgument naming the field that has to change: what was asked for by num_blocks or
    kv_memory_bytes does not fit; memory_share leaves too little; max_model_len, when configured, is
    longer than the pool.
    """
    block_bytes = position * config.block_size
    plan = MemoryPlan(
        device=device,
        free_bytes=free_bytes,
        usable_bytes=min(free_bytes, int((total_bytes or free_bytes) * config.memory_share)),
        weights_bytes=weights,
        activation_bytes=max(activations, draft.activations),
        block_size=config.block_size,
        block_bytes=block_bytes,
        num_blocks=0,
        swap_host_blocks=config.swap_host_bytes // block_bytes,
        swap_disk_blocks=config.swap_disk_bytes // block_bytes,
        model_len=model_len,
        adapter_bytes=_adapter_bytes(config, device),
        prefix_host_bytes=config.prefix_host_bytes,
        state_blocks=blocks_for(state_positions, config.block_size),
        draft_weights_bytes=draft.weights,
        draft_block_bytes=draft.position * config.block_size,
    )
    field, blocks = _blocks(config, plan)
    plan = replace(plan, num_blocks=blocks)
    if field != "memory_share" and plan.left_bytes < 0:
        raise InvalidArgument(
            f"{_sum(plan)} are {size(plan.taken_bytes)}, and {size(plan.free_bytes)} are free",
            field=field,
        )
    if plan.max_model_len < min(model_len, _LEAST_POSITIONS):
        raise InvalidArgument(
            f"the pool would hold {plan.max_model_len} positions, which is too few: {_sum(plan)}, "
            f"of {size(plan.free_bytes)} free, {size(plan.usable_bytes)} may be used; "
            f"a position takes {size(position)}{plan.beside}",
            field=field,
        )
    each = checked_blocks(model_len, config.block_size, state_positions)
    least = each * len(CHECKED_POSITIONS)
    if plan.num_blocks < least:
        raise InvalidArgument(
            f"the pool would have {plan.num_blocks} blocks of {config.block_size} positions, which "
            f"is too few: the check of a model at load takes {least}",
            field=field,
        )
    if config.max_model_len and plan.max_model_len < model_len:
        needed = plan.blocks_of(model_len) * block_bytes
        raise InvalidArgument(
            f"a sequence of {model_len} positions takes {-(-needed // MIB)} MiB of KV, and the "
            f"pool has {plan.kv_bytes // MIB} MiB for {plan.max_model_len} positions{plan.beside}",
            field="max_model_len",
        )
    return plan


def checked_blocks(model_len: int, block_size: int, state_positions: int = 0) -> int:
    """Blocks of each prompt by which a model is checked at load, its state among them."""
    checked = blocks_for(min(max(CHECKED_POSITIONS), model_len), block_size)
    return blocks_for(state_positions, block_size) + checked


def size(count: int) -> str:
    """Bytes as a person reads them: 3 digits, binary units."""
    number, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} {unit}" if unit == "B" or abs(number) >= 100 else f"{number:.3g} {unit}"


def _adapter_bytes(config: EngineConfig, device: str) -> int:
    ready = config.adapter_memory_bytes
    return 0 if not ready else ready + (config.all_adapter_bytes if device == "cpu" else 0)


def _blocks(config: EngineConfig, plan: MemoryPlan) -> tuple[str, int]:
    """How many, and the field that decided it."""
    if config.num_blocks:
        return "num_blocks", config.num_blocks
    wanted = config.max_batch * plan.blocks_of(plan.model_len)
    each = plan.block_bytes + plan.draft_block_bytes
    if config.kv_memory_bytes:
        return "kv_memory_bytes", min(wanted, config.kv_memory_bytes // each)
    room = plan.usable_bytes - plan.taken_bytes
    return "memory_share", min(wanted, max(0, room // each))


def _sum(plan: MemoryPlan) -> str:
    """What adds up to taken_bytes."""
    parts = [
        f"weights {size(plan.weights_bytes)}",
        f"activations {size(plan.activation_bytes)}",
        f"KV {size(plan.kv_bytes)}",
    ]
    if plan.draft_bytes:
        parts.append(f"draft model {size(plan.draft_bytes)}")
    if plan.adapter_bytes:
        parts.append(f"adapters {size(plan.adapter_bytes)}")
    if plan.device == "cpu" and plan.swap_host_bytes:
        parts.append(f"swap memory {size(plan.swap_host_bytes)}")
    if plan.device == "cpu" and plan.prefix_host_bytes:
        parts.append(f"evicted prefixes {size(plan.prefix_host_bytes)}")
    return " + ".join(parts)


_GroupFiles = tuple[str, str, tuple[str, ...]]
"""A control group version's files of its limit and its usage, and memory.stat's counters of file
cache."""

_V1: _GroupFiles = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2: _GroupFiles = ("memory.max", "memory.current", ("inactive_file", "active_file"))


def host_free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated now. Raises Unavailable where the kernel has no figures."""
    try:
        found = [_available(proc / "meminfo")]
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError as error:
        raise Unavailable("this system does not tell how much memory is free") from error
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _left(cgroups, path, _V2)
        elif "memory" in controllers.split(","):
            found += _left(cgroups / "memory", path, _V1)
    return max(0, min(found))


def give_back_freed() -> None:
    """Returns freed memory that malloc keeps for later to the system; nothing where it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable")


def _left(mount: Path, path: str, files: _GroupFiles) -> Iterator[int]:
    """What each group with a limit leaves, from the process's own up to the mounted root.

    Inside a container the path may be the host's, and only the mounted root be there.
    """
    limit_file, used_file, cache = files
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            yield int(limit) - used + sum(int(stat.get(name, 0)) for name in cache)
