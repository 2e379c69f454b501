"""Follows the worker at one address and keeps a client for its present instance id.

Another instance id at the same address is another worker: the old one's client is closed, which
tells everyone who used it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic

import grpc

from baton.core.errors import BatonError
from baton.core.kvcache.cache_events import CacheBatch
from baton.core.request.model import WorkerIdentity
from baton.core.routing.breaker import Breakers
from baton.core.routing.load import WorkerDescription, WorkerLoad, WorkerState
from baton.core.routing.prefix_index import PrefixIndex
from baton.core.routing.routing import is_stalled
from baton.router.workers.broadcast import Broadcast
from baton.router.workers.reconnect_policy import SILENCE_S, ReconnectPolicy
from baton.router.workers.shared_stream import BROKEN, WorkerStalled
from baton.router.workers.worker import C, Worker
from baton.rpc.awake import Clock
from baton.rpc.calls import StepLimit, cancelled_here
from baton.rpc.convert import identity_to_proto
from baton.rpc.worker import cache_from_proto, description_from_proto, load_from_proto
from baton.v1.worker_pb2 import WatchRequest
from baton.v1.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

GONE, SILENT = "gone", "silent"
STATES = (*(state.name.lower() for state in WorkerState), SILENT, GONE)
"""What a link may be in. The worker's own word: starting (also: nobody was met yet), serving,
draining, kv_only. silent: it cannot be spoken to, and may live. gone: it was there once."""

ELSEWHERE_S = 5.0
"""Before it is tried again whether a worker is still met at another address."""


class NotFollowed(Exception):
    """This worker is followed at another address already, or nobody expects it here."""


MakeClient = Callable[[grpc.aio.Channel, WorkerDescription], C]

WATCH_AGAIN_S = 0.1
"""Before a Watch is opened again because some of a worker's cache events were missing."""


class WorkerLink(Generic[C]):
    """Follows one address. `worker` is None while nobody lives there; `settled` is False while its
    Watch is broken and it is not known yet whether it lives: it then gets no new work. `listed`:
    whether discovery names the address; set from outside. `stands_by`: whether who was last met
    here does.

    awake: what its silence is measured with. index: where what it has cached is kept; None where
    workers cache nothing. doubted: called whenever nobody answers here. known: whether an
    instance id has another link.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        role: str,
        router: WorkerIdentity,
        make_client: MakeClient[C],
        changed: Broadcast,
        awake: Clock,
        breakers: Breakers,
        index: PrefixIndex | None = None,
        *,
        doubted: Callable[[], None],
        known: Callable[[str], bool],
    ) -> None:
        self.worker: Worker[C] | None = None
        self.settled = False
        self.listed = True
        self.elsewhere = False
        self.stands_by = False
        self._met = False
        self._role = role
        self._doubted = doubted
        self._known = known
        self._channel = channel
        self._router = router
        self._make_client = make_client
        self._changed = changed
        self._awake = awake
        self._breakers = breakers
        self._index = index

    @property
    def state(self) -> str:
        """One of STATES."""
        worker = self.worker
        if worker is None:
            return GONE if self._met else WorkerState.STARTING.name.lower()
        if worker.load is None or not (self.settled and worker.client.ready):
            return SILENT
        return worker.load.state.name.lower()

    async def run(self) -> None:
        """Until cancelled, or until nobody lives here and nobody is expected to."""
        grace = ReconnectPolicy(self._awake)
        try:
            while self.listed or self.worker is not None:
                try:
                    if await self._watch(grace):
                        await asyncio.sleep(WATCH_AGAIN_S)
                        continue
                except asyncio.CancelledError:
                    if cancelled_here():
                        raise
                except WorkerStalled:
                    grace.give_up()
                except NotFollowed:
                    await asyncio.sleep(ELSEWHERE_S if self.listed else 0)
                except BROKEN as error:
                    log.debug("watch broke: %r", error)
                except (BatonError, ValueError):
                    log.exception("a worker describes itself in a way that cannot be")
                grace.failed()
                self._doubted()
                self.settled = False
                if grace.spent:
                    await self._leave()
                await asyncio.sleep(grace.pause_s)
        finally:
            await self._leave()

    async def _watch(self, grace: ReconnectPolicy) -> bool:
        """Returns when the worker ends the stream; True: when cache events are missing, which a new
        stream's snapshot makes good."""
        call = WorkerStub(self._channel).Watch(
            WatchRequest(watcher=identity_to_proto(self._router))
        )
        try:
            async with StepLimit(SILENCE_S, self._awake) as silence:
                while True:
                    answer: Any = await silence.watch(call.read())
                    if answer is grpc.aio.EOF:
                        return False
                    match answer.WhichOneof("message"):
                        case "description":
                            await self._meet(description_from_proto(answer.description))
                        case "load":
                            self._take_load(load_from_proto(answer.load))
                        case "cache":
                            if not self._take_cache(cache_from_proto(answer.cache)):
                                return True
                        case _:
                            pass
                    grace.alive()
        finally:
            call.cancel()

    async def _meet(self, description: WorkerDescription) -> None:
        identity = description.identity
        if self.worker is not None and self.worker.identity.instance_id == identity.instance_id:
            return
        await self._leave()
        if identity.role != self._role:
            raise ValueError(f"a {identity.role} worker is where {self._role} workers should be")
        self.elsewhere = self._known(identity.instance_id)
        # An address that is listed no more may belong to anybody by now.
        if self.elsewhere or not self.listed:
            raise NotFollowed
        client = self._make_client(self._channel, description)
        self.worker = Worker(
            description,
            client,
            asyncio.create_task(client.run()),
            self._breakers.of(identity.instance_id),
            number=-1 if self._index is None else self._index.join(),
            since=asyncio.get_running_loop().time(),
        )
        self._met = True
        self.stands_by = description.standby
        log.info("met %s %s at %s", identity.role, identity.instance_id[:8], identity.address)

    def _take_load(self, load: WorkerLoad) -> None:
        if self.worker is None:
            raise ValueError("load before description")
        if is_stalled(load.step_age_us, load.step_predicted_us):
            raise WorkerStalled
        self.worker.report(load)
        self.settled = True
        self._changed.set()

    def _take_cache(self, batch: CacheBatch) -> bool:
        """False when something is missing before it."""
        if self.worker is None:
            raise ValueError("cache before description")
        if self._index is None or self._index.apply(self.worker.number, batch):
            return True
        log.info("cache events of %s are missing", self.worker.identity.instance_id[:8])
        return False

    async def _leave(self) -> None:
        worker, self.worker = self.worker, None
        self.settled = False
        if worker is not None:
            if self._index is not None:
                self._index.leave(worker.number)
            log.info("lost %s %s", worker.identity.role, worker.identity.instance_id[:8])
            worker.running.cancel()
            await asyncio.gather(worker.running, return_exceptions=True)
            self._changed.set()
