"""How many routers are live: what shares of budgets are counted by."""

from __future__ import annotations

from baton.router.workers.discovery import Discovery

ROLE = "router"


class Replicas:
    """configured: what is said before discovery tells, and always where it is not asked."""

    def __init__(self, discovery: Discovery | None, configured: int) -> None:
        self._discovery = discovery
        self._live = configured

    def live_replicas(self) -> int:
        """Live routers, this one among them: at least 1."""
        return self._live

    async def run(self) -> None:
        """Follows discovery, if there is one, until cancelled."""
        if self._discovery is not None:
            async for found in self._discovery.watch(ROLE):
                self._live = max(1, len(found))
