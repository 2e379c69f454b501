"""Follows the worker at one address and keeps a client for its present incarnation.

Another incarnation at the same address is another worker: the old one's client is closed, which
tells everyone who used it. Knows nothing of requests or of other workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from baton.core.breaker import Breaker, Breakers
from baton.core.errors import BatonError
from baton.core.load import WorkerDescription, WorkerLoad, WorkerState
from baton.core.losses import is_fault
from baton.core.model import ModelDescription, WorkerIdentity
from baton.core.routing import WorkerSnapshot, is_stalled
from baton.router.cancellation import cancelled_here
from baton.router.grace import SILENCE_S, Grace
from baton.router.notice import Notice
from baton.router.shared_stream import BROKEN, WorkerStalled
from baton.rpc.convert import identity_to_proto
from baton.rpc.worker import description_from_proto, load_from_proto
from baton.v1.worker_pb2 import WatchRequest
from baton.v1.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

_NO_MODEL = ModelDescription("", "", 0, 0, ())

GONE, SILENT = "gone", "silent"
STATES = (*(state.name.lower() for state in WorkerState), SILENT, GONE)
"""What a link may be in. The worker's own word: starting (also: nobody was met yet), serving,
draining, kv_only. silent: it cannot be spoken to, and may live. gone: it was there once."""

ELSEWHERE_S = 5.0
"""Before it is tried again whether a worker is still met at another address."""


class NotFollowed(Exception):
    """This worker is followed at another address already, or nobody expects it here."""


class Client(Protocol):
    """What a pool keeps per worker."""

    @property
    def ready(self) -> bool:
        """Whether new work may be given to it."""

    async def run(self) -> None:
        """Runs while the incarnation lives; cancelled when it is gone, it tells its users so."""


C = TypeVar("C", bound=Client)

MakeClient = Callable[[grpc.aio.Channel, WorkerIdentity], C]


@dataclass(slots=True)
class Worker(Generic[C]):
    """One incarnation. placed_*: what this router gave it and has not taken back.

    breaker: the incarnation's own, also when it was out of sight for a while.
    """

    description: WorkerDescription
    client: C
    running: asyncio.Task[None]
    breaker: Breaker
    load: WorkerLoad | None = None
    placed_sequences: int = 0
    placed_tokens: int = 0

    @property
    def identity(self) -> WorkerIdentity:
        return self.description.identity

    @property
    def model(self) -> ModelDescription:
        return self.description.model or _NO_MODEL

    @contextmanager
    def placed(self, sequences: int, tokens: int) -> Iterator[None]:
        """Work that is on the worker while the context is open."""
        now = asyncio.get_running_loop().time
        probes = self.breaker.placed(now())
        self.placed_sequences += sequences
        self.placed_tokens += tokens
        try:
            yield
        finally:
            self.placed_sequences -= sequences
            self.placed_tokens -= tokens
            if probes:
                self.breaker.left(now())

    def gained(self) -> None:
        """An attempt got somewhere here; told once per attempt."""
        self.breaker.gained(asyncio.get_running_loop().time())

    def blamed(self, error: BatonError) -> None:
        """An attempt was lost here."""
        if is_fault(error):
            self.breaker.lost(asyncio.get_running_loop().time())

    def snapshot(self, load: WorkerLoad) -> WorkerSnapshot:
        return WorkerSnapshot(
            identity=self.identity,
            model=self.model,
            load=load,
            layout=self.description.layout,
            transports=self.description.transports,
            block_size=max(1, self.description.block_size),
            max_sequences=self.description.max_sequences,
            placed_sequences=self.placed_sequences,
            placed_tokens=self.placed_tokens,
        )


class WorkerLink(Generic[C]):
    """Follows one address. `worker` is None while nobody lives there; `settled` is False while its
    Watch is broken and it is not known yet whether it lives: it then gets no new work. `listed`:
    whether discovery names the address; set from outside.

    doubted: called whenever nobody answers here. known: whether an incarnation has another link.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        role: str,
        router: WorkerIdentity,
        make_client: MakeClient[C],
        changed: Notice,
        breakers: Breakers,
        *,
        doubted: Callable[[], None],
        known: Callable[[str], bool],
    ) -> None:
        self.worker: Worker[C] | None = None
        self.settled = False
        self.listed = True
        self.elsewhere = False
        self._met = False
        self._role = role
        self._doubted = doubted
        self._known = known
        self._channel = channel
        self._router = router
        self._make_client = make_client
        self._changed = changed
        self._breakers = breakers

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
        grace = Grace(asyncio.get_running_loop().time)
        try:
            while self.listed or self.worker is not None:
                try:
                    await self._watch(grace)
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

    async def _watch(self, grace: Grace) -> None:
        """Returns when the worker ends the stream."""
        call = WorkerStub(self._channel).Watch(
            WatchRequest(watcher=identity_to_proto(self._router))
        )
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    answer: Any = await call.read()
                if answer is grpc.aio.EOF:
                    return
                match answer.WhichOneof("message"):
                    case "description":
                        await self._meet(description_from_proto(answer.description))
                    case "load":
                        self._take_load(load_from_proto(answer.load))
                    case _:
                        pass
                grace.alive()
        finally:
            call.cancel()

    async def _meet(self, description: WorkerDescription) -> None:
        identity = description.identity
        if self.worker is not None and self.worker.identity.incarnation == identity.incarnation:
            return
        await self._leave()
        if identity.role != self._role:
            raise ValueError(f"a {identity.role} worker is where {self._role} workers should be")
        self.elsewhere = self._known(identity.incarnation)
        # An address that is listed no more may belong to anybody by now.
        if self.elsewhere or not self.listed:
            raise NotFollowed
        client = self._make_client(self._channel, identity)
        self.worker = Worker(
            description,
            client,
            asyncio.create_task(client.run()),
            self._breakers.of(identity.incarnation),
        )
        self._met = True
        log.info("met %s %s at %s", identity.role, identity.incarnation[:8], identity.address)

    def _take_load(self, load: WorkerLoad) -> None:
        if self.worker is None:
            raise ValueError("load before description")
        if is_stalled(load.step_age_us, load.step_predicted_us):
            raise WorkerStalled
        self.worker.load = load
        self.settled = True
        self._changed.set()

    async def _leave(self) -> None:
        worker, self.worker = self.worker, None
        self.settled = False
        if worker is not None:
            log.info("lost %s %s", worker.identity.role, worker.identity.incarnation[:8])
            worker.running.cancel()
            await asyncio.gather(worker.running, return_exceptions=True)
            self._changed.set()
