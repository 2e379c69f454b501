"""The digest that says whether two workers serve the same weights; knows files, but not tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

_PIECE = 8 * 1024 * 1024


def model_digest(
    config: Path,
    weights: Sequence[Path],
    quantize: str = "none",
    read: Callable[[int], None] = lambda _: None,
) -> str:
    """BLAKE2b-128 in hex over names and contents of config.json and the weight files.

    quantize: what is done to the weights. Other than "none", it is appended in words: KV of such a
    worker fits no other, and two that differ should be able to say in what.
    read: told how many bytes each read took, for a progress bar. About 1 GB/s a core.
    """
    digest = blake2b(digest_size=16)
    for file in (config, *sorted(weights)):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                read(len(piece))
    return digest.hexdigest() + ("" if quantize == "none" else f"-{quantize}")
