"""What all requests of a router share so that few of them cannot harm the rest; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.routing.failures import Quarantine, RetryBudget
from baton.router.config import RouterConfig

RETRIES_PER_S = 10.0


@dataclass(frozen=True, slots=True)
class Guards:
    """One per router."""

    budget: RetryBudget
    quarantine: Quarantine = field(default_factory=Quarantine)

    @classmethod
    def of(cls, config: RouterConfig) -> Guards:
        return cls(
            RetryBudget(share=config.retry_share, per_s=RETRIES_PER_S, most=config.retry_burst)
        )
