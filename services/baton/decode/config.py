"""The options of a decode worker, besides those of every worker."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option
from baton.worker.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerOptions):
    """One decode worker."""

    inter_token_ms: float = option(
        0.0,
        "longest time between two tokens that admission and prefill chunks aim at; 0: none",
        unit="ms",
        minimum=0.0,
    )
    resume_window_s: float = option(
        2.0, "how long a router's sequences outlive its stream", unit="s", minimum=0.0
    )
