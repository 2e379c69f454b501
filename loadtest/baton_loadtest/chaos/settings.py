"""What the two processes of an experiment are made of; plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """layers: 128 bytes per position each. positions: of the longest input. chunk: positions that
    are computed at a time. heartbeat_s and missed: see `baton.transfer.stream.Liveness`.
    """

    transport: str = "nixl"
    num_buffers: int = 8
    buffer_bytes: int = 4096
    layers: int = 2
    positions: int = 90
    chunk: int = 30
    heartbeat_s: float = 0.1
    missed: int = 10
    faults: str = ""
