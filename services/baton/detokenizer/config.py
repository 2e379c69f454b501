"""The options of a detokenizer process."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option
from baton.rpc.options import ServingOptions


@dataclass(frozen=True, slots=True)
class DetokenizerConfig(ServingOptions):
    """One detokenizer: token ids become text."""

    max_texts: int = option(16_384, "texts open in one session; more are refused", minimum=1)
    max_unsent_mib: int = option(
        64, "what a router may leave unread before its session ends", unit="MiB", minimum=1
    )
