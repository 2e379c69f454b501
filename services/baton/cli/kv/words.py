"""Sizes, times and rates as `baton doctor kv` writes them."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    for unit, scale in (("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << scale:
            return f"{num_bytes / (1 << scale):.3g} {unit}"
    return f"{num_bytes} B"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def gigabytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
