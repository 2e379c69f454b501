"""What data sheets say of GPUs, for rooflines.

A data sheet's figure is what the device cannot exceed, not what anything reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import InvalidArgument

GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. flops: dense, of bfloat16 with float32 sums, a second. bandwidth: bytes a second
    of its memory. link: bytes a second to its host one way, which no network card beside it can
    outdo; 0: not said.

    memory: bytes. A sheet's gigabytes count as 10**9, though some devices have 2**30: so a plan
    never promises memory that is not there.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float = 0.0


_PCIE_4, _PCIE_5 = 32 * GB, 64 * GB

KNOWN = (
    Gpu("B200", 180 * GB, 8000 * GB, 2250e12, _PCIE_5),
    Gpu("H200", 141 * GB, 4800 * GB, 989e12, _PCIE_5),
    Gpu("H100-SXM", 80 * GB, 3350 * GB, 989e12, _PCIE_5),
    Gpu("H100-PCIe", 80 * GB, 2000 * GB, 756e12, _PCIE_5),
    Gpu("A100-80GB", 80 * GB, 2039 * GB, 312e12, _PCIE_4),
    Gpu("A100-40GB", 40 * GB, 1555 * GB, 312e12, _PCIE_4),
    Gpu("A10", 24 * GB, 600 * GB, 125e12, _PCIE_4),
    Gpu("L40S", 48 * GB, 864 * GB, 362e12, _PCIE_4),
    Gpu("L4", 24 * GB, 300 * GB, 121e12, _PCIE_4),
    Gpu("MI300X", 192 * GB, 5300 * GB, 1307e12, _PCIE_5),
    Gpu("MI325X", 256 * GB, 6000 * GB, 1307e12, _PCIE_5),
)
"""The SXM or OAM form where the name does not say another."""


def known(name: str) -> Gpu:
    """Takes no notice of case, spaces and dashes. Raises InvalidArgument that lists the names."""
    for gpu in KNOWN:
        if _plain(gpu.name) == _plain(name):
            return gpu
    raise InvalidArgument(
        f"{name!r} is not known; {', '.join(gpu.name for gpu in KNOWN)} are, and any other can be "
        "described by --gpu-memory-gib, --gpu-bandwidth and --gpu-tflops",
        field="gpu",
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
