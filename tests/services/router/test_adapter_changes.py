"""A router loads and unloads adapters on all workers, and lets them catch up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from batonlm.core.errors import (
    BatonError,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    Unavailable,
)
from batonlm.core.request.model import AdapterDescription
from batonlm.core.routing.aliases import Alias
from batonlm.router.config import RouterConfig
from batonlm.router.workers import adapters
from batonlm.rpc.convert import filled
from batonlm.rpc.server import Service
from batonlm.rpc.worker import adapters_to_proto
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedDecode, ScriptedKv
from batonlm.v1 import adapters_pb2 as pb
from batonlm.v1 import adapters_pb2_grpc, types_pb2
from tests.services.router.conftest import PATIENCE_S, World, until
from tests.services.router.disturbed import REQUEST, check

NAME = language.MODEL.name
CONFIG = RouterConfig(local_prefill_tokens=0, wait_timeout_s=PATIENCE_S)
OLD = AdapterDescription("french", "f1", 8, 100, "french")
NEW = replace(OLD, digest="f2")


class LoadingDecode(ScriptedDecode, adapters_pb2_grpc.AdaptersServicer):
    """A decode worker whose adapters can be changed, as its files are."""

    files = OLD
    """What it finds in every folder."""
    folder: frozenset[str] = frozenset()
    """What requests may name."""
    lost: BatonError | None = None
    """If set, it does what it is asked, and this is the answer."""

    def __init__(self, network: ScriptedKv) -> None:
        super().__init__(network)
        self.asked: list[str] = []
        """What it was to load because requests named it."""

    async def on_load(self) -> None:
        """What happens before it answers; a test may replace it."""

    def service(self) -> Service:
        own = super().service()

        def register(server: grpc.aio.Server) -> None:
            own.register(server)
            adapters_pb2_grpc.add_AdaptersServicer_to_server(self, server)

        return Service(own.name, register)

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LoadAdapterResponse:
        if request.on_use:
            self.asked.append(request.name)
            if request.name not in self.folder:
                raise NotFound("There is no such folder.", field="path")
            if request.name == "refused":
                raise InvalidArgument("adapter refused: it has DoRA.", field="adapter")
        found = replace(self.files, name=request.name, path=request.path, on_use=request.on_use)
        if request.digest not in ("", found.digest):
            raise InvalidArgument("Its files are not those.", field="name")
        self._keep(request.name, found)
        await self.on_load()
        if self.lost is not None:
            raise self.lost
        return pb.LoadAdapterResponse(
            adapter=filled(types_pb2.AdapterDescription, found),
            held=adapters_to_proto(self.adapters),
        )

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.UnloadAdapterResponse:
        self._keep(request.name)
        return pb.UnloadAdapterResponse(held=adapters_to_proto(self.adapters))

    def _keep(self, name: str, *more: AdapterDescription) -> None:
        others = [each for each in self.adapters.adapters if each.name != name]
        self.change_adapters(*others, *more)


async def start(world: World, *files: AdapterDescription) -> list[LoadingDecode]:
    """A decode worker for each of these, without a prefill worker."""
    workers = []
    for each in files:
        worker = LoadingDecode(world.network)
        worker.files = each
        workers.append(worker)
    world.add(prefills=0, decodes=0)
    world.decodes += workers
    await world.run()
    return workers


@asynccontextmanager
async def kept(world: World) -> AsyncIterator[None]:
    keeping = asyncio.create_task(world.pipeline.adapter_manager.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def digests(world: World) -> list[str]:
    return [adapter.digest for _, adapter in world.pipeline.adapters()]


async def test_it_is_unloaded_again_where_nobody_knows_whether_it_was_loaded(world: World) -> None:
    one, other = await start(world, OLD, OLD)
    other.lost = Unavailable("It is gone.")
    with pytest.raises(Unavailable):
        await world.pipeline.adapter_manager.load("french", "french")
    assert not one.adapters.adapters and not other.adapters.adapters
    other.lost = None
    await world.pipeline.adapter_manager.load("french", "french")
    check(await world.ask(replace(REQUEST, model="french")))
    assert one.adapters.adapters == other.adapters.adapters == (OLD,)


@pytest.mark.deep
@pytest.mark.parametrize("path", ["", "french"])
async def test_workers_that_restart_with_other_files_under_a_name_are_used(
    world: World, path: str
) -> None:
    (old,) = await start(world, OLD)
    world.decodes.remove(old)
    old.change_adapters(replace(OLD, path=path))
    await until(lambda: digests(world) == ["f1"])
    async with kept(world):
        # The files are in place of the old ones, which are nowhere any more.
        new = LoadingDecode(world.network)
        new.files = replace(NEW, path=path)
        new.change_adapters(new.files)
        await old.kill()
        await new.start(world.addresses["decode"][0])
        world.decodes.append(new)
        await until(lambda: digests(world) == ["f2"])
        check(await world.ask(replace(REQUEST, model="french")))
        assert {each.adapter for each in new.starts} == {"f2"}
        assert new.adapters.adapters == (new.files,)


@pytest.mark.deep
async def test_what_is_unloaded_while_a_worker_catches_up_stays_unloaded(world: World) -> None:
    here, late = await start(world, OLD, OLD)
    more = replace(OLD, name="legal", path="legal")
    # They are loaded in the order in which the router came to know them.
    here.change_adapters(OLD)
    await until(lambda: digests(world) == ["f1"])
    here.change_adapters(OLD, more)
    await until(lambda: digests(world) == ["f1", "f1"])

    async def unloaded_elsewhere() -> None:
        here.change_adapters(OLD)
        await until(lambda: digests(world) == ["f1"])

    late.on_load = unloaded_elsewhere  # type: ignore[method-assign]
    async with kept(world):
        await until(lambda: late.adapters.adapters == (OLD,))
        del late.on_load
        # This comes behind what the router does in the same look.
        await world.pipeline.adapter_manager.load("other", "other")
        await until(lambda: len(digests(world)) == 2)
    assert {adapter.name for adapter in late.adapters.adapters} == {"french", "other"}


@pytest.mark.deep
async def test_what_another_router_unloads_during_a_load_does_not_come_back(world: World) -> None:
    early, late = await start(world, OLD, OLD)
    fleet = world.fleet
    assert fleet is not None

    async def unloaded_elsewhere() -> None:
        await until(lambda: bool(early.adapters.adapters))
        await until(lambda: fleet.adapters.knows("french"))
        early.change_adapters()
        await until(lambda: not fleet.adapters.knows("french"))

    late.on_load = unloaded_elsewhere  # type: ignore[method-assign]
    async with kept(world):
        with pytest.raises(Unavailable, match="unloaded while"):
            await world.pipeline.adapter_manager.load("french", "french")
        assert not early.adapters.adapters and not late.adapters.adapters
        assert not fleet.adapters.knows("french")
        del late.on_load
        await world.pipeline.adapter_manager.load("french", "french")
        assert digests(world) == ["f1"]


async def on_use(world: World, number: int, *names: str) -> list[LoadingDecode]:
    """Decode workers that load what requests name."""
    workers = await start(world, *[OLD] * number)
    for worker in workers:
        worker.folder = frozenset(names)
        worker.adapters = replace(worker.adapters, version=1, loads_on_use=True)
    fleet = world.fleet
    assert fleet is not None
    await until(lambda: all(w.loads_on_use for w in fleet.decodes.snapshots()))
    return workers


async def test_a_request_has_what_it_names_loaded_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "ABSENT_S", 3600.0)
    workers = await on_use(world, 2, "french", "refused")
    asked = (replace(REQUEST, model=name) for name in ("french", "french", f"{NAME}:french"))
    for answer in await asyncio.gather(*map(world.ask, asked)):
        check(answer)
        assert answer.accepted.model == "french"
    await until(lambda: all(worker.asked == ["french"] for worker in workers))
    assert {each.adapter for worker in workers for each in worker.starts} == {"f1"}
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="DoRA"):
            await world.ask(replace(REQUEST, model="refused"))
        with pytest.raises(ModelNotFound):
            await world.ask(replace(REQUEST, model="absent"))
    asked_now = [name for worker in workers for name in worker.asked]
    assert asked_now.count("refused") == asked_now.count("absent") == 1


async def test_requests_that_wait_for_an_adapter_are_held(world: World) -> None:
    (worker,) = await on_use(world, 1, "french")
    loaded = asyncio.Event()

    async def slowly() -> None:
        await loaded.wait()

    worker.on_load = slowly  # type: ignore[method-assign]
    asked = replace(REQUEST, model="french")
    given_up = asyncio.create_task(world.ask(asked))
    await until(lambda: world.pipeline.held_by_model() == {NAME: 1})
    given_up.cancel()
    await until(lambda: not world.pipeline.held_by_model())
    loaded.set()
    check(await world.ask(asked))


async def test_who_waited_for_a_model_is_not_counted_again_for_its_adapter(world: World) -> None:
    old, new = LoadingDecode(world.network), LoadingDecode(world.network)
    old.change_adapters(OLD)
    # The model has other weights when it comes back, and knows no adapters of the former ones.
    new.model = replace(new.model, digest="other weights")
    new.folder = frozenset({"french"})
    new.adapters = replace(new.adapters, version=1, loads_on_use=True)
    world.add(prefills=0, decodes=0)
    world.decodes.append(old)
    # So one request of a tenant may wait for a model.
    await world.run(replace(CONFIG, model=(NAME,), idle_timeout_s=300.0, max_requests=4))
    await until(lambda: digests(world) == ["f1"])
    await old.kill()
    await until(lambda: world.met()["decode"] == 0)
    waiting = asyncio.create_task(world.ask(replace(REQUEST, model=f"{NAME}:french")))
    await until(lambda: world.pipeline.held_by_model() == {NAME: 1} or waiting.done())
    world.decodes.append(new)
    world.listed["decode"].set([await new.start()])
    check(await waiting)
    assert new.asked == ["french"] and not world.pipeline.held_by_model()


async def test_what_made_room_comes_back_and_is_nobodys_unloading(world: World) -> None:
    one, other = await on_use(world, 2, "french")
    check(await world.ask(replace(REQUEST, model="french")))
    await until(lambda: bool(one.adapters.adapters and other.adapters.adapters))
    async with kept(world):
        one.change_adapters()
        await until(lambda: len(digests(world)) == 1)
        check(await world.ask(replace(REQUEST, model="french")))
        assert other.adapters.adapters, "it stays where it did not make room"
        other.change_adapters()
        await until(lambda: digests(world) == [])
        check(await world.ask(replace(REQUEST, model="french")))
        assert len(one.asked) + len(other.asked) >= 3


@pytest.mark.deep
async def test_a_request_whose_adapter_made_room_while_it_waited_gets_it_back(
    world: World,
) -> None:
    (worker,) = await on_use(world, 1, "french")
    worker.folder = frozenset({"french"})
    check(await world.ask(replace(REQUEST, model="french")))
    fleet = world.fleet
    assert fleet is not None
    tokenizer = world.tokenizers[0]
    tokenizer.working.clear()
    asking = asyncio.create_task(world.ask(replace(REQUEST, model="french")))
    await until(lambda: tokenizer.num_slow > 0)
    worker.change_adapters()
    await until(lambda: not fleet.has_adapter("f1"))
    tokenizer.working.set()
    check(await asking)
    assert worker.asked == ["french", "french"]
    manager = world.pipeline.adapter_manager
    await until(lambda: fleet.has_adapter("f1"))
    assert not manager.returns("french", NAME, "another"), "the name stands for other files"
    assert not manager.returns("french", "another model", "f1")


@pytest.mark.deep
async def test_a_name_that_an_adapter_and_an_alias_have_is_refused(world: World) -> None:
    await start(world, OLD)
    await world.pipeline.adapter_manager.load("french", "french")
    check(await world.ask(replace(REQUEST, model="french")))
    world.aliases["french"] = Alias(((NAME, 1),))
    with pytest.raises(InvalidArgument, match="is the name of an adapter"):
        await world.ask(replace(REQUEST, model="french"))
    check(await world.ask(replace(REQUEST, model=f"{NAME}:french")))
