"""The workers of every role as one router sees them, and a link to each.

`Fleet` has one `Pool` per role. A pool follows each discovered address with a `WorkerLink`, which
keeps a `Worker` with a client for the instance id that currently runs there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import grpc

from batonlm.core.errors import BatonError, Unavailable
from batonlm.core.handover.fit import refusal
from batonlm.core.kvcache.cache_events import TIERS, CacheBatch
from batonlm.core.request.model import AdapterDescription, ModelDescription, WorkerIdentity
from batonlm.core.request.request_state import is_fault, leaves
from batonlm.core.routing.adapters import AdapterRegistry
from batonlm.core.routing.failures import Breaker, Breakers
from batonlm.core.routing.load import (
    NO_ADAPTERS,
    AdapterList,
    WorkerDescription,
    WorkerLoad,
    WorkerSnapshot,
    WorkerState,
)
from batonlm.core.routing.prefix_index import NO_OVERLAP, PrefixIndex
from batonlm.core.routing.routing import (
    Decision,
    FilterReason,
    PoolSnapshot,
    is_stalled,
    model_for,
    replacement_model,
)
from batonlm.router.workers.clients import EncodeClient, PrefillClient, TokenizerClient
from batonlm.router.workers.decode_session import DecodeSession
from batonlm.router.workers.detokenizer_session import DetokenizerSession
from batonlm.router.workers.discovery import Discovery
from batonlm.router.workers.shared_stream import (
    BROKEN,
    SILENCE_S,
    Broadcast,
    ReconnectPolicy,
    WorkerStalled,
)
from batonlm.rpc.calls import StepLimit, cancelled_here
from batonlm.rpc.channels import Channels
from batonlm.rpc.convert import identity_to_proto
from batonlm.rpc.loop import AwakeClock, Clock
from batonlm.rpc.worker import (
    adapters_from_proto,
    cache_from_proto,
    description_from_proto,
    load_from_proto,
)
from batonlm.v1.worker_pb2 import WatchRequest
from batonlm.v1.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

_NO_MODEL = ModelDescription("", "", 0, 0, ())


class WorkerClient(Protocol):
    """The client that a pool keeps per worker."""

    @property
    def ready(self) -> bool:
        """Whether new work may be given to the worker."""

    async def run(self) -> None:
        """Runs while the instance id lives. When cancelled, it fails its users."""


C = TypeVar("C", bound=WorkerClient)

MakeClient = Callable[[grpc.aio.Channel, WorkerDescription], C]


@dataclass(slots=True, eq=False)
class Worker(Generic[C]):
    """One instance id: its description, its reports, and the work that this router placed on it."""

    description: WorkerDescription
    client: C
    running: asyncio.Task[None]
    """The task of the client's `run`."""
    breaker: Breaker
    """The breaker of the instance id, which is kept while the worker is not visible."""
    number: int = -1
    """Its number in the pool's prefix index; below 0: none."""
    tiers: dict[str, int] = field(default_factory=dict)
    """The numbers of its tiers in the pool's index of these, by name."""
    since: float = 0.0
    """When it was first seen, on the loop's clock."""
    load: WorkerLoad | None = None
    """The newest report."""
    placed_sequences: int = 0
    """Placed by this router and not taken back."""
    placed_tokens: int = 0
    """Prompt tokens to prefill of the placed sequences."""
    fresh_sequences: int = 0
    """Placed since the newest report, which cannot include them."""
    fresh_tokens: int = 0
    """Prompt tokens to prefill of the fresh sequences."""
    fresh_positions: int = 0
    """Positions that need blocks, of the fresh sequences."""
    adapters: AdapterList = NO_ADAPTERS
    """The newest list."""
    _listed: bool = False
    """Whether it has said what adapters it has, which comes before its first load."""
    _snapshot: WorkerSnapshot | None = None
    _digests: frozenset[str] = frozenset()
    _used: dict[str, AdapterDescription] = field(default_factory=dict)
    _described: dict[str, Any] = field(init=False)
    """The fields that every snapshot takes from the description."""

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self.description)]
        self._described = {name: getattr(self.description, name) for name in names}
        self._described["model"] = self.model
        self._described["block_size"] = max(1, self.description.block_size)

    @property
    def identity(self) -> WorkerIdentity:
        return self.description.identity

    @property
    def model(self) -> ModelDescription:
        return self.description.model or _NO_MODEL

    def has_tokenizer(self, digest: str) -> bool:
        """Whether the worker's tokenizer may have this digest; "" and a worker that reports none
        match any."""
        own = self.model.tokenizer_digest
        return not own or digest in ("", own)

    def report(self, load: WorkerLoad) -> None:
        """Takes a new report of its load."""
        self.load = load
        self._listed = True
        self.fresh_sequences = self.fresh_tokens = self.fresh_positions = 0
        self._snapshot = self._look(load)

    def take_tier(self, tier: str, number: int) -> None:
        """It has a tier, with this number in the index of tiers."""
        self.tiers[tier] = number
        self._snapshot = None

    def take_adapters(self, held: AdapterList, registry: AdapterRegistry) -> None:
        """Takes a new list of its adapters; an older one than the last is dropped."""
        before, first = self.adapters, not self._listed
        if held.version <= before.version:
            return
        self.adapters, self._listed = held, True
        self._digests = frozenset(each.digest for each in held.adapters)
        self._used = {each.name: each for each in held.adapters if each.on_use}
        self._snapshot = None
        if first:
            registry.met(self.model.digest, held.adapters)
        else:
            registry.changed(self.model.digest, before.adapters, held.adapters)

    def place(self, sequences: int, tokens: int = 0, positions: int = 0) -> Placed:
        """Places sequences that need this many positions and this many prefilled tokens."""
        self.placed_sequences += sequences
        self.placed_tokens += tokens
        self.fresh_sequences += sequences
        self.fresh_tokens += tokens
        self.fresh_positions += positions
        self._snapshot = None
        return Placed(self, sequences, tokens, probes=self.breaker.placed())

    def take_back(self, sequences: int, tokens: int) -> None:
        """Called by `Placed`."""
        self.placed_sequences -= sequences
        self.placed_tokens -= tokens
        self._snapshot = None

    def success(self) -> None:
        """An attempt received a token or an answer from the worker. Call it once per attempt."""
        self.breaker.success(asyncio.get_running_loop().time())

    def failure(self, error: BatonError) -> None:
        """An attempt failed on the worker."""
        if is_fault(error):
            self.breaker.failure(asyncio.get_running_loop().time())

    @property
    def snapshot(self) -> WorkerSnapshot | None:
        """The worker's snapshot, or None before its first report. It is cached until something
        changes, because a decision reads all snapshots of a pool."""
        if self._snapshot is None and self.load is not None:
            self._snapshot = self._look(self.load)
        return self._snapshot

    def _look(self, load: WorkerLoad) -> WorkerSnapshot:
        return WorkerSnapshot(
            **self._described,
            load=load,
            number=self.number,
            tiers=tuple((tier, self.tiers[tier]) for tier in TIERS if tier in self.tiers),
            since=self.since,
            placed_sequences=self.placed_sequences,
            placed_tokens=self.placed_tokens,
            fresh_sequences=self.fresh_sequences,
            fresh_tokens=self.fresh_tokens,
            fresh_positions=self.fresh_positions,
            adapters=self._digests,
            used_adapters=self._used,
            loads_on_use=self.adapters.loads_on_use,
        )


