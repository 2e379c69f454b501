"""What each preset of the chart needs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Needs:
    """pod_security: the strictest level of a namespace that admits its pods."""

    gpu: bool = False
    rdma: bool = False
    pod_security: str = "restricted"


PRESETS = {
    "cpu": Needs(),
    "gpu-tcp": Needs(gpu=True),
    # Locking memory (IPC_LOCK) is in no stricter level.
    "gpu-rdma": Needs(gpu=True, rdma=True, pod_security="privileged"),
}

LEVELS = ("privileged", "baseline", "restricted")
"""Of pod security, each stricter than the one before."""
