"""Watch tells the description, the cache, then every change of both, and gives a sign of life."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.cache_events import CacheBatch, CacheLog, Change
from batonlm.core.kvcache.prefix import HASH_BYTES
from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.routing.load import (
    UNMEASURED,
    TenantUse,
    WorkerDescription,
    WorkerLoad,
    WorkerSpeed,
    WorkerState,
)
from batonlm.rpc import worker
from batonlm.rpc.channels import Channels
from batonlm.rpc.server import ProcessServer
from batonlm.v1 import types_pb2, worker_pb2_grpc
from batonlm.v1 import worker_pb2 as pb
from tests.core.cache_replica import CacheReplica

WITHIN_S = 120.0
DESCRIPTION = WorkerDescription(
    identity=WorkerIdentity("decode", "ab" * 16, "127.0.0.1:5"),
    model=ModelDescription("m", "d", 100, 50, (1, 2), "t"),
    layout=KvLayout("d", "float32", 2, 1, 8, 8),
    transports=("nixl", "loopback"),
    num_blocks=7,
    block_size=16,
    kv_bytes_per_position=256,
    exact=True,
)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e6)
speeds = st.builds(WorkerSpeed, *[seconds] * 6, uint32, seconds, seconds)
uses = st.builds(TenantUse, st.text(max_size=9), uint64, uint64, uint32, uint64)
loads = st.builds(
    WorkerLoad,
    *(st.sampled_from(WorkerState), uint32, uint64, uint32, uint32, uint64, uint64),
    st.lists(uses, max_size=3).map(tuple),
    speeds,
)

Watching = grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]


class Watched:
    """A worker whose load, and cache if it has one, the tests change."""

    cache: CacheLog | None = None

    def __init__(self) -> None:
        self.load = WorkerLoad(WorkerState.SERVING)

    def describe(self) -> WorkerDescription:
        return DESCRIPTION

    def read(self) -> WorkerLoad:
        return self.load

    def use_through(self, router: str) -> tuple[TenantUse, ...]:
        return (TenantUse(f"seen by {router}", 1, 2, 3, 4),) if router else ()


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
async def stub(watched: Watched) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
    service = worker.worker_service(
        watched.describe, watched.read, watched.cache, watched.use_through
    )
    server = ProcessServer(listen="127.0.0.1:0", services=[service])
    channels = Channels()
    try:
        yield worker_pb2_grpc.WorkerStub(channels.get(await server.start()))
    finally:
        await channels.close()
        await server.stop(0)


async def next_load(watching: Watching) -> WorkerLoad:
    answer = await asyncio.wait_for(watching.read(), WITHIN_S)
    assert isinstance(answer, pb.WatchResponse)
    assert answer.WhichOneof("message") == "load"
    return worker.load_from_proto(answer.load)


async def test_description_then_changes_then_signs_of_life(
    stub: worker_pb2_grpc.WorkerAsyncStub, watched: Watched
) -> None:
    watching = stub.Watch(pb.WatchRequest())
    first = await watching.read()
    assert isinstance(first, pb.WatchResponse)
    assert worker.description_from_proto(first.description) == DESCRIPTION
    assert await next_load(watching) == watched.load
    watched.load = WorkerLoad(WorkerState.DRAINING, 1, 2, 3, 4, 5, 6)
    while (told := await next_load(watching)) != watched.load:
        assert told.state is WorkerState.SERVING
    for _ in range(2):
        assert await next_load(watching) == watched.load


async def test_each_watcher_is_told_of_others(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    for name in ("r1", "r2"):
        watcher = types_pb2.WorkerIdentity(role="router", instance_id=name)
        watching = stub.Watch(pb.WatchRequest(watcher=watcher))
        await watching.read()
        told = await next_load(watching)
        assert told.tenants == (TenantUse(f"seen by {name}", 1, 2, 3, 4),)


class Running(Watched):
    """A worker in a step: its age grows with every look."""

    looks = 0

    def read(self) -> WorkerLoad:
        self.looks += 1
        return WorkerLoad(WorkerState.SERVING, step_age_us=self.looks)


@pytest.mark.parametrize("watched", [Running()])
async def test_a_steps_age_is_told_with_the_sign_of_life_only(
    stub: worker_pb2_grpc.WorkerAsyncStub, watched: Running
) -> None:
    watching = stub.Watch(pb.WatchRequest())
    await watching.read()
    age_us = (await next_load(watching)).step_age_us
    async with asyncio.timeout(WITHIN_S):
        # In between, the load is looked at and found to hold no news; less often where the machine
        # stands still meanwhile.
        while (next_us := (await next_load(watching)).step_age_us) - age_us <= 2:
            age_us = next_us


async def test_the_number_of_watchers_is_bounded(
    stub: worker_pb2_grpc.WorkerAsyncStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_WATCHERS", 1)
    first = stub.Watch(pb.WatchRequest())
    await first.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Watch(pb.WatchRequest()).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                assert await stub.Watch(pb.WatchRequest()).read()
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)


class Caching(Watched):
    """A worker with a prefix cache of which at most 100 changes are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.units: set[bytes] = set()
        self._changes: deque[Change] = deque()
        self.cache = CacheLog(self._changes, max_kept=100)

    def toggle(self, *numbers: int) -> None:
        for number in numbers:
            unit = number.to_bytes(HASH_BYTES, "little")
            self._changes.append((unit, unit not in self.units))
            self.units ^= {unit}


