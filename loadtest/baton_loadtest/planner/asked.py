"""What a fleet is planned for: traffic, targets and margins."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from baton.core.errors import InvalidArgument
from baton_loadtest.planner.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Traffic:
    """rate: requests a second. shared_prefix: share of each prompt that workers have cached, on
    either side of the hand-over."""

    rate: float
    prompts: Lengths
    outputs: Lengths
    shared_prefix: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.rate) and self.rate > 0):
            raise InvalidArgument("must be more than 0 requests a second", field="rate")
        if not 0.0 <= self.shared_prefix < 1.0:
            raise InvalidArgument("must be from 0 to below 1", field="shared_prefix")

    def cached(self, prompt: int) -> int:
        """Positions of a prompt that need neither computing nor moving; the last always does."""
        return min(prompt - 1, int(self.shared_prefix * prompt))


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds. first_token: for 95 of 100 requests, from when the prompt reaches the prefill pool.
    between_tokens: a step of decode."""

    first_token_s: float
    between_tokens_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isfinite(value) and value > 0):
                name = field.name.removesuffix("_s") + "_ms"
                raise InvalidArgument("must be more than 0", field=name)


@dataclass(frozen=True, slots=True)
class Margins:
    """busy: share of a worker's speed, and of a link's, that is planned with; the rest is for
    bursts. link: bytes a second into or out of a worker; 0: not known, and not looked at."""

    busy: float
    link: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.busy < 1.0:
            raise InvalidArgument("must be above 0 and below 1", field="busy")
