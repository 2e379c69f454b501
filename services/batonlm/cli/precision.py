"""In which numbers a model runs on this machine's CPUs, decided and said before a weight is read.

In: the shapes of a model's weights, the free memory, what the CPU multiplies quickly, and what the
user asks for. Out: a dtype and a quantization, how much memory is left for KV, and words. What the
worker takes exactly it finds itself, see `batonlm.engine.footprint`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.model import DTYPE_BYTES
from batonlm.engine.config import MIB
from batonlm.engine.memory import host_free_bytes, size
from batonlm.rpc.model_folder import read_json
from batonlm.worker.hardware import CPU_SHARE

LEAST_KV_BYTES = 16 * MIB
"""Of an engine process; with less a model does not start."""

LARGE_BYTES = 256 * MIB
"""Weights from which on reading them bounds the speed: smaller ones stay in caches for a part."""

INT8_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
"""Flags of CPUs that multiply int8."""

_COPIED_BYTES = 64 * MIB
_COPIES = 3
_ONE_ENGINE = " --prefill 0 --decode 1"
_META = "__metadata__"
_EMBEDDINGS = ("embed", "wte.", "wpe.")
"""In the names of tensors of which a step reads a few rows."""


_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.625}
"""Of a weight: with int4, 32 of them share a scale and an offset of two bytes each."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The numbers that a model's weights are kept in."""

    dtype: str
    quantize: str = "none"

    def __str__(self) -> str:
        return self.dtype if self.quantize == "none" else f"{self.quantize} and {self.dtype}"

    @property
    def flags(self) -> str:
        """What asks for it."""
        quantize = "" if self.quantize == "none" else f" --quantize {self.quantize}"
        return f"--dtype {self.dtype}{quantize}"


FLOAT32, BFLOAT16 = Precision("float32"), Precision("bfloat16")
INT8, SMALLEST = Precision("float32", "int8"), Precision("bfloat16", "int8")
INT4 = Precision("bfloat16", "int4")
"""Never taken by itself, because of what it costs an answer, but named where nothing else fits."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Numbers of a model's weights, which are the same in every precision."""

    matrices: int
    """In matrices that steps multiply by."""
    others: int
    """In embeddings and vectors."""
    is_packed: bool = False
    """Whether the files hold numbers that are quantized already."""
    kept_bytes: int = 0
    """Of matrices, beside those above, that stay as they are stored in every precision."""
    is_sparse: bool = False
    """Whether a step reads a part of the matrices only: those of the experts that are chosen."""

    @property
    def count(self) -> int:
        return self.matrices + self.others

    def num_bytes(self, precision: Precision) -> int:
        """What an engine process keeps of them."""
        return self.matrix_bytes(precision) + self.others * DTYPE_BYTES[precision.dtype]

    def matrix_bytes(self, precision: Precision) -> int:
        """What each step reads, but where a model is sparse."""
        each = _QUANTIZED_BYTES.get(precision.quantize, DTYPE_BYTES[precision.dtype])
        return int(self.matrices * each) + self.kept_bytes


def read_weights(folder: Path, draft_model: str = "") -> ModelWeights:
    """Reads the headers of a folder's safetensors files. A broken file counts as empty: the workers
    report it by name. draft_model: the folder of a small model that is kept beside it."""
    if draft_model:
        own, draft = read_weights(folder), read_weights(Path(draft_model))
        return replace(own, others=own.others + draft.count)
    config = read_json(folder / "config.json")
    text = config.get("text_config") or config
    found: dict[str, _Stored] = {}
    for file in folder.glob("*.safetensors"):
        found |= _tensors(file)
    packed = "quantization_config" in config
    sparse = any(".experts." in name for name in found)
    matrices = others = kept = 0
    for name, tensor in found.items():
        if _is_embedding(name) or not tensor.is_matrix:
            others += tensor.count
        elif packed and tensor.dtype in _CODES and not sparse:
            kept += tensor.count * _CODES[tensor.dtype][0]
        elif packed and tensor.dtype in _CODES:
            # A mixture's weights are dequantised.
            matrices += tensor.count * _CODES[tensor.dtype][1]
        else:
            matrices += tensor.count
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if tied and not any(name.endswith("lm_head.weight") for name in found):
        # The output layer is packed apart from the embedding that it shares its numbers with.
        sizes = (tensor.count for name, tensor in found.items() if _is_embedding(name))
        matrices += max(sizes, default=0)
    return ModelWeights(matrices, others, packed, kept, sparse)