class Placed:
    """Work that is on a worker until it is released, by `release` or `with`."""

    __slots__ = ("_probes", "_sequences", "_tokens", "_worker")

    def __init__(self, worker: Worker[C], sequences: int, tokens: int, *, probes: bool) -> None:
        """probes: whether it is the one attempt that a half-open breaker allows."""
        self._worker = worker
        self._probes = probes
        self._sequences = sequences
        self._tokens = tokens

    def computed(self) -> None:
        """The tokens are prefilled; the sequences stay."""
        self._worker.take_back(0, self._tokens)
        self._tokens = 0

    def release(self) -> None:
        """Takes the work back; idempotent."""
        self._worker.take_back(self._sequences, self._tokens)
        self._sequences = self._tokens = 0
        probes, self._probes = self._probes, False
        if probes:
            self._worker.breaker.left()

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


GONE, SILENT = "gone", "silent"
STATES = (*(state.name.lower() for state in WorkerState), SILENT, GONE)
"""States of a link. The worker's own: starting (also before a worker was ever seen), serving,
draining, kv_only. silent: it cannot be reached, and may live. gone: a worker was there once."""

ELSEWHERE_S = 5.0
"""Seconds between checks whether a worker is still followed at another address."""

WATCH_AGAIN_S = 0.1
"""Seconds before a Watch is reopened because cache events of a worker were missing."""


