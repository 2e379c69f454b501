"""Chooses the device of a worker, and by it and the model what the options leave open.

In: options as the operator gave them, where "auto" and 0 leave a choice open. Out: the same options
with every choice made, and the reasons in words for the log. `sizes` is a pure function of the
role, the device's memory and the weights' size; only `usable_gpus` and `settled` look at the
machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from batonlm.engine.gpus import (
    VISIBLE,
    Claim,
    Gpu,
    claim,
    find_driver,
    select,
    torch_has_cuda,
    visible,
)
from batonlm.engine.memory import size
from batonlm.worker.options import WorkerOptions

_GIB = 1 << 30

CPU_SHARE = 0.8
"""A fifth of the memory is left to the machine's other processes."""
GPU_SHARE = 0.9
"""A GPU is its workers' own. The rest is for what is allocated after the largest step was measured:
recorded graphs, workspaces of libraries, staging memory; and for what fragments."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a worker takes on, where its operator does not say."""

    step_tokens: int
    """Most prompt tokens of a step."""
    max_running: int
    """Sequences at once."""
    memory_share: float
    """See the option."""


OFFLINE = "offline"
"""The role of an engine that works for nobody who waits: it does what both roles do, and a step
takes as many prompt tokens as a prefill worker's."""

_ON_CPU = {
    "prefill": Sizes(512, 64, CPU_SHARE),
    "decode": Sizes(256, 64, CPU_SHARE),
    OFFLINE: Sizes(512, 64, CPU_SHARE),
}
"""512 prompt tokens occupy all cores, and one such step of an 8B model takes more than a second
already; a decode step has half, because running sequences wait for it."""

_STEP_TOKENS = ((8, 8192, 1024), (24, 4096, 1024), (None, 2048, 512))
"""(GiB of weights on the GPU at most, prompt tokens of a step on prefill, the same on decode).

Prefill: 2 048 tokens are enough to be bound by compute and not by reading the weights (an H100 does
about 300 operations in the time in which it reads a byte). More tokens spread a step's fixed cost,
about 30 ms of launches by the host for 32 layers that are not recorded; but whoever comes next
waits for the step. So a step is to take about 0.1 s: an 8B model in bfloat16 computes about 4 096
tokens in that time, smaller ones 8 192, and a quarter of a 70B model 2 048.

Decode: a step with prompt tokens is not a recorded one, so it takes these launches, too. About
1 000 tokens of an 8B model take as long, and delay running sequences no more than 100 would; of
larger models, 512 do."""

_BY_MEMORY = ((40, None, 256), (20, 4096, 128), (None, 2048, 64))
"""(GiB of the GPU at least, prompt tokens of a step at most, sequences at once).

Reading the weights is what a decode step takes time for, up to some 300 sequences on an H100 and
150 on an A100: until then more sequences are almost free, and KV should be what ends it. But
logits, recorded graphs and the largest step's activations grow with both numbers, and are to stay a
small share of the GPU."""


def sizes(role: str, memory_bytes: int | None, weights_bytes: int) -> Sizes:
    """What a worker of the role takes on. memory_bytes: of its GPU, None on a CPU. weights_bytes:
    of the model's part on that GPU; 0 when not known, which counts as large."""
    if memory_bytes is None:
        return _ON_CPU[role]
    most_tokens, running = next(
        (tokens, running)
        for least, tokens, running in _BY_MEMORY
        # The driver keeps some of what is sold as 40 GB.
        if least is None or memory_bytes >= 0.9 * least * _GIB
    )
    prefill, decode = next(
        (prefill, decode)
        for most, prefill, decode in _STEP_TOKENS
        if most is None or 0 < weights_bytes <= most * _GIB
    )
    tokens = decode if role == "decode" else prefill
    return Sizes(min(tokens, most_tokens or tokens), running, GPU_SHARE)


def usable_gpus(device: str) -> list[Gpu]:
    """The GPUs that a worker with this option may take one of; none: it computes on a CPU.

    Raises InvalidArgument, naming device, where auto does not leave that open.
    """
    if device == "cpu":
        return []
    driver = find_driver()
    there = visible(driver.gpus if driver else (), os.environ.get(VISIBLE))
    found = select(device, there)
    return found if device != "auto" or torch_has_cuda() else []


_CPU = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
_ARITHMETIC = ("sse", "avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
"""How the kernel's words for a CPU begin, where libraries choose their code by them."""


def processor(device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Names what a worker computes on: where two names are equal, so are the bits of what the same
    software computes there. device: cpu or cuda."""
    if gpus := usable_gpus(device):
        return ", ".join(sorted({gpu.name for gpu in gpus}))
    try:
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    words = (facts.get("flags") or facts.get("Features", "")).split()
    able = sorted(word for word in words if word.startswith(_ARITHMETIC))
    return " ".join([platform.machine(), *(facts.get(key, "") for key in _CPU), *able])


def claim_for_ranks(device: str, ranks: int, ranks_here: int) -> Claim | None:
    """The GPUs of this machine's ranks, of a group of `ranks`; None where they compute on CPUs.
    Raises InvalidArgument, naming device, for GPUs that this machine does not have."""
    able = usable_gpus(device)
    return _claimed(able, ranks, ranks_here) if able else None


def _claimed(able: list[Gpu], ranks: int, ranks_here: int) -> Claim:
    """This process sees no other ones from now on."""
    # Slices cannot reach each other: NCCL adds up nothing between them.
    taken = claim([gpu for gpu in able if ranks == 1 or gpu.is_whole], ranks_here)
    os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in taken.gpus)
    return taken


@dataclass(frozen=True, slots=True)
class Settled:
    """A worker's options without open choices."""

    options: WorkerOptions
    """device is cpu or cuda."""
    why: str
    """For the log: what was chosen, and by what."""


@contextmanager
def settled(role: str, options: WorkerOptions) -> Iterator[Settled]:
    """Chooses, and holds the GPUs until the end of the block; see `gpus.claim`.

    To be entered before anything starts CUDA: the GPUs become the only ones that this process sees.
    Raises InvalidArgument, naming device, for a device that this machine does not have.
    """
    with ExitStack() as ends:
        gpus: list[Gpu] = []
        where = f"device=cpu ({options.device})"
        ranks = options.tensor_parallel * options.pipeline_parallel
        if able := usable_gpus(options.device):
            taken = _claimed(able, ranks, ranks // options.machines)
            ends.callback(taken.close)
            gpus = taken.gpus
            names = ", ".join(f"{gpu.name} {gpu.uuid} of {size(gpu.total_bytes)}" for gpu in gpus)
            shared = ", which another worker uses, too" if taken.sharing else ""
            where = f"device=cuda ({options.device}: {names}{shared})"
        weights = _weights_bytes(Path(options.model)) // ranks
        found = sizes(role, min((gpu.total_bytes for gpu in gpus), default=None), weights)
        chosen = {
            name: getattr(found, name)
            for name in Sizes.__dataclass_fields__
            if not getattr(options, name)
        }
        # Prompts are not recorded: a prefill worker would record decode steps that it never runs.
        graphs = options.graphs and role != "prefill"
        made = replace(options, device="cuda" if gpus else "cpu", graphs=graphs, **chosen)
        given = f"{size(weights)} of weights" if weights else "weights of unknown size"
        texts = [where, *(f"{name}={value}" for name, value in chosen.items())]
        yield Settled(made, f"{' '.join(texts)}; by role {role}, device and {given}")


def _weights_bytes(folder: Path) -> int:
    """Of all weight files in a folder; 0 for a hub id, which is not fetched yet."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
