"""AdapterRegistry: which LoRA adapters the workers of each model should have, as a router sees it.

Workers say what they have. The first list of a worker that was not known before only adds: a worker
that restarted lacks what was loaded at run time, and that is not the operator's wish. What a known
worker's list gains or loses was loaded or unloaded there by an operator, through this router or
another one, and holds for all workers of the model. So routers need no store, and agree as soon as
they see the same workers.

What workers load because requests name it is no operator's wish: it comes and goes on each by
itself, and is found in the snapshots of workers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from batonlm.core.request.model import AdapterDescription, ModelDescription
from batonlm.core.routing.load import WorkerSnapshot, WorkerState

MAX_UNLOADED = 4096
"""Unloaded adapters that are remembered."""

MAX_MODELS = 256
"""Models whose adapters are remembered, also while they have no worker."""


class _Key(NamedTuple):
    """One adapter of one model under one name."""

    model_digest: str
    name: str
    digest: str


class AdapterRegistry:
    """Pure; its caller reports every list of every prefill and decode worker."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[str, dict[str, AdapterDescription]] = OrderedDict()
        """By the model's digest, then by name; the model that was reported last is the last."""
        self._unloaded: OrderedDict[_Key, int] = OrderedDict()
        """By which number of all unloadings."""
        self._unloadings = 0
        self._loading: dict[tuple[str, str], list[int]] = {}
        """By the model's digest and name, for each load that is under way: how many unloadings
        there were when it began."""

    def met(self, model_digest: str, adapters: Iterable[AdapterDescription]) -> None:
        """The first list of a worker."""
        wanted = self._of(model_digest)
        for adapter in _operators(adapters):
            if _Key(model_digest, adapter.name, adapter.digest) not in self._unloaded:
                wanted.setdefault(adapter.name, adapter)

    def changed(
        self,
        model_digest: str,
        before: Sequence[AdapterDescription],
        after: Sequence[AdapterDescription],
    ) -> None:
        """A later list of a worker, and the one before it."""
        wanted = self._of(model_digest)
        old, new = (
            {_Key(model_digest, each.name, each.digest): each for each in _operators(adapters)}
            for adapters in (before, after)
        )
        for key in new.keys() - old.keys():
            if self._was_called_off(key):
                continue
            wanted[key.name] = new[key]
            self._unloaded.pop(key, None)
        for key in old.keys() - new.keys():
            known = wanted.get(key.name)
            if known is not None and known.digest == key.digest:
                del wanted[key.name]
            self._unloadings += 1
            self._unloaded[key] = self._unloadings
            self._unloaded.move_to_end(key)
            if len(self._unloaded) > MAX_UNLOADED:
                self._unloaded.popitem(last=False)

    def lost(self, model_digest: str, instead: AdapterDescription) -> None:
        """What this name stood for is on no worker, and cannot be loaded any more: it stands for
        what workers were started with instead, unless that was unloaded."""
        if _Key(model_digest, instead.name, instead.digest) not in self._unloaded:
            self._of(model_digest)[instead.name] = instead

    @contextmanager
    def loading(self, model_digest: str, name: str) -> Iterator[Callable[[str], bool]]:
        """Wraps a load on several workers. Yields what tells of a digest whether it was unloaded
        somewhere since the load began: then whoever loads it late does not bring it back."""
        began = self._unloadings
        under_way = self._loading.setdefault((model_digest, name), [])
        under_way.append(began)
        try:
            yield lambda digest: self._was_called_off(_Key(model_digest, name, digest))
        finally:
            under_way.remove(began)
            if not under_way:
                del self._loading[model_digest, name]

    def _was_called_off(self, key: _Key) -> bool:
        under_way = self._loading.get((key.model_digest, key.name), ())
        return self._unloaded.get(key, 0) > max(under_way, default=self._unloadings)

    def _of(self, model_digest: str) -> dict[str, AdapterDescription]:
        wanted = self._wanted.setdefault(model_digest, {})
        self._wanted.move_to_end(model_digest)
        if len(self._wanted) > MAX_MODELS:
            self._wanted.popitem(last=False)
        return wanted

    def named(self, model_digest: str, name: str) -> AdapterDescription | None:
        return self._wanted.get(model_digest, {}).get(name)

    def knows(self, name: str) -> bool:
        """Whether any model has an adapter of this name, also one that no worker serves now."""
        return any(name in wanted for wanted in self._wanted.values())

    def of(self, model_digest: str) -> Iterator[AdapterDescription]:
        """Yields the adapters of a model."""
        yield from self._wanted.get(model_digest, {}).values()

    def wants(self, digest: str) -> bool:
        """Whether any model has an adapter with this digest."""
        return any(each.digest == digest for d in self._wanted for each in self.of(d))

    def missing(
        self, model_digest: str, held: Iterable[AdapterDescription]
    ) -> list[AdapterDescription]:
        """Returns what a worker with this list lacks and can load: what lies in the folder that
        workers share."""
        here = {(each.name, each.digest) for each in held}
        return [
            adapter
            for adapter in self.of(model_digest)
            if adapter.path and (adapter.name, adapter.digest) not in here
        ]

    def unwanted(
        self, model_digest: str, held: Iterable[AdapterDescription]
    ) -> list[AdapterDescription]:
        """Returns what a worker has that was unloaded elsewhere while it could not be reached."""
        return [
            adapter
            for adapter in _operators(held)
            if _Key(model_digest, adapter.name, adapter.digest) in self._unloaded
        ]


def _operators(adapters: Iterable[AdapterDescription]) -> Iterator[AdapterDescription]:
    return (adapter for adapter in adapters if not adapter.on_use)


def adapter_for(
    request_id: str, name: str, decodes: Sequence[WorkerSnapshot], registry: AdapterRegistry
) -> tuple[ModelDescription, AdapterDescription] | None:
    """Returns the adapter of this name that a new request runs with, and its model; None while no
    decode worker has it.

    During the rollout of a new version of the model there may be two models with such an adapter;
    each is picked in proportion to its workers.
    """
    found = []
    for worker in decodes:
        adapter = registry.named(worker.model.digest, name)
        if adapter is None or adapter.digest not in worker.adapters:
            adapter = worker.used_adapters.get(name)
        if adapter is not None:
            found.append((worker.model, adapter, worker.load.state is WorkerState.SERVING))
    serving = [each for each in found if each[2]] or found
    if not serving:
        return None
    model, adapter, _ = Random(request_id).choice(serving)
    return model, adapter
