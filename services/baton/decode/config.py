"""The options of a decode worker, besides those of every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.rpc.config import option
from baton.worker.options import SwapOptions


@dataclass(frozen=True, slots=True)
class DecodeConfig(SwapOptions):
    """One decode worker."""

    REMOVED: ClassVar = SwapOptions.REMOVED | {"resume_window_s"}

    inter_token_ms: float = option(
        0.0,
        "longest time between two tokens that admission and prefill chunks aim at; 0: none",
        unit="ms",
        minimum=0.0,
    )
