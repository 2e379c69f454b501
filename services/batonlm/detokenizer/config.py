"""The options of a detokenizer process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batonlm.rpc.options import ServingOptions


@dataclass(frozen=True, slots=True)
class DetokenizerConfig(ServingOptions):
    """One detokenizer: token ids become text."""

    REMOVED: ClassVar = ServingOptions.REMOVED | {"max_texts", "max_unsent_mib"}
