"""The options of a prefill worker, besides those of every worker."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option
from baton.worker.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerOptions):
    """One prefill worker."""

    order: str = option(
        "shortest",
        "which prompt goes first within a priority and a tenant",
        choices=("shortest", "fcfs"),
    )
