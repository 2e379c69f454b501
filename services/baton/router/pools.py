"""The workers of one role, as discovery names them: who is there, how busy. Knows no requests."""

from __future__ import annotations

import asyncio
from typing import Generic

from baton.core.model import WorkerIdentity
from baton.core.routing import WorkerSnapshot
from baton.router.discovery import Discovery
from baton.router.notice import Notice
from baton.router.worker_link import C, MakeClient, Worker, WorkerLink
from baton.rpc.channels import Channels


class Pool(Generic[C]):
    """All workers of a role. `changed` is set whenever a snapshot may differ."""

    def __init__(
        self,
        role: str,
        discovery: Discovery,
        channels: Channels,
        router: WorkerIdentity,
        make_client: MakeClient[C],
        changed: Notice,
    ) -> None:
        self.role = role
        self._discovery = discovery
        self._channels = channels
        self._router = router
        self._make_client = make_client
        self._changed = changed
        self._links: dict[str, tuple[WorkerLink[C], asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Follows discovery until cancelled; closes all links on the way out."""
        try:
            async for addresses in self._discovery.watch(self.role):
                for address in addresses - self._links.keys():
                    self._follow(address)
                await self._drop(self._links.keys() - addresses)
        finally:
            await self._drop(set(self._links))

    def workers(self) -> list[Worker[C]]:
        """Those that may be given work, whatever their load says."""
        return [
            link.worker
            for link, _ in self._links.values()
            if link.worker is not None and link.settled and link.worker.client.ready
        ]

    def get(self, incarnation: str) -> Worker[C] | None:
        return next((w for w in self.workers() if w.identity.incarnation == incarnation), None)

    def snapshots(self) -> list[WorkerSnapshot]:
        return [worker.snapshot(worker.load) for worker in self.workers() if worker.load]

    def _follow(self, address: str) -> None:
        link = WorkerLink(
            self._channels.get(address, self.role),
            self._router,
            self._make_client,
            self._changed,
        )
        self._links[address] = (link, asyncio.create_task(link.run()))

    async def _drop(self, addresses: set[str]) -> None:
        tasks = [self._links.pop(address)[1] for address in addresses]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