class NotFollowed(Exception):
    """The worker is followed at another address already, or the address is no longer listed."""


class WorkerLink(Generic[C]):
    """Follows the worker at one address and keeps a client for its current instance id.

    A new instance id at the same address is a new worker: the old one's client is closed, which
    fails all its users.
    """

    def __init__(self, pool: Pool[C], channel: grpc.aio.Channel) -> None:
        self.worker: Worker[C] | None = None
        """None while no worker runs there."""
        self.settled = False
        """False while the Watch is broken and the worker's state is unknown; it then gets no new
        work."""
        self.listed = True
        """Whether discovery lists the address; set from outside."""
        self.elsewhere = False
        """Whether the worker here is followed at another address."""
        self.stands_by = False
        """Whether the worker that was last seen here is a standby."""
        self._met = False
        self._pool = pool
        self._channel = channel

    @property
    def state(self) -> str:
        """One of STATES."""
        worker = self.worker
        if worker is None:
            return GONE if self._met else WorkerState.STARTING.name.lower()
        if worker.load is None or not self.usable:
            return SILENT
        return worker.load.state.name.lower()

    @property
    def usable(self) -> bool:
        """Whether the worker here can be reached."""
        return self.worker is not None and self.settled and self.worker.client.ready

    async def run(self) -> None:
        """Runs until cancelled, or until no worker is here and the address is no longer listed."""
        patience = ReconnectPolicy(self._pool.context.awake)
        try:
            while self.listed or self.worker is not None:
                try:
                    if await self._watch(patience):
                        await asyncio.sleep(WATCH_AGAIN_S)
                        continue
                except asyncio.CancelledError:
                    if cancelled_here():
                        raise
                except WorkerStalled:
                    patience.give_up()
                except NotFollowed:
                    await asyncio.sleep(ELSEWHERE_S if self.listed else 0)
                except BROKEN as error:
                    log.debug("watch broke: %r", error)
                except (BatonError, ValueError):
                    log.exception("a worker describes itself in a way that cannot be")
                patience.failed()
                self._pool.context.discovery.source(self._pool.role).look_again()
                self.settled = False
                if patience.spent:
                    await self._leave()
                await asyncio.sleep(patience.pause_s)
        finally:
            await self._leave()

    async def _watch(self, patience: ReconnectPolicy) -> bool:
        """Returns when the worker ends the stream; True when cache events are missing, which the
        snapshot of a new stream replaces."""
        context = self._pool.context
        watcher = identity_to_proto(context.router)
        call = WorkerStub(self._channel).Watch(WatchRequest(watcher=watcher))
        try:
            async with StepLimit(SILENCE_S, context.awake) as silence:
                while True:
                    answer: Any = await silence.watch(call.read())
                    if answer is grpc.aio.EOF:
                        return False
                    match answer.WhichOneof("message"):
                        case "description":
                            await self._meet(description_from_proto(answer.description))
                        case "load":
                            self._take_load(load_from_proto(answer.load))
                        case "adapters":
                            self._take_adapters(adapters_from_proto(answer.adapters))
                        case "tier":
                            if not self._take_tier(cache_from_proto(answer.tier)):
                                return True
                        case "cache":
                            if not self._take_cache(cache_from_proto(answer.cache)):
                                return True
                        case _:
                            pass
                    patience.alive()
        finally:
            call.cancel()

    async def _meet(self, description: WorkerDescription) -> None:
        identity, pool = description.identity, self._pool
        if self.worker is not None and self.worker.identity.instance_id == identity.instance_id:
            return
        await self._leave()
        if identity.role != pool.role:
            raise ValueError(f"a {identity.role} worker is where {pool.role} workers should be")
        self.elsewhere = pool.follows(identity.instance_id)
        # An address that is no longer listed may belong to another service by now.
        if self.elsewhere or not self.listed:
            raise NotFollowed
        client = pool.make_client(self._channel, description)
        layout = description.layout
        gaps = layout is not None and layout.state_positions > 0
        self.worker = Worker(
            description,
            client,
            asyncio.create_task(client.run()),
            pool.breakers.of(identity.instance_id),
            number=-1 if pool.index is None else pool.index.join(gaps=gaps),
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
        self._pool.context.changed.set()

    def _take_adapters(self, held: AdapterList) -> None:
        if self.worker is None:
            raise ValueError("adapters before description")
        self.worker.take_adapters(held, self._pool.context.adapters)
        self._pool.context.changed.set()

    def _take_cache(self, batch: CacheBatch) -> bool:
        """Applies cache events. Returns False when events before the batch are missing."""
        if self.worker is None:
            raise ValueError("cache before description")
        index = self._pool.index
        if index is None or index.apply(self.worker.number, batch):
            return True
        log.info("cache events of %s are missing", self.worker.identity.instance_id[:8])
        return False

    def _take_tier(self, batch: CacheBatch) -> bool:
        """As `_take_cache`, of a tier. One that is not known here is of no use."""
        if self.worker is None:
            raise ValueError("a tier before description")
        if batch.tier not in TIERS:
            return True
        if batch.tier not in self.worker.tiers:
            self.worker.take_tier(batch.tier, self._pool.tiers.join())
        return self._pool.tiers.apply(self.worker.tiers[batch.tier], batch)

    async def _leave(self) -> None:
        worker, self.worker = self.worker, None
        self.settled = False
        if worker is not None:
            if self._pool.index is not None:
                self._pool.index.leave(worker.number)
            for number in worker.tiers.values():
                self._pool.tiers.leave(number)
            log.info("lost %s %s", worker.identity.role, worker.identity.instance_id[:8])
            worker.running.cancel()
            await asyncio.gather(worker.running, return_exceptions=True)
            self._pool.context.changed.set()


@dataclass(frozen=True, slots=True)
class FleetContext:
    """What all pools of a router share."""

    discovery: Discovery
    channels: Channels
    router: WorkerIdentity
    """The identity of this router."""
    awake: Clock
    """Measures the silence of workers."""
    changed: Broadcast = field(default_factory=Broadcast)
    """Set whenever a snapshot of a worker may differ."""
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)


