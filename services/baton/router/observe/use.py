"""Use, what a router's requests and its decode workers do now.

Running and waiting are the requests of this router: whoever adds up routers counts each once. What
workers report is of all routers' work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from baton.core.routing.load import WorkerDescription, WorkerLoad
from baton.router.request.pipeline import Pipeline
from baton.router.workers.fleet import Fleet


class Use:
    """Counters are by name of the model."""

    def __init__(self, pipeline: Pipeline, fleet: Fleet) -> None:
        self._pipeline = pipeline
        self._fleet = fleet

    def waiting(self) -> Counter[str]:
        """Requests that wait for workers."""
        return Counter(entry.item.kind[0] for entry in self._pipeline.gate.queue)

    def running(self) -> Counter[str]:
        """Requests that have workers."""
        running, queued = self._pipeline.running_by_model(), self.waiting()
        return Counter({name: max(0, running[name] - queued[name]) for name in running})

    def decodes(self) -> Iterator[tuple[str, WorkerDescription, WorkerLoad]]:
        """Decode workers that have said what they are and what they do, with their models."""
        for worker in self._fleet.decodes.workers():
            if worker.load is not None and worker.description.num_blocks:
                yield worker.model.name, worker.description, worker.load

    def waiting_tokens(self) -> int:
        """Prompt tokens that wait at workers to be computed."""
        pools = (self._fleet.prefills, self._fleet.decodes)
        loads = [worker.load for pool in pools for worker in pool.workers()]
        return sum(load.waiting_tokens for load in loads if load is not None)
