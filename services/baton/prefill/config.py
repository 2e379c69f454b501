"""The options of a prefill worker, besides those of every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.worker.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerOptions):
    """One prefill worker."""

    REMOVED: ClassVar = WorkerOptions.REMOVED | {
        *("order", "swap_host_mib", "swap_disk_mib", "swap_folder")
    }