class Pool(Generic[C]):
    """All workers of a role: the addresses from discovery, and the state from each worker's
    reports.

    Discovery only gives addresses. Whether a worker is there and what it can do follows from the
    worker itself:

        listed, answers        followed; its own reports determine its work
        not listed, answers    the same: it may drain, or discovery may be wrong. A worker loses
                               nothing when a list omits it
        listed, silent         gone, and retried for as long as it is listed
        not listed, silent     gone and dropped, with its channel

    An address that comes back is listed again. A worker with two addresses, such as a pod with IPv4
    and IPv6, is followed at the first.
    """

    def __init__(
        self,
        role: str,
        context: FleetContext,
        make_client: MakeClient[C],
        index: PrefixIndex | None = None,
    ) -> None:
        self.role = role
        self.context = context
        self.make_client = make_client
        self.index = index
        """What the workers have cached; None for roles without a cache."""
        self.tiers = PrefixIndex()
        """What is in tiers behind their caches; every tier of a worker has a number of its own."""
        self.breakers = Breakers()
        self.links: dict[str, WorkerLink[C]] = {}
        """By address."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follows discovery until cancelled; closes all links on exit."""
        try:
            async for addresses in self.context.discovery.source(self.role).watch():
                for address, link in self.links.items():
                    link.listed = address in addresses
                for address in sorted(addresses - self.links.keys()):
                    channel = self.context.channels.get(address, self.role)
                    link = self.links[address] = WorkerLink(self, channel)
                    self._tasks.add(asyncio.create_task(self._keep(address, link)))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def workers(self) -> list[Worker[C]]:
        """Returns the workers that can be reached, in any reported state."""
        return list(self._usable())

    def serving(self) -> list[Worker[C]]:
        """Returns the workers that accept new work."""
        return [
            worker
            for worker in self.workers()
            if worker.load is not None and worker.load.state is WorkerState.SERVING
        ]

    def states(self) -> Counter[str]:
        """Counts the workers by state; every state has an entry."""
        found = Counter(dict.fromkeys(STATES, 0))
        found.update(link.state for link in self.links.values() if not link.elsewhere)
        return found

    @property
    def missing(self) -> bool:
        """Whether an expected worker that is no standby accepts no work. An address where no worker
        was seen yet counts, too."""
        return any(
            link.state != WorkerState.SERVING.name.lower()
            for link in self.links.values()
            if not (link.stands_by or link.elsewhere)
        )

    @property
    def awaited(self) -> bool:
        """Whether a worker may still appear: an address is known, or its source may list one."""
        return bool(self.links) or self.context.discovery.lists(self.role)

    def absent(self, model: bool = False) -> Unavailable:
        """Returns the error of a request that no worker of this role can serve now.

        model: the request is bound to a model, which other workers of the role may not have."""
        if self.awaited:
            what = f"No {self.role} worker is ready{' for this model' * model}."
            return Unavailable(what, retry_after_s=1.0)
        return Unavailable(f"This server has no {self.role} worker, and none is configured.")

    def standbys(self) -> dict[str, int]:
        """Counts the serving standbys: those that wait, and those in use because another worker is
        missing."""
        serving = self.serving()
        number = sum(worker.description.standby for worker in serving)
        used = self.missing or number == len(serving)
        return {"waiting": 0 if used else number, "used": number if used else 0}

    def ejected(self, now: float) -> frozenset[str]:
        """Returns the instance ids that get no new attempts now, because too many failed there."""
        if self.breakers.all_closed:
            return frozenset()
        return self.breakers.ejected([w.identity.instance_id for w in self.workers()], now)

    def usable(self, now: float) -> list[Worker[C]]:
        """Returns the workers that accept new work and are not ejected."""
        ejected = self.ejected(now)
        return [w for w in self.serving() if w.identity.instance_id not in ejected]

    def get(self, instance_id: str) -> Worker[C] | None:
        for link in self.links.values():
            worker = link.worker
            if worker is not None and worker.identity.instance_id == instance_id:
                return worker if link.usable else None
        return None

    def follows(self, instance_id: str) -> bool:
        """Whether a link has this worker, usable or not."""
        return any(
            link.worker is not None and link.worker.identity.instance_id == instance_id
            for link in self.links.values()
        )

    def each_snapshot(self) -> Iterator[WorkerSnapshot]:
        """Yields snapshots, for a caller that may stop early."""
        for worker in self._usable():
            if (snapshot := worker.snapshot) is not None:
                yield snapshot

    def snapshots(self) -> list[WorkerSnapshot]:
        return list(self.each_snapshot())

    def view(self, prefix_hashes: bytes) -> PoolSnapshot:
        """Returns all snapshots, and what these workers hold of a prompt."""
        overlap = NO_OVERLAP if self.index is None else self.index.find(prefix_hashes)
        tiers = self.tiers.find(prefix_hashes) if len(self.tiers) else NO_OVERLAP
        return PoolSnapshot(self.snapshots(), overlap, self.missing, tiers)

    def _usable(self) -> Iterator[Worker[C]]:
        for link in self.links.values():
            worker = link.worker
            if worker is not None and link.settled and worker.client.ready:
                yield worker

    async def _keep(self, address: str, link: WorkerLink[C]) -> None:
        try:
            await link.run()
        except Exception:
            log.exception("the link to %s failed by a fault of the router", address)
        finally:
            # No await separates this from the link's last check whether it is listed.
            del self.links[address]
            if (task := asyncio.current_task()) is not None:
                self._tasks.discard(task)
            await self.context.channels.drop(address, self.role)


