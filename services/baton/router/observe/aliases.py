"""A router's own load and its decode pool's memory under vLLM's names.

Running and waiting are the requests of this router: whoever picks among routers, or adds them up,
counts each request once. KV is that of all decode workers: every router uses them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from baton.router.observe.use import Use
from baton.router.request.pipeline import Pipeline
from baton.router.workers.fleet import Fleet
from baton.rpc.aliases import CACHE_CONFIG, KV_USAGE, RUNNING, WAITING
from baton.rpc.metrics import REGISTRY, gauge

Gauge = dict[tuple[str, ...], float]


def watch(
    pipeline: Pipeline, fleet: Fleet, registry: CollectorRegistry = REGISTRY
) -> list[Callable[[], None]]:
    """Reads the gauges at every scrape until the returned functions are called."""

    use = Use(pipeline, fleet)

    def models() -> set[str]:
        return {model.name for model in pipeline.models()}

    def running_now() -> Gauge:
        running = use.running()
        return {(m,): running[m] for m in models() | running.keys()}

    def waiting_now() -> Gauge:
        queued = use.waiting()
        return {(m,): queued[m] for m in models() | queued.keys()}

    def usage() -> Gauge:
        blocks, free = Counter[str](), Counter[str]()
        for model, description, load in use.decodes():
            blocks[model] += description.num_blocks
            free[model] += load.free_blocks
        return {(m,): 1 - free[m] / blocks[m] for m in blocks}

    def config() -> Gauge:
        blocks = Counter[tuple[str, int]]()
        for model, description, _ in use.decodes():
            blocks[model, description.block_size] += description.num_blocks
        return {(m, str(size), str(count)): 1 for (m, size), count in blocks.items()}

    readers = (
        (RUNNING, running_now), (WAITING, waiting_now), (KV_USAGE, usage), (CACHE_CONFIG, config),
    )  # fmt: skip
    return [gauge(spec, read, registry) for spec, read in readers]
