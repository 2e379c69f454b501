"""PendingEncodes, what is on its way to the queue: let in, and not encoded yet; knows no queue.

What is not counted here is let in again and again by the same short queue: many ask in the time
that one prompt takes to be encoded, and then meet where there was room for one.
"""

from __future__ import annotations

from collections import Counter


class PendingEncodes:
    """Tokens as the queue counts them, by tenant and priority (smaller is more urgent)."""

    def __init__(self) -> None:
        self._tokens: dict[str, Counter[int]] = {}

    def add(self, tenant: str, priority: int, tokens: int) -> None:
        self._tokens.setdefault(tenant, Counter())[priority] += tokens

    def remove(self, tenant: str, priority: int, tokens: int) -> None:
        """As many as were added, together."""
        of_tenant = self._tokens[tenant]
        of_tenant[priority] -= tokens
        if not of_tenant[priority]:
            del of_tenant[priority]
        if not of_tenant:
            del self._tokens[tenant]

    def ahead(self, tenant: str, priority: int) -> int:
        """Of the same tenant, and at least as urgent. What others send comes in between by their
        shares alone, and is seen when it waits."""
        of_tenant = self._tokens.get(tenant)
        if of_tenant is None:
            return 0
        return sum(tokens for urgency, tokens in of_tenant.items() if urgency <= priority)

    def __len__(self) -> int:
        """Tenants with something on its way."""
        return len(self._tokens)
