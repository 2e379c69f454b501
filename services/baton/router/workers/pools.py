"""The workers of one role: where discovery says they are, and what each says of itself.

Discovery only says where to look. Whether a worker is there, and what it can do, is its own word:

    listed, answers         followed; what it may be given is what it says
    not listed, answers     the same: it may drain, or discovery may be wrong. Nothing is taken from
                            a worker because a list left it out
    listed, silent          gone, and tried again for as long as it is listed
    not listed, silent      gone, and forgotten, with its channel

An address that comes back is listed again. Who is met at two addresses at once, as a pod with IPv4
and IPv6 is, is followed at the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Generic

from baton.core.request.model import WorkerIdentity
from baton.core.routing.breaker import Breakers
from baton.core.routing.load import WorkerState
from baton.core.routing.prefix_index import NO_OVERLAP, PrefixIndex
from baton.core.routing.routing import PoolView, WorkerSnapshot
from baton.router.workers.broadcast import Broadcast
from baton.router.workers.discovery import Discovery
from baton.router.workers.worker import C, Worker
from baton.router.workers.worker_link import STATES, MakeClient, WorkerLink
from baton.rpc.awake import Clock
from baton.rpc.channels import Channels

log = logging.getLogger(__name__)

_SERVING = WorkerState.SERVING.name.lower()


class Pool(Generic[C]):
    """All workers of a role. `changed` is set whenever a snapshot may differ. index: of what they
    have cached; None where they cache nothing. awake: what their silence is measured with.
    """

    def __init__(
        self,
        role: str,
        discovery: Discovery,
        channels: Channels,
        router: WorkerIdentity,
        make_client: MakeClient[C],
        changed: Broadcast,
        awake: Clock,
        index: PrefixIndex | None = None,
    ) -> None:
        self.index = index
        self.role = role
        self._discovery = discovery
        self._channels = channels
        self._router = router
        self._make_client = make_client
        self._changed = changed
        self._awake = awake
        self._breakers = Breakers()
        self._links: dict[str, tuple[WorkerLink[C], asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Follows discovery until cancelled; closes all links on the way out."""
        try:
            async for addresses in self._discovery.watch(self.role):
                for address, (link, _) in self._links.items():
                    link.listed = address in addresses
                for address in sorted(addresses - self._links.keys()):
                    self._follow(address)
        finally:
            tasks = [task for _, task in self._links.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def workers(self) -> list[Worker[C]]:
        """Those that can be spoken to, whatever they say of themselves."""
        return [
            link.worker
            for link, _ in self._links.values()
            if link.worker is not None and link.settled and link.worker.client.ready
        ]

    def serving(self) -> list[Worker[C]]:
        """Those that take new work."""
        return [
            worker
            for worker in self.workers()
            if worker.load is not None and worker.load.state is WorkerState.SERVING
        ]

    def states(self) -> Counter[str]:
        """How many are in each state; every state is named."""
        found = Counter(dict.fromkeys(STATES, 0))
        found.update(link.state for link, _ in self._links.values() if not link.elsewhere)
        return found

    @property
    def missing(self) -> bool:
        """Whether somebody who does not stand by is expected here and takes no work. Who was not
        met yet counts, whoever it will be.
        """
        return any(
            link.state != _SERVING
            for link, _ in self._links.values()
            if not (link.stands_by or link.elsewhere)
        )

    def standbys(self) -> dict[str, int]:
        """How many that take work stand by, and are used now because another is missing."""
        serving = self.serving()
        number = sum(worker.description.standby for worker in serving)
        used = self.missing or number == len(serving)
        return {"waiting": 0 if used else number, "used": number if used else 0}

    def ejected(self, now: float) -> frozenset[str]:
        """Instance ids that get no new attempts now, because they lose too many."""
        if self._breakers.all_closed:
            return frozenset()
        return self._breakers.ejected([w.identity.instance_id for w in self.workers()], now)

    def usable(self, now: float) -> list[Worker[C]]:
        """Those that take new work and are not ejected."""
        ejected = self.ejected(now)
        return [w for w in self.serving() if w.identity.instance_id not in ejected]

    def get(self, instance_id: str) -> Worker[C] | None:
        for link, _ in self._links.values():
            worker = link.worker
            if worker is not None and worker.identity.instance_id == instance_id:
                return worker if link.settled and worker.client.ready else None
        return None

    def each_snapshot(self) -> Iterator[WorkerSnapshot]:
        """For who need not look at all of them."""
        for link, _ in self._links.values():
            worker = link.worker
            if link.settled and worker is not None and worker.client.ready:
                snapshot = worker.snapshot
                if snapshot is not None:
                    yield snapshot

    def snapshots(self) -> list[WorkerSnapshot]:
        return list(self.each_snapshot())

    def view(self, prefix_hashes: bytes) -> PoolView:
        """All snapshots, and what these workers hold of a prompt."""
        overlap = NO_OVERLAP if self.index is None else self.index.find(prefix_hashes)
        return PoolView(self.snapshots(), overlap, self.missing)

    def _follow(self, address: str) -> None:
        link = WorkerLink(
            self._channels.get(address, self.role),
            self.role,
            self._router,
            self._make_client,
            self._changed,
            self._awake,
            self._breakers,
            self.index,
            doubted=lambda: self._discovery.look_again(self.role),
            known=lambda instance_id: self._is_known(instance_id, link),
        )
        self._links[address] = (link, asyncio.create_task(self._keep(address, link)))

    async def _keep(self, address: str, link: WorkerLink[C]) -> None:
        try:
            await link.run()
        except Exception:
            log.exception("the link to %s failed by a fault of the router", address)
        finally:
            # Without an await since the link's last look at whether it is listed.
            del self._links[address]
            await self._channels.drop(address, self.role)

    def _is_known(self, instance_id: str, asking: WorkerLink[C]) -> bool:
        """Whether another link has this worker."""
        return any(
            link.worker is not None and link.worker.identity.instance_id == instance_id
            for link, _ in self._links.values()
            if link is not asking
        )
