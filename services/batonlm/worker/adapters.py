"""The LoRA adapters of a prefill or decode worker: which names they have here, and their service.

An adapter is read on a thread of its own, beside running steps. One that is unloaded, or replaced
by another of its name, takes no new attempts from then on; what runs with it goes on, and its
memory is freed behind the last of that. One that was loaded because a request named it makes room
for others as soon as no sequence uses it, those first that none named for the longest time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc

from batonlm.core.errors import InvalidArgument, NotFound, Overloaded, Unavailable
from batonlm.core.request.model import AdapterDescription
from batonlm.core.request.validation import check_adapter_name
from batonlm.core.routing.load import AdapterList
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.engine.thread import EngineThread, to_end
from batonlm.registry.cache import opened
from batonlm.registry.object_store import object_source
from batonlm.registry.sources import in_object_store
from batonlm.rpc.convert import filled
from batonlm.rpc.server import Service
from batonlm.rpc.worker import adapters_to_proto
from batonlm.v1 import adapters_pb2 as pb
from batonlm.v1 import adapters_pb2_grpc, types_pb2

log = logging.getLogger(__name__)

SERVICE = "baton.v1.Adapters"
MAX_ADAPTERS = 4096
"""Names on one worker: bounds what every router keeps of it."""
MAX_PATH = 1024
"""Letters of the path below the folder, which every router keeps, too."""
MAX_CHANGES = 256
"""Loads that are under way or wait; more are refused."""
FINDS = 4
"""Adapters that are looked for, or fetched, at once. Each takes a thread of those that seal and
verify KV, too, so that a store that hangs must not get all of them."""
CACHE_BYTES = 8 << 30
"""Of those that are kept on the disk. They are read from there once."""


Find = Callable[[ExitStack], tuple[Path, str]]
"""Returns an adapter's folder, which stays until the stack's end, and its path below the folder for
adapters, or "". Blocks."""


class AdapterFolder:
    """The folder below which adapters may be loaded at run time, or the same in an object store."""

    def __init__(self, where: str = "", cache: Path = Path()) -> None:
        """where: "": there is none. cache: where those of an object store are kept."""
        self._stored = where.rstrip("/") if in_object_store(where) else ""
        self._local = Path(where).resolve() if where and not self._stored else None
        self._cache = cache

    def find(self, path: str, ends: ExitStack) -> tuple[Path, str]:
        """As `Find`. Raises InvalidArgument (`path`) for what is not below the folder, wherever
        links lead, NotFound for what is not there, and Unavailable."""
        if not (self._stored or self._local):
            raise InvalidArgument(
                "Workers load no adapters at run time: they have no adapters_folder.", field="path"
            )
        if len(path) > MAX_PATH:
            raise _outside()
        if self._stored:
            return self._fetched(path, ends), path
        folder = self._found(path)
        return folder, self.relative(folder)

    def relative(self, folder: Path) -> str:
        inside = folder.resolve()
        if self._local is None or not inside.is_relative_to(self._local):
            return ""
        path = inside.relative_to(self._local).as_posix()
        return path if len(path) <= MAX_PATH else ""

    def _found(self, path: str) -> Path:
        assert self._local is not None
        try:
            folder = (self._local / path).resolve()
            if folder == self._local or not folder.is_relative_to(self._local):
                raise _outside()
            if folder.is_dir() and self.relative(folder):
                return folder
        except (OSError, ValueError, RuntimeError):
            raise _outside() from None
        raise _absent()

    def _fetched(self, path: str, ends: ExitStack) -> Path:
        try:
            source = object_source(f"{self._stored}/{path}")
        except InvalidArgument:
            raise _outside() from None
        try:
            return opened(
                source,
                self._cache,
                lambda text: log.info("adapter %s: %s", path, text),
                ends,
                most_bytes=CACHE_BYTES,
                # It is read at once, by the process that fetches it.
                kept_s=0.0,
            )
        except InvalidArgument as error:
            log.warning("adapter %s: %s", path, error.message)
            raise _absent() from None
        except (Unavailable, Overloaded) as error:
            log.warning("adapter %s: %s", path, error.message)
            raise Unavailable("This adapter could not be fetched.") from None


def _outside() -> InvalidArgument:
    return InvalidArgument("There is no such folder below adapters_folder.", field="path")


def _absent() -> NotFound:
    return NotFound("There is no such folder below adapters_folder.", field="path")


class WorkerAdapters:
    """The adapters of one worker. Runs on the event loop."""

    def __init__(
        self,
        engine: EngineThread,
        runner: ModelRunner,
        folder: AdapterFolder,
        *,
        on_use: bool = False,
    ) -> None:
        """on_use: whether routers may have it load what requests name."""
        self._engine = engine
        self._runner = runner
        self._folder = folder
        self._on_use = on_use
        self._changing = asyncio.Lock()
        self._finding = asyncio.Semaphore(FINDS)
        self._num_changes = 0
        self._held: dict[str, AdapterDescription] = {}
        self._version = int(on_use)

    @property
    def held(self) -> AdapterList:
        return AdapterList(self._version, tuple(self._held.values()), self._on_use)

    async def load_given(self, given: Sequence[str]) -> None:
        """Loads the adapters of the command line, NAME=FOLDER each, wherever they are. Raises
        InvalidArgument (`adapters`)."""
        for text in given:
            name, _, place = text.partition("=")
            folder = Path(place)
            try:
                await self._add(name, lambda _: (folder, self._folder.relative(folder)))  # noqa: B023
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

        def find(ends: ExitStack) -> tuple[Path, str]:
            try:
                return self._folder.find(path, ends)
            except NotFound:
                raise _outside() from None

        return await self._add(name, find, digest, replace_other=replace_other)

    async def load_used(self, name: str, *, digest: str = "") -> AdapterDescription:
        """Loads what a request names, from the folder of this name; what is here stays as it is.

        Raises NotFound where there is none, InvalidArgument for one that is refused, and Overloaded
        when those that are in use leave no room.
        """
        if not self._on_use:
            raise InvalidArgument("This worker loads nothing that requests name.", field="on_use")
        known = self._held.get(name)
        if known is not None and digest in ("", known.digest):
            return known
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise _absent()

        def find(ends: ExitStack) -> tuple[Path, str]:
            try:
                return self._folder.find(name, ends)
            except InvalidArgument:
                # A name is not a path that its client is to blame for.
                raise _absent() from None

        return await self._add(name, find, digest, on_use=True)

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
        self,
        name: str,
        find: Find,
        digest: str = "",
        *,
        replace_other: bool = False,
        on_use: bool = False,
    ) -> AdapterDescription:
        check_adapter_name(name)
        if name == self._runner.model.name:
            raise InvalidArgument("This is the model's own name.", field="name")
        if self._num_changes >= MAX_CHANGES:
            raise Overloaded("Too many adapters are being loaded here.")
        self._num_changes += 1
        # A caller that leaves does not stop a change halfway.
        change = asyncio.ensure_future(self._change(name, find, digest, replace_other, on_use))
        change.add_done_callback(self._changed)
        return await to_end(change)

    def _changed(self, _: object) -> None:
        self._num_changes -= 1

    async def _change(
        self, name: str, find: Find, digest: str, replace_other: bool, on_use: bool
    ) -> AdapterDescription:
        with ExitStack() as ends:
            async with self._finding:
                folder, path = await asyncio.to_thread(find, ends)
            async with self._changing:
                known = self._held.get(name)
                if known is None and len(self._held) >= MAX_ADAPTERS and not await self._evict():
                    raise Overloaded(f"This worker has {MAX_ADAPTERS} adapters already.")
                while True:
                    found = await self._read(name, folder, path, digest, replace_other, on_use)
                    if isinstance(found, AdapterDescription):
                        return found
                    if not await self._evict():
                        raise found

    async def _read(
        self, name: str, folder: Path, path: str, digest: str, replace_other: bool, on_use: bool
    ) -> AdapterDescription | Overloaded:
        """Returns Overloaded, and does not raise it, where the memory for adapters is full."""
        await self._engine.call(lambda loop: loop.begin_loading())
        try:
            try:
                found = await asyncio.to_thread(self._runner.load_adapter, folder)
            except Overloaded as full:
                return full
            known = self._held.get(name)
            # One that an operator loaded stays an operator's.
            own = on_use and (known is None or known.on_use or known.digest != found.digest)
            adapter = replace(found, name=name, path=path, on_use=own)
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

    async def _evict(self) -> bool:
        """Has the one that no request named for the longest time make room, of those that requests
        brought here. Returns whether there was one that nothing uses."""
        wanted = {each.digest for each in self._held.values() if not each.on_use}
        digests = {each.digest for each in self._held.values()} - wanted
        gone = await self._engine.call(lambda loop: loop.evict_adapter(digests))
        if gone:
            self._held = {n: each for n, each in self._held.items() if each.digest != gone}
            self._version += 1
        return bool(gone)

    async def _drop(self, digest: str) -> None:
        """Has the engine let go of an adapter that no name here stands for."""
        if all(each.digest != digest for each in self._held.values()):
            await self._engine.call(lambda loop: loop.drop_adapter(digest))


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
        if request.on_use:
            adapter = await self._adapters.load_used(request.name, digest=request.digest)
        else:
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