def _is_embedding(name: str) -> bool:
    return any(part in name for part in _EMBEDDINGS)


_CODES = {"I32": (4, 8), "U8": (1, 2), "I8": (1, 1), "F8_E4M3": (1, 1)}
"""Of quantized tensors by type: the bytes of an element, and the most numbers in it."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file, by its header."""

    count: int
    """Of its elements."""
    is_matrix: bool
    dtype: str
    """As safetensors names it."""


def _tensors(file: Path) -> dict[str, _Stored]:
    """By name. A file's header is the length of a JSON object, 8 bytes little-endian, and the
    object."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, file.stat().st_size))
    try:
        found = [(n, t["shape"], t["dtype"]) for n, t in json.loads(header).items() if n != _META]
        return {n: _Stored(prod(shape), len(shape) > 1, dtype) for n, shape, dtype in found}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the CPU can do, in the kernel's words; empty where the kernel has none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())


def candidates(cpu: frozenset[str]) -> list[Precision]:
    """What can run on a CPU, best first: exact, then by speed."""
    quick_bfloat16 = not cpu.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
    found = [FLOAT32, *([BFLOAT16] if quick_bfloat16 else ())]
    if not cpu.isdisjoint(INT8_PRODUCTS):
        found += [INT8, SMALLEST]
    return found if quick_bfloat16 else [*found, BFLOAT16]


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A model whose engine processes share this machine's memory with those of others."""

    weights: ModelWeights
    engines: int
    """Processes that each keep the weights."""
    dtype: str = "auto"
    """The option; only auto leaves something open."""
    quantize: str = "none"
    """The same."""
    kv_bytes: int = 0
    """For KV of each process, where the user says it; 0: an equal share of what is left."""
    name: str = ""
    """For messages, where there are several models."""

    def needed(self, precision: Precision, engines: int = 0) -> int:
        """The bytes of all its processes, or of so many, with the least that KV may have."""
        each = self.weights.num_bytes(precision) + (self.kv_bytes or LEAST_KV_BYTES)
        return (engines or self.engines) * each

    def allowed(self, able: Sequence[Precision]) -> list[Precision]:
        """What may be taken, best first. able: what can run on the CPU."""
        if self.dtype != "auto":
            return [Precision(self.dtype, self.quantize)]
        if self.quantize != "none":
            return [Precision(dtype, self.quantize) for dtype in ("float32", "bfloat16")]
        return [one for one in able if one.quantize == "none" or not self.weights.is_packed]


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a model runs."""

    precision: Precision
    kv_bytes: int
    """What each of its engine processes has for KV."""
    words: str
    """One line for the user."""


def choose_here(models: Sequence[ModelShare], *, threads: int) -> list[Chosen]:
    """What `choose` takes for the models on this machine, as it is now."""
    return choose(models, host_free_bytes(), threads=threads, cpu=cpu_flags())


def choose(
    models: Sequence[ModelShare], free: int, *, threads: int, cpu: frozenset[str]
) -> list[Chosen]:
    """For each model the best precision of those that the user leaves open, so that all fit.

    Where they do not, the model whose next precision frees the most memory takes that one, until
    they do. free: bytes of host memory. threads: of a process. Raises InvalidArgument (`model`),
    with what would fit, when nothing does.
    """
    able, usable = candidates(cpu), int(free * CPU_SHARE)
    allowed = [model.allowed(able) for model in models]
    taken = [found[0] for found in allowed]
    while _needed(models, taken) > usable:
        steps = []
        for index, (model, now) in enumerate(zip(models, taken, strict=True)):
            for lower in allowed[index][allowed[index].index(now) :]:
                freed = model.needed(now) - model.needed(lower)
                if freed > 0:
                    steps.append((freed, index, lower))
                    break
        if not steps:
            raise _too_much(models, taken, able, free)
        _, index, lower = max(steps, key=lambda step: step[0])
        taken[index] = lower
    weights = [model.weights.num_bytes(one) for model, one in zip(models, taken, strict=True)]
    left = usable - sum(
        model.engines * (own + model.kv_bytes) for model, own in zip(models, weights, strict=True)
    )
    share = left // max(1, sum(model.engines for model in models if not model.kv_bytes))
    found = []
    for model, precision, options in zip(models, taken, allowed, strict=True):
        kv = model.kv_bytes or share
        words = _words(model.weights, precision, options, model.engines, kv, free, threads)
        found.append(Chosen(precision, kv, words))
    return found


def _needed(models: Sequence[ModelShare], precisions: Sequence[Precision], engines: int = 0) -> int:
    pairs = zip(models, precisions, strict=True)
    return sum(model.needed(precision, engines) for model, precision in pairs)


def _too_much(
    models: Sequence[ModelShare], least: Sequence[Precision], able: Sequence[Precision], free: int
) -> InvalidArgument:
    """Returns the error for models that do not fit in the least precisions that they may have."""
    usable = int(free * CPU_SHARE)
    packed = any(model.weights.is_packed for model in models)
    smaller = [one for one in able if one.quantize == "none"] if packed else [*able, INT4]
    fitting = []
    for fewer in (False, True) if any(model.engines > 1 for model in models) else (False,):
        for one in smaller:
            if _needed(models, [one] * len(models), int(fewer)) <= usable:
                weights = size(sum(model.weights.num_bytes(one) for model in models))
                fitting.append(f"{one.flags}{_ONE_ENGINE if fewer else ''} ({weights})")
    would = f"what fits: {' or '.join(fitting[:2])}" if fitting else "nothing smaller fits"
    takes = "; ".join(
        f"{model.name}: "
        * (len(models) > 1)
        + f"{model.engines} engine process{'es' * (model.engines > 1)} would each take "
        f"{size(model.weights.num_bytes(one))} for weights in {one} and "
        + (size(model.kv_bytes) if model.kv_bytes else f"{size(LEAST_KV_BYTES)} or more")
        + " for KV"
        for model, one in zip(models, least, strict=True)
    )
    return InvalidArgument(
        f"{takes}, and of {size(free)} free {size(usable)} may be used; {would}", field="model"
    )


def _words(
    weights: ModelWeights,
    precision: Precision,
    allowed: Sequence[Precision],
    engines: int,
    kv: int,
    free: int,
    threads: int,
) -> str:
    taken = weights.num_bytes(precision)
    processes = "an engine process" if engines == 1 else f"each of {engines} engine processes"
    text = (
        f"Weights in {precision}: {size(taken)} in {processes}, and up to {size(kv)} for KV, of "
        f"{size(free)} free"
    )
    if taken >= LARGE_BYTES and not weights.is_sparse:
        most = threads * copied_bytes_per_s() / weights.matrix_bytes(precision)
        text += f"; a stream gets at most about {most:.3g} tokens/s"
    if precision != allowed[0]:
        insist = f"{allowed[0].flags} insists"
        text += f" ({allowed[0]} would take {size(weights.num_bytes(allowed[0]))}; {insist})"
    elif taken >= LARGE_BYTES and len(allowed) > 1:
        text += f"; {allowed[1].flags} takes {size(weights.num_bytes(allowed[1]))}"
    return text


def copied_bytes_per_s() -> float:
    """The bytes that one thread reads and writes in a second, measured in some 50 ms: about what it
    reads where it only reads."""
    source, target = bytearray(_COPIED_BYTES), bytearray(_COPIED_BYTES)
    best = float("inf")
    for _ in range(_COPIES):
        began = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - began)
    return 2 * _COPIED_BYTES / best