MAX_LOGGED_PAIRS = 4096

PREFIX_PAUSE_S = 5.0
"""Seconds for which no prefix is collected from a worker from whose cache one did not come."""

COLLECT_PAUSE_S = 600.0
"""Seconds for which a worker that did not answer what came of a prefix is not asked to collect one.
Its version is older than that, and stays so as long as it lives."""


def passed_over(until: dict[str, float], now: float) -> frozenset[str]:
    """Returns the instance ids of workers that are still passed over; drops the others. until: by
    instance id, on the clock of `now`."""
    for instance_id in [i for i, end in until.items() if end <= now]:
        del until[instance_id]
    return frozenset(until)


class PrefixPauses:
    """Workers from whose caches a prefix did not come a moment ago, and those that do not collect
    any. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._not_giving: dict[str, float] = {}
        self._not_collecting: dict[str, float] = {}

    def gave_none(self, instance_id: str, now: float) -> None:
        self._not_giving[instance_id] = now + PREFIX_PAUSE_S

    def did_not_collect(self, instance_id: str, now: float) -> None:
        self._not_collecting[instance_id] = now + COLLECT_PAUSE_S

    def not_giving(self, now: float) -> frozenset[str]:
        """Returns instance ids."""
        return passed_over(self._not_giving, now)

    def not_collecting(self, now: float) -> frozenset[str]:
        """Returns instance ids."""
        return passed_over(self._not_collecting, now)


class Fleet:
    """The five pools of a router, with the clients for each role."""

    def __init__(
        self,
        discovery: Discovery,
        channels: Channels,
        router: WorkerIdentity,
    ) -> None:
        self.awake = awake = AwakeClock(asyncio.get_running_loop().time)
        """Measures the silence of workers."""
        context = FleetContext(discovery, channels, router, awake)
        self.changed = changed = context.changed
        """Set when any worker changed."""
        self.adapters = context.adapters
        """The adapters that workers should have."""
        self._channels = channels
        self.tokenizers = Pool(
            "tokenizer", context, lambda channel, worker: TokenizerClient(channel)
        )
        self.prefills = Pool(
            "prefill",
            context,
            lambda channel, worker: PrefillClient(channel, worker.identity, router),
            PrefixIndex(),
        )
        self.decodes = Pool(
            "decode",
            context,
            lambda channel, worker: DecodeSession(channel, worker.identity, router, changed, awake),
            PrefixIndex(),
        )
        self.detokenizers = Pool(
            "detokenizer",
            context,
            lambda channel, worker: DetokenizerSession(channel, changed, awake),
        )
        self.encodes = Pool("encode", context, lambda channel, worker: EncodeClient(channel))
        self.pools: tuple[Pool[Any], ...] = (
            self.tokenizers,
            self.prefills,
            self.decodes,
            self.detokenizers,
            self.encodes,
        )
        self.prefix_pauses = PrefixPauses()
        self._tasks: list[asyncio.Task[None]] = []
        self._log_unpaired = lru_cache(MAX_LOGGED_PAIRS)(_log_unpaired)
        """Logs each pair once."""

    def start(self) -> None:
        self.awake.start()
        self._tasks = [asyncio.create_task(pool.run()) for pool in self.pools]

    async def close(self) -> None:
        self.awake.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def model_for(self, request_id: str, name: str) -> ModelDescription | None:
        """Returns the model on which a new request with this model name runs."""
        tokenizers, detokenizers = (
            {worker.model.tokenizer_digest for worker in pool.serving()}
            for pool in (self.tokenizers, self.detokenizers)
        )
        return model_for(request_id, name, self.decodes.snapshots(), tokenizers, detokenizers)

    def replacement_model(self, model: ModelDescription) -> ModelDescription:
        """Returns the model, or one that can replace it for a request without tokens."""
        return replacement_model(model, self.decodes.each_snapshot())

    def take_adapters(self, worker: Worker[Any], held: AdapterList) -> None:
        """Takes a list of a worker's adapters that came in its answer to a call."""
        worker.take_adapters(held, self.adapters)
        self.changed.set()

    def has_adapter(self, digest: str) -> bool:
        """Whether a decode worker has this adapter, or may get it back."""
        held = any(digest in snapshot.adapters for snapshot in self.decodes.each_snapshot())
        return held or self.adapters.wants(digest)

    def all_have_adapter(self, model: str, digest: str) -> bool:
        """Whether every worker of a model (its digest) that runs attempts has this adapter."""
        return all(
            digest in snapshot.adapters
            for pool in (self.prefills, self.decodes)
            for snapshot in pool.each_snapshot()
            if snapshot.model.digest == model
        )

    def channel(self, worker: Worker[Any]) -> grpc.aio.Channel:
        """The channel over which the worker is followed."""
        for pool in self.pools:
            for address, link in pool.links.items():
                if link.worker is worker:
                    return self._channels.get(address, pool.role)
        raise Unavailable("This worker is gone.")

    @property
    def ready(self) -> bool:
        """Whether a text could be answered now. That needs no prefill worker."""
        return all(pool.serving() for pool in (self.tokenizers, self.decodes, self.detokenizers))

    @property
    def starts_models(self) -> bool:
        """Whether a text could be answered once a worker of its model has started."""
        return all(pool.serving() for pool in (self.tokenizers, self.detokenizers))

    def log_unpaired(self, decision: Decision) -> None:
        """Logs, once per pair, workers that a decision could not pair, and the reason. Such a
        misconfiguration fails no request, because decode prefills by itself, only slower."""
        if decision.decode is not None:
            for candidate in decision.candidates:
                if candidate.filter_reason is FilterReason.OTHER_LAYOUT:
                    self._log_unpaired(candidate.identity, decision.decode, candidate.detail)


