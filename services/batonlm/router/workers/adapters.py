"""Loads and unloads LoRA adapters on all workers of a model, and keeps workers in step."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import grpc

from batonlm.core.errors import (
    BatonError,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
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

USES = 16
"""Adapters that requests name and that are loaded at once."""
MAX_USES = 1024
"""Those and the ones that wait for their turn; more are refused."""
ABSENT_S = 5.0
"""Seconds for which an adapter that a folder does not have is not looked for again."""

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
        self._uses: dict[tuple[str, str], asyncio.Task[BatonError | None]] = {}
        """By model and name, what is being loaded because requests name it."""
        self._unusable: OrderedDict[tuple[str, str], tuple[float, BatonError]] = OrderedDict()
        """Likewise, until when it is not tried again, and why."""
        self._turns = asyncio.Semaphore(USES)
        self._spreading: set[asyncio.Task[None]] = set()

    async def use(self, name: str, model: str, wait_s: float) -> None:
        """Has the model's workers load the adapter that requests call by this name, once for all
        requests that come meanwhile; returns when one decode worker has it.

        Raises NotFound where their folder has none, InvalidArgument (`model`) for one that is
        refused, and Unavailable or Overloaded.
        """
        task = self._begin_use(name, model)
        if task is not None:
            await asyncio.wait({task}, timeout=wait_s)
            if not task.done():
                raise Unavailable("The adapter is still being loaded.", retry_after_s=1.0)
            if task.cancelled():
                raise Unavailable("This router is leaving.", retry_after_s=1.0)
        failure = task.result() if task is not None else self._known_failure(name, model)
        if failure is not None:
            raise failure

    def returns(self, name: str, model: str, digest: str) -> bool:
        """Whether an adapter that made room on the last worker that had it is being loaded again,
        which this begins. Not while its name stands for other files."""
        lists = [
            worker.adapters.adapters
            for worker in self._fleet.decodes.workers()
            if worker.model.name == model and worker.adapters.loads_on_use
        ]
        now = {each.digest for adapters in lists for each in adapters if each.name == name}
        if not name or not lists or not now <= {digest}:
            return False
        try:
            return self._begin_use(name, model) is not None
        except Overloaded:
            return False

    async def close(self) -> None:
        """Ends loads that requests began."""
        tasks = [*self._uses.values(), *self._spreading]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known_failure(self, name: str, model: str) -> BatonError | None:
        found = self._unusable.get((model, name))
        if found is None or found[0] <= asyncio.get_running_loop().time():
            return None
        return found[1]

    def _begin_use(self, name: str, model: str) -> asyncio.Task[BatonError | None] | None:
        """Returns the load, or None where it is known to fail. Raises Overloaded."""
        key = model, name
        task = self._uses.get(key)
        if task is None and self._known_failure(name, model) is None:
            if len(self._uses) >= MAX_USES:
                raise Overloaded("Too many adapters are being loaded.", retry_after_s=1.0)
            task = self._uses[key] = asyncio.create_task(self._use(name, model))
            task.add_done_callback(lambda _: self._uses.pop(key))
        return task

    async def _use(self, name: str, model: str) -> BatonError | None:
        async with self._turns:
            failure = await self._use_somewhere(name, model)
        absent, refused = isinstance(failure, NotFound), isinstance(failure, InvalidArgument)
        if failure is not None and (absent or refused):
            end = asyncio.get_running_loop().time() + (ABSENT_S if absent else AGAIN_S)
            self._unusable[model, name] = end, failure
            self._unusable.move_to_end((model, name))
            if len(self._unusable) > MAX_REFUSED:
                self._unusable.popitem(last=False)
        return failure

    async def _use_somewhere(self, name: str, model: str) -> BatonError | None:
        """Loads it on one decode worker, and begins to on the others. Returns why it could not."""
        workers = [
            worker
            for worker in self._engines()
            if worker.model.name == model and worker.adapters.loads_on_use
        ]
        decodes = {worker.identity.instance_id for worker in self._fleet.decodes.workers()}
        first = [worker for worker in workers if worker.identity.instance_id in decodes]
        first.sort(key=lambda worker: worker.placed_sequences)
        failure: BatonError = self._fleet.decodes.absent(model=True)
        for worker in first:
            wanted = pb.LoadAdapterRequest(name=name, path=name, on_use=True)
            found = await _answer(self._load(worker, wanted))
            if isinstance(found, NotFound):
                return found
            if isinstance(found, InvalidArgument):
                return InvalidArgument(found.message, field="model")
            if isinstance(found, BatonError):
                failure = found
                continue
            wanted.digest = found.digest
            others = [each for each in workers if each is not worker]
            if others and len(self._spreading) < MAX_USES:
                task = asyncio.create_task(self._spread(others, wanted))
                self._spreading.add(task)
                task.add_done_callback(self._spreading.discard)
            return None
        return failure

    async def _spread(self, workers: list[Worker[Any]], wanted: pb.LoadAdapterRequest) -> None:
        """What fails here is no harm: the adapter's requests run where it is."""
        async with self._turns:
            for found in await _answers(self._load(worker, wanted) for worker in workers):
                if isinstance(found, BatonError):
                    log.info("a worker has no adapter %s: %s", wanted.name, found.message)

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
            with self._fleet.adapters.loading(base.digest, name) as called_off:
                found = await _answers(self._load(worker, wanted) for worker in workers)
                failure = next((each for each in found if isinstance(each, BatonError)), None)
                loaded = [each for each in found if isinstance(each, AdapterDescription)]
                undo = pb.UnloadAdapterRequest(name=name)
                if failure is None and any(called_off(each.digest) for each in loaded):
                    # Through another router, on those that had loaded it by then.
                    had, undo.digest = [], loaded[0].digest
                    failure = Unavailable("It was unloaded while it was being loaded.")
                if failure is None:
                    return loaded[0]
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
