"""How much KV memory each engine process of `baton up` may take; starts nothing, loads no torch.

The processes start together and one may start again later, when the others have taken theirs. So
the amount is fixed once, for all of them, from what is free before the first one starts: a worker
that comes back has the pool, and the longest sequence, that it had before.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from baton.core.errors import InvalidArgument
from baton.engine.config import MIB, EngineConfig
from baton.engine.memory import host_free_bytes, size

GPU = Path("/dev/nvidia0")
_FLOAT32_BYTES = 4
_SHARE = EngineConfig("any").memory_share


def memory_flags(folder: Path, engines: int) -> tuple[str, ...]:
    """Flags for each of so many engine processes that serve a model together.

    On a GPU, whose free memory only torch can read, that is an equal share. Raises InvalidArgument
    when their weights alone do not fit.
    """
    if GPU.exists():
        return ("--memory-share", f"{_SHARE / engines:.3f}")
    free = host_free_bytes()
    weights = _FLOAT32_BYTES * num_weights(folder)
    kv = int(free * _SHARE) // engines - weights
    if kv < MIB:
        raise InvalidArgument(
            f"{engines} engine processes take {size(engines * weights)} for weights in float32, "
            f"and {size(free)} are free",
            field="model",
        )
    return ("--kv-memory-mib", str(kv // MIB))


def num_weights(folder: Path) -> int:
    """Elements of all tensors in a folder's safetensors files, from their headers."""
    return sum(_elements(file) for file in folder.glob("*.safetensors"))


def _elements(file: Path) -> int:
    """A header is the length of a JSON object, 8 bytes little-endian, and the object."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, file.stat().st_size))
    try:
        tensors = json.loads(header)
        return sum(prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0  # not a sound file: the workers refuse it by name