def _log_unpaired(prefill: WorkerIdentity, decode: WorkerIdentity, detail: str) -> None:
    log.warning("%s (they are not paired)", refusal(prefill, decode, detail).message)


LEAVES_S = 1.0
"""Seconds for which a detokenizer that refused as draining is not used again: until its next report
it may look like the only one."""


async def pick_detokenizer(
    pool: Pool[DetokenizerSession],
    changed: Broadcast,
    tokenizer_digest: str,
    *,
    passed_over: Collection[str],
    lost: BatonError | None,
    wait_timeout_s: float,
) -> Worker[DetokenizerSession]:
    """Returns the detokenizer with the fewest texts of this router, preferring those that are not
    passed over; waits until there is one. lost: the error of the last one. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_timeout_s
    spare_until = loop.time() + (LEAVES_S if leaves(lost) else 0.0)
    while True:
        usable = [w for w in pool.usable(loop.time()) if w.has_tokenizer(tokenizer_digest)]
        fresh = [w for w in usable if w.identity.instance_id not in passed_over]
        now = loop.time()
        if fresh or (usable and now >= spare_until):
            return min(fresh or usable, key=lambda worker: worker.client.num_texts)
        left = (spare_until if usable else give_up) - now
        if left <= 0 or not pool.awaited:
            raise pool.absent()
        await changed.wait(left)
