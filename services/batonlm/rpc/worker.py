"""Serves `baton.v1.Worker`, and converts its messages.

A watcher receives the worker's description, then its adapters and a snapshot of its prefix cache if
it has them, then changes of these and of the load: at most every 50 ms, and the load at least every
500 ms as a heartbeat. Nothing is queued: a slow watcher receives the newest load, and the cache's
changes from its last position or a new snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields, replace
from math import inf

import grpc

from batonlm.core.errors import InvalidArgument, Overloaded
from batonlm.core.kvcache.cache_events import CacheBatch, CacheLog, CacheReader
from batonlm.core.kvcache.prefix import HASH_BYTES
from batonlm.core.routing.load import (
    NO_ADAPTERS,
    UNMEASURED,
    AdapterList,
    TenantUse,
    WorkerDescription,
    WorkerLoad,
    WorkerSpeed,
    WorkerState,
)
from batonlm.rpc.convert import (
    adapter_from_proto,
    filled,
    identity_from_proto,
    identity_to_proto,
    layout_from_proto,
    layout_to_proto,
    model_from_proto,
    model_to_proto,
    parsed,
)
from batonlm.rpc.server import Service
from batonlm.v1 import types_pb2, worker_pb2_grpc
from batonlm.v1 import worker_pb2 as pb

SERVICE = "baton.v1.Worker"
HEARTBEAT_S = 0.5
COALESCE_S = 0.05
MAX_WATCHERS = 256

UseThrough = Callable[[str], tuple[TenantUse, ...]]
"""Takes a router's instance id; returns the tenants' usage through all other routers."""


NO_TIERS: Mapping[str, CacheLog] = {}


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Streams description, adapters, cache changes and load to each watcher.

    describe, load, use and adapters are called on the event loop, and the cache is read there; load
    up to 20 times a second per watcher. cache: None for a worker without one. tiers: the logs of
    those behind it, by name. use: None sends no tenants.
    """

    def __init__(
        self,
        describe: Callable[[], WorkerDescription],
        load: Callable[[], WorkerLoad],
        cache: CacheLog | None,
        use: UseThrough | None = None,
        adapters: Callable[[], AdapterList] = lambda: NO_ADAPTERS,
        tiers: Mapping[str, CacheLog] = NO_TIERS,
    ) -> None:
        self._adapters = adapters
        self._use = use
        self._describe = describe
        self._load = load
        self._cache = cache
        self._tiers = tiers
        self._watchers = 0

    async def Watch(
        self,
        request: pb.WatchRequest,
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse],
    ) -> AsyncIterator[pb.WatchResponse]:
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded(f"more than {MAX_WATCHERS} watch this worker already")
        self._watchers += 1
        try:
            yield pb.WatchResponse(description=description_to_proto(self._describe()))
            clock = asyncio.get_running_loop().time
            reader = CacheReader(self._cache) if self._cache is not None else None
            tiers = {name: CacheReader(log) for name, log in self._tiers.items()}
            sent, sent_at = None, 0.0
            sent_adapters = NO_ADAPTERS
            while True:
                adapters = self._adapters()
                if adapters.version != sent_adapters.version:
                    sent_adapters = adapters
                    yield pb.WatchResponse(adapters=adapters_to_proto(adapters))
                for batch in reader.read() if reader is not None else ():
                    yield pb.WatchResponse(cache=cache_to_proto(batch))
                for name, tier in tiers.items():
                    for batch in tier.read():
                        yield pb.WatchResponse(tier=cache_to_proto(replace(batch, tier=name)))
                load = self._load()
                steady = _steady(load)
                if steady != sent or clock() - sent_at >= HEARTBEAT_S:
                    sent, sent_at = steady, clock()
                    if self._use is not None:
                        load = replace(load, tenants=self._use(request.watcher.instance_id))
                    yield pb.WatchResponse(load=load_to_proto(load))
                await asyncio.sleep(COALESCE_S)
        finally:
            self._watchers -= 1


