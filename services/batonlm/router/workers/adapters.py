"""Loads and unloads LoRA adapters on all workers of a model, and keeps workers in step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import grpc

from batonlm.core.errors import (
    BatonError,
    InvalidArgument,
    NotFound,
    Overloaded,
    model_not_found,
)
from batonlm.core.request.model import AdapterDescription, ModelDescription
from batonlm.core.request.validation import check_adapter_name
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.load import WorkerState
from batonlm.core.routing.routing import models_of
from batonlm.router.config import RouterConfig
from batonlm.router.workers.fleet import Fleet, Worker
from batonlm.rpc.convert import adapter_from_proto
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.worker import adapters_from_proto
from batonlm.v1 import adapters_pb2 as pb
from batonlm.v1.adapters_pb2_grpc import AdaptersStub

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0
"""Seconds; more than reading the largest adapter takes."""

LOOK_S = 2.0
"""Seconds between two looks at what workers lack. Only what they lack at both is loaded there:
until then it is probably under way."""

AGAIN_S = 60.0
"""Seconds until a worker that could not load an adapter is asked again."""

MAX_REFUSED = 4096

T = TypeVar("T")


class AdapterManager:
    """Runs an operator's changes one at a time, and tells workers that come later.

    A worker that restarted, or was added, lacks what was loaded at run time: `keep` has it loaded
    there. Until then its requests go to other workers.
    """

    def __init__(
        self, fleet: Fleet, config: RouterConfig, aliases: Callable[[], Mapping[str, Alias]]
    ) -> None:
        """aliases: returns the names that stand for models now."""
        self._aliases = aliases
        self._fleet = fleet
        self._config = config
        self._changing = asyncio.Lock()
        self._seen: set[tuple[str, str, str]] = set()
        self._refused: dict[tuple[str, str, str], float] = {}
        """By instance id, name and digest: until when it is not tried again, on the loop's
        clock."""

    async def load(
        self, name: str, path: str, *, model: str = "", digest: str = "", replace: bool = False
    ) -> AdapterDescription:
        """Loads an adapter on every prefill and decode worker of the model that can be reached.

        If one of them cannot load it, it is unloaded again where it was new, also where the call
        failed without an answer and may yet be carried out. Raises BatonError.
        """
        check_adapter_name(name)
        wanted = pb.LoadAdapterRequest(name=name, path=path, digest=digest, replace=replace)
        async with self._changing:
            base = self._base(model)
            if name in self._taken():
                raise InvalidArgument("A model has this name.", field="name")
            workers = self._workers(base)
            had = [worker for worker in workers if _has(worker, name)]
            found = await _answers(self._load(worker, wanted) for worker in workers)
            failure = next((each for each in found if isinstance(each, BatonError)), None)
            if failure is None:
                return next(each for each in found if isinstance(each, AdapterDescription))
            undo = pb.UnloadAdapterRequest(name=name)
            await _answers(
                self._unload(worker, undo)
                for worker, result in zip(workers, found, strict=True)
                if worker not in had and not isinstance(result, InvalidArgument | Overloaded)
            )
            raise failure

    async def unload(self, name: str, *, model: str = "", digest: str = "") -> None:
        """Unloads an adapter on every worker of the model that has it. Raises BatonError."""
        async with self._changing:
            base = self._base(model)
            workers = [worker for worker in self._workers(base) if _has(worker, name)]
            if not workers:
                names = {each.name for each in self._fleet.adapters.of(base.digest)}
                error = model_not_found(name, names)
                raise NotFound(error.message, field="name")
            wanted = pb.UnloadAdapterRequest(name=name, digest=digest)
            found = await _answers(self._unload(worker, wanted) for worker in workers)
            failures = [each for each in found if isinstance(each, BatonError)]
            if failures:
                raise failures[0]

    async def keep(self) -> None:
        """Loads what workers lack, and unloads what was unloaded elsewhere while they could not be
        reached. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            async with self._changing:
                await self._look()

    async def _look(self) -> None:
        now, registry = asyncio.get_running_loop().time(), self._fleet.adapters
        seen: set[tuple[str, str, str]] = set()
        unloadable: set[str] = set()
        self._refused = {key: end for key, end in self._refused.items() if end > now}
        for worker in self._engines():
            held, digest = worker.adapters.adapters, worker.model.digest
            instance_id = worker.identity.instance_id
            for adapter in registry.unwanted(digest, held):
                undo = pb.UnloadAdapterRequest(name=adapter.name, digest=adapter.digest)
                await _answer(self._unload(worker, undo))
            for adapter in registry.missing(digest, held):
                key = (instance_id, adapter.name, adapter.digest)
                seen.add(key)
                if key not in self._seen or key in self._refused:
                    continue
                if registry.named(digest, adapter.name) != adapter:
                    # Unloaded while others were loaded here; loading it would bring it back.
                    continue
                wanted = pb.LoadAdapterRequest(
                    name=adapter.name, path=adapter.path, digest=adapter.digest, replace=True
                )
                result = await _answer(self._load(worker, wanted))
                if isinstance(result, InvalidArgument):
                    unloadable.add(adapter.digest)
                if isinstance(result, BatonError) and len(self._refused) < MAX_REFUSED:
                    self._refused[key] = now + AGAIN_S
                    log.warning(
                        "%s %s cannot load adapter %s: %s",
                        worker.identity.role, worker.identity.short, adapter.name, result.message,
                    )  # fmt: skip
        self._seen = seen
        self._give_way(unloadable)

    def _give_way(self, unloadable: set[str]) -> None:
        """Lets names stand for what decode workers were started with where none has what they
        stood for, and none can load it: its files changed before all of them were restarted.

        unloadable: digests that no files have any more.
        """
        registry, decodes = self._fleet.adapters, self._fleet.decodes.workers()
        lists = [(worker.model.digest, worker.adapters.adapters) for worker in decodes]
        held = {(digest, each.digest) for digest, adapters in lists for each in adapters}
        for digest, adapters in lists:
            for adapter in adapters:
                known = registry.named(digest, adapter.name)
                if known is None or (digest, known.digest) in held:
                    continue
                if not known.path or known.digest in unloadable:
                    registry.lost(digest, adapter)

    async def _load(self, worker: Worker[Any], wanted: pb.LoadAdapterRequest) -> AdapterDescription:
        stub: Any = AdaptersStub(self._fleet.channel(worker))
        answer = await stub.LoadAdapter(wanted, timeout=CALL_TIMEOUT_S)
        # The worker's own report comes a moment later, when the operator's next request may be
        # here already.
        self._fleet.take_adapters(worker, adapters_from_proto(answer.held))
        return adapter_from_proto(answer.adapter)

    async def _unload(self, worker: Worker[Any], wanted: pb.UnloadAdapterRequest) -> None:
        stub: Any = AdaptersStub(self._fleet.channel(worker))
        answer = await stub.UnloadAdapter(wanted, timeout=CALL_TIMEOUT_S)
        self._fleet.take_adapters(worker, adapters_from_proto(answer.held))

    def _base(self, name: str) -> ModelDescription:
        """Returns the model that an adapter is for. Raises InvalidArgument when there are several
        and none is named, ModelNotFound, or Unavailable."""
        config, decodes = self._config, self._fleet.decodes
        served = models_of(decodes.snapshots())
        models = [m for m in served if not config.model or m.name in config.model]
        alias = self._aliases().get(name)
        names = (name,) if alias is None else alias.models
        named = [model for model in models if not name or model.name in names]
        if len(named) > 1:
            raise InvalidArgument(
                "There are several models: name the one that it is for.", field="model"
            )
        if named:
            return named[0]
        if models:
            raise model_not_found(name, [model.name for model in models])
        raise decodes.absent()

    def _taken(self) -> set[str]:
        """The names that mean a model."""
        pools = (self._fleet.decodes, self._fleet.encodes)
        served = {worker.model.name for pool in pools for worker in pool.workers()}
        return served | {*self._config.model, *self._aliases()}

    def _workers(self, model: ModelDescription) -> list[Worker[Any]]:
        return [worker for worker in self._engines() if worker.model.name == model.name]

    def _engines(self) -> list[Worker[Any]]:
        workers: list[Worker[Any]] = [*self._fleet.prefills.workers()]
        workers += self._fleet.decodes.workers()
        leaving = (WorkerState.DRAINING, WorkerState.KV_ONLY)
        return [w for w in workers if w.load is not None and w.load.state not in leaving]


async def _answer(call: Awaitable[T]) -> T | BatonError:
    """Returns what a worker answers, or its error."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    except BatonError as error:
        return error


async def _answers(calls: Iterable[Awaitable[T]]) -> list[T | BatonError]:
    """The same of several workers, all at once."""
    return await asyncio.gather(*map(_answer, calls))


def _has(worker: Worker[Any], name: str) -> bool:
    return any(adapter.name == name for adapter in worker.adapters.adapters)