@pytest.mark.parametrize("watched", [Caching()])
async def test_the_cache_is_told_at_once_and_then_its_changes(
    stub: worker_pb2_grpc.WorkerAsyncStub, watched: Caching
) -> None:
    watched.toggle(*range(5000))
    watching, replica = stub.Watch(pb.WatchRequest()), CacheReplica()
    told: list[str] = []
    snapshots: set[int] = set()

    async def listen() -> None:
        message = await asyncio.wait_for(watching.read(), WITHIN_S)
        assert isinstance(message, pb.WatchResponse)
        told.append(str(message.WhichOneof("message")))
        if message.HasField("cache"):
            assert replica.apply(message.cache)
            if message.cache.snapshot:
                snapshots.add(message.cache.first_number)

    for _ in range(4):
        await listen()
    assert told == ["description", "cache", "cache", "load"], "two parts of a snapshot"
    assert replica.units == watched.units
    watched.toggle(1, 2, 9000, 1)
    while replica.units != watched.units:
        await listen()
    assert snapshots == {5000}
    watched.toggle(*range(10_000, 10_200))
    while replica.units != watched.units:
        await listen()
    assert snapshots == {5000, 5204}, "more changed than is kept"


@given(loads)
def test_load_comes_back(load: WorkerLoad) -> None:
    assert worker.load_from_proto(worker.load_to_proto(load)) == load


def test_an_older_workers_speed_is_not_known() -> None:
    message = pb.WorkerLoad(state=pb.WORKER_STATE_SERVING)
    assert worker.load_from_proto(message).speed is UNMEASURED


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_speed_that_cannot_be_is_refused(value: float) -> None:
    message = pb.WorkerLoad(state=pb.WORKER_STATE_SERVING, speed=pb.WorkerSpeed(row_s=value))
    with pytest.raises(InvalidArgument) as refused:
        worker.load_from_proto(message)
    assert refused.value.field == "load.speed.row_s"


def test_cache_events_come_back() -> None:
    batch = CacheBatch(7, b"a" * HASH_BYTES, b"b" * 2 * HASH_BYTES, snapshot=False)
    assert worker.cache_from_proto(worker.cache_to_proto(batch)) == batch
    of_tier = replace(batch, tier="disk")
    assert worker.cache_from_proto(worker.cache_to_proto(of_tier)) == of_tier


@pytest.mark.parametrize("field", ["added", "removed"])
def test_half_a_hash_is_refused(field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        message = pb.CacheEvents()
        setattr(message, field, b"x" * (HASH_BYTES + 8))
        worker.cache_from_proto(message)
    assert refused.value.field == f"cache.{field}"


def test_a_worker_with_a_state_from_a_newer_version_gets_nothing_new() -> None:
    newer = pb.WorkerLoad.FromString(b"\x08\x63")
    assert newer.state not in pb.WorkerState.values()
    assert worker.load_from_proto(newer).state is WorkerState.STARTING


def test_a_load_without_a_state_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        worker.load_from_proto(pb.WorkerLoad())
    assert refused.value.field == "load.state"


def test_a_description_may_leave_out_what_a_role_has_not() -> None:
    small = WorkerDescription(DESCRIPTION.identity)
    assert worker.description_from_proto(worker.description_to_proto(small)) == small
