"""A router loads and unloads adapters on all workers, and lets them catch up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from batonlm.core.errors import BatonError, InvalidArgument, Unavailable
from batonlm.core.request.model import AdapterDescription
from batonlm.rpc.convert import filled
from batonlm.rpc.server import Service
from batonlm.rpc.worker import adapters_to_proto
from batonlm.testing.scripted import ScriptedDecode
from batonlm.v1 import adapters_pb2 as pb
from batonlm.v1 import adapters_pb2_grpc, types_pb2
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import REQUEST, check

OLD = AdapterDescription("french", "f1", 8, 100, "french")
NEW = replace(OLD, digest="f2")


class LoadingDecode(ScriptedDecode, adapters_pb2_grpc.AdaptersServicer):
    """A decode worker whose adapters can be changed, as its files are."""

    files = OLD
    """What it finds in every folder."""
    lost: BatonError | None = None
    """If set, it does what it is asked, and this is the answer."""

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
        found = replace(self.files, name=request.name, path=request.path)
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