def worker_service(
    describe: Callable[[], WorkerDescription],
    load: Callable[[], WorkerLoad],
    cache: CacheLog | None = None,
    use: UseThrough | None = None,
    adapters: Callable[[], AdapterList] = lambda: NO_ADAPTERS,
    tiers: Mapping[str, CacheLog] = NO_TIERS,
) -> Service:
    """The Worker service, for a ProcessServer. See WorkerServicer for the arguments."""
    servicer = WorkerServicer(describe, load, cache, use, adapters, tiers)
    return Service(
        SERVICE, lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    )


def description_to_proto(description: WorkerDescription) -> pb.WorkerDescription:
    model, layout = description.model, description.layout
    return filled(
        pb.WorkerDescription,
        description,
        identity=identity_to_proto(description.identity),
        model=None if model is None else model_to_proto(model),
        layout=None if layout is None else layout_to_proto(layout),
    )


def description_from_proto(message: pb.WorkerDescription) -> WorkerDescription:
    has_layout = message.HasField("layout")
    return parsed(
        WorkerDescription,
        message,
        identity=identity_from_proto(message.identity),
        model=model_from_proto(message.model) if message.HasField("model") else None,
        layout=layout_from_proto(message.layout, "description.layout") if has_layout else None,
    )


def adapters_to_proto(held: AdapterList) -> types_pb2.AdapterList:
    adapters = [filled(types_pb2.AdapterDescription, each) for each in held.adapters]
    return types_pb2.AdapterList(
        version=held.version, adapters=adapters, loads_on_use=held.loads_on_use
    )


def adapters_from_proto(message: types_pb2.AdapterList) -> AdapterList:
    adapters = tuple(map(adapter_from_proto, message.adapters))
    return AdapterList(message.version, adapters, message.loads_on_use)


def load_to_proto(load: WorkerLoad) -> pb.WorkerLoad:
    return filled(
        pb.WorkerLoad,
        load,
        state=_STATE_TO_PROTO[load.state],
        tenants=[filled(pb.TenantUse, use) for use in load.tenants],
        speed=filled(pb.WorkerSpeed, load.speed),
    )


def load_from_proto(message: pb.WorkerLoad) -> WorkerLoad:
    """Raises InvalidArgument when the state is not set. A state that this version does not know
    becomes STARTING, so that the worker counts as alive and receives no new work."""
    if message.state == pb.WORKER_STATE_UNSPECIFIED:
        raise InvalidArgument("must be set", field="load.state")
    return parsed(
        WorkerLoad,
        message,
        state=_STATE_FROM_PROTO.get(message.state, WorkerState.STARTING),
        tenants=tuple(parsed(TenantUse, use) for use in message.tenants),
        speed=_speed_from_proto(message.speed) if message.HasField("speed") else UNMEASURED,
    )


def _speed_from_proto(message: pb.WorkerSpeed) -> WorkerSpeed:
    """Raises InvalidArgument for a value that is negative or not finite."""
    speed = parsed(WorkerSpeed, message)
    for field in fields(speed):
        if not 0.0 <= getattr(speed, field.name) < inf:
            raise InvalidArgument("must be a number from 0 on", field=f"load.speed.{field.name}")
    return speed


def cache_to_proto(batch: CacheBatch) -> pb.CacheEvents:
    return filled(pb.CacheEvents, batch)


def cache_from_proto(message: pb.CacheEvents) -> CacheBatch:
    """Raises InvalidArgument when the bytes are not a whole number of hashes."""
    for name in ("added", "removed"):
        if len(getattr(message, name)) % HASH_BYTES:
            raise InvalidArgument(f"must be {HASH_BYTES} bytes a hash", field=f"cache.{name}")
    return parsed(CacheBatch, message)


def _steady(load: WorkerLoad) -> WorkerLoad:
    """The load without fields that change all the time (step age, tenants, speed): only a change of
    the rest is sent at once."""
    return replace(load, step_age_us=0, step_predicted_us=0, tenants=(), speed=UNMEASURED)


_STATE_TO_PROTO = {
    state: pb.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState
}
_STATE_FROM_PROTO = {value: state for state, value in _STATE_TO_PROTO.items()}
