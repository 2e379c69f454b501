"""The LoRA adapters of a prefill or decode worker: which names they have here, and their service.

An adapter is read on a thread of its own, beside running steps. One that is unloaded, or replaced
by another of its name, takes no new attempts from then on; what runs with it goes on, and its
memory is freed behind the last of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc

from batonlm.core.errors import InvalidArgument, NotFound, Overloaded
from batonlm.core.request.model import AdapterDescription
from batonlm.core.request.validation import check_adapter_name
from batonlm.core.routing.load import AdapterList
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.engine.thread import EngineThread, to_end
from batonlm.rpc.convert import filled
from batonlm.rpc.server import Service
from batonlm.rpc.worker import adapters_to_proto
from batonlm.v1 import adapters_pb2 as pb
from batonlm.v1 import adapters_pb2_grpc, types_pb2

SERVICE = "baton.v1.Adapters"
MAX_ADAPTERS = 4096
"""Names on one worker: bounds what every router keeps of it."""


class WorkerAdapters:
    """The adapters of one worker. Runs on the event loop."""

    def __init__(self, engine: EngineThread, runner: ModelRunner, folder: str) -> None:
        """folder: below which adapters may be loaded at run time; "": none may."""
        self._engine = engine
        self._runner = runner
        self._folder = Path(folder).resolve() if folder else None
        self._changing = asyncio.Lock()
        self._held: dict[str, AdapterDescription] = {}
        self._version = 0

    @property
    def held(self) -> AdapterList:
        return AdapterList(self._version, tuple(self._held.values()))

    async def load_given(self, given: Sequence[str]) -> None:
        """Loads the adapters of the command line, NAME=FOLDER each, wherever they are. Raises
        InvalidArgument (`adapters`)."""
        for text in given:
            name, _, folder = text.partition("=")
            try:
                await self._add(name, Path(folder), "", replace_other=False)
            except InvalidArgument as error:
                raise InvalidArgument(f"{text}: {error.message}", field="adapters") from None

    async def load(
        self, name: str, path: str, *, digest: str = "", replace_other: bool = False
    ) -> AdapterDescription:
        """Loads an adapter, whose name requests may give from then on. Again for what is here
        already changes nothing.

        digest: that its files must have, unless "". replace_other: unloads another one of this
        name. Raises InvalidArgument, naming the field, and Overloaded when there is no room.
        """
        folder = await asyncio.to_thread(self._found, path)
        return await self._add(name, folder, digest, replace_other=replace_other)

    async def unload(self, name: str, digest: str = "") -> None:
        """Raises NotFound when nothing has this name, or it has another digest."""
        async with self._changing:
            known = self._held.get(name)
            if known is None or digest not in ("", known.digest):
                raise NotFound("There is no such adapter.", field="name")
            del self._held[name]
            self._version += 1
            await self._drop(known.digest)

    async def _add(
        self, name: str, folder: Path, digest: str, *, replace_other: bool
    ) -> AdapterDescription:
        check_adapter_name(name)
        if name == self._runner.model.name:
            raise InvalidArgument("This is the model's own name.", field="name")
        # A caller that leaves does not stop a change halfway.
        change = asyncio.ensure_future(self._change(name, folder, digest, replace_other))
        return await to_end(change)

    async def _change(
        self, name: str, folder: Path, digest: str, replace_other: bool
    ) -> AdapterDescription:
        async with self._changing:
            if name not in self._held and len(self._held) >= MAX_ADAPTERS:
                raise Overloaded(f"This worker has {MAX_ADAPTERS} adapters already.")
            await self._engine.call(lambda loop: loop.begin_loading())
            try:
                found = await asyncio.to_thread(self._runner.load_adapter, folder)
                adapter = replace(found, name=name, path=self._relative(folder))
                known = self._held.get(name)
                wrong = ""
                if digest not in ("", adapter.digest):
                    wrong = "Its files are not those that were loaded elsewhere."
                elif known is not None and known.digest != adapter.digest and not replace_other:
                    wrong = "Another adapter has this name: unload it first, or replace it."
                if wrong:
                    await self._drop(adapter.digest)
                    raise InvalidArgument(wrong, field="name")
                await self._engine.call(lambda loop: loop.add_adapter(adapter.digest))
                if known != adapter:
                    self._held[name] = adapter
                    self._version += 1
                    if known is not None:
                        await self._drop(known.digest)
            finally:
                self._engine.post(lambda loop: loop.end_loading())
        return adapter

    async def _drop(self, digest: str) -> None:
        """Has the engine let go of an adapter that no name here stands for."""
        if all(each.digest != digest for each in self._held.values()):
            await self._engine.call(lambda loop: loop.drop_adapter(digest))

    def _found(self, path: str) -> Path:
        """Returns the folder for a path. Raises InvalidArgument (`path`) for one that is not below
        the folder for adapters, wherever links lead. Blocks."""
        if self._folder is None:
            raise InvalidArgument(
                "Workers load no adapters at run time: they have no adapters_folder.", field="path"
            )
        try:
            folder = (self._folder / path).resolve()
            if folder != self._folder and folder.is_relative_to(self._folder) and folder.is_dir():
                return folder
        except (OSError, ValueError, RuntimeError):
            pass
        raise InvalidArgument("There is no such folder below adapters_folder.", field="path")

    def _relative(self, folder: Path) -> str:
        inside = folder.resolve()
        if self._folder is None or not inside.is_relative_to(self._folder):
            return ""
        return inside.relative_to(self._folder).as_posix()


class AdaptersServicer(adapters_pb2_grpc.AdaptersServicer):
    """Serves `baton.v1.Adapters` of a worker."""

    def __init__(self, adapters: WorkerAdapters) -> None:
        self._adapters = adapters

    def service(self) -> Service:
        return Service(
            SERVICE, lambda server: adapters_pb2_grpc.add_AdaptersServicer_to_server(self, server)
        )

    async def LoadAdapter(
        self,
        request: pb.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse],
    ) -> pb.LoadAdapterResponse:
        adapter = await self._adapters.load(
            request.name, request.path, digest=request.digest, replace_other=request.replace
        )
        return pb.LoadAdapterResponse(
            adapter=filled(types_pb2.AdapterDescription, adapter),
            held=adapters_to_proto(self._adapters.held),
        )

    async def UnloadAdapter(
        self,
        request: pb.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        await self._adapters.unload(request.name, request.digest)
        return pb.UnloadAdapterResponse(held=adapters_to_proto(self._adapters.held))
