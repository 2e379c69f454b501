"""What a prefill worker can be told besides what every worker can."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option
from baton.worker.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerOptions):
    """One prefill worker."""

    batch_window_ms: float = option(
        2.0, "longest wait for a fuller batch", unit="ms", minimum=0.0, maximum=1000.0
    )
    order: str = option(
        "shortest",
        "which prompt goes first within a priority and a tenant",
        choices=("shortest", "fcfs"),
    )
    turn_tokens: int = option(
        512,
        "prompt tokens that a tenant is served before it is another one's turn, times its weight; "
        "0: tenants do not take turns",
        unit="tokens",
        minimum=0,
    )
