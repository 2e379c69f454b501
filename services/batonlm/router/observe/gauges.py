"""The gauges of a router: its requests, its workers, and the number of workers that it wants.

Gauges are read from a callable at every scrape, so they are never outdated. Running and waiting
requests are this router's own, so a sum over routers counts each request once. Workers report the
work of all routers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic

from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerSnapshot, WorkerSpeed
from batonlm.core.routing.scaling import (
    Bounds,
    DecodeSignals,
    PrefillSignals,
    ScalingPolicy,
    ScalingRule,
)
from batonlm.router.config import RouterConfig
from batonlm.router.observe.metrics import Arrived, RouterMetrics
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.request.response_store import Dropped, ResponseStore
from batonlm.router.workers.discovery import Replicas
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc.metrics import (
    LEAKS,
    REGISTRY,
    REQUESTS_OPEN,
    VLLM_CACHE_CONFIG,
    VLLM_KV_USAGE,
    VLLM_RUNNING,
    VLLM_WAITING,
    WORKERS,
    GaugeReader,
    Spec,
    gauge,
    totals,
)

QUEUED = Spec("baton_queued_requests", "Requests that were let in and wait for their turn.")
QUEUED_TOKENS = Spec("baton_queued_tokens", "What requests that wait are expected to come to.")
CONCURRENCY_LIMITER = Spec(
    "baton_flight_window_tokens", "Tokens that may be with workers without a first token."
)
LOOP_STALLS = Spec(
    "baton_loop_stalls_total",
    "Times that the event loop did not come round for half a second: stopped, or without CPU.",
)
LOOP_STALLED = Spec(
    "baton_loop_stalled_seconds_total", "Time in which the event loop did not come round."
)
REPLICAS = Spec("baton_routers", "Live routers, as this one knows: budgets are shared by them.")
GONE_BACK = Spec(
    "baton_alias_gone_back",
    "1 for a name whose former weights count on this router because a model did badly.",
    ("alias",),
)
INDEX_UNITS = Spec(
    "baton_prefix_index_units",
    "Cached units of 64 tokens known of the workers of a role.",
    ("role",),
)
CACHE_GAPS = Spec(
    "baton_cache_event_gaps_total", "How often cache events of a worker were missing.", ("role",)
)
STANDBYS = Spec(
    "baton_standbys", "Ready workers that stand by, and whether they get work.", ("role", "state")
)
MODEL_WORKERS = Spec(
    "baton_model_workers",
    "Workers of a model that accept work; 0 too for a model of `model` that has none.",
    ("model", "role"),
)
RESPONSES = Spec("baton_stored_responses", "Responses that clients may come back to.")
RESPONSE_BYTES = Spec("baton_stored_response_bytes", "Bytes of these, with their input.")
RESPONSES_DROPPED = Spec(
    "baton_responses_dropped_total",
    "Responses that were to be stored, and are not, or not any more, by why.",
    ("reason",),
)
POOL_TARGETS = Spec(
    "baton_pool_target_workers",
    "How many workers the rule of core/scaling asks for, by what this router sees.",
    ("model", "role"),
)

Readers = dict[Spec, GaugeReader]


class RouterUse:
    """The current work of a router's requests and of its decode workers. Counters are by model
    name."""

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
        """Decode workers that have reported, each with its model's name."""
        for worker in self._fleet.decodes.workers():
            if worker.load is not None and worker.description.num_blocks:
                yield worker.model.name, worker.description, worker.load

    def waiting_tokens(self) -> int:
        """Prompt tokens that wait at workers to be computed."""
        pools = (self._fleet.prefills, self._fleet.decodes)
        loads = [worker.load for pool in pools for worker in pool.workers()]
        return sum(load.waiting_tokens for load in loads if load is not None)


def watch(
    pipeline: Pipeline,
    fleet: Fleet,
    config: RouterConfig,
    metrics: RouterMetrics,
    replicas: Replicas,
    store: ResponseStore,
) -> list[Callable[[], None]]:
    """Reads all gauges at every scrape, until the returned functions are called."""
    gate = pipeline.gate
    caches = {
        pool.role: pool.index for pool in (fleet.prefills, fleet.decodes) if pool.index is not None
    }
    readers: Readers = {
        REQUESTS_OPEN: lambda: {(): pipeline.num_requests},
        LEAKS: lambda: leaks(pipeline.num_requests, pipeline.held),
        QUEUED: lambda: {(): len(gate.queue)},
        QUEUED_TOKENS: lambda: {(): gate.queue.tokens},
        CONCURRENCY_LIMITER: lambda: {(): gate.dispatcher.window.limit},
        GONE_BACK: pipeline.gone_back,
        REPLICAS: lambda: {(): replicas.live_replicas()},
        WORKERS: lambda: {
            (pool.role, state): number
            for pool in fleet.pools
            for state, number in pool.states().items()
        },
        MODEL_WORKERS: lambda: model_workers(fleet, config.model),
        STANDBYS: lambda: {
            (pool.role, state): number
            for pool in (fleet.prefills, fleet.decodes)
            for state, number in pool.standbys().items()
        },
        INDEX_UNITS: lambda: {(role,): len(index) for role, index in caches.items()},
        RESPONSES: lambda: {(): store.held()[0]},
        RESPONSE_BYTES: lambda: {(): store.held()[1]},
        **vllm_readers(pipeline, fleet),
    }
    if config.target_first_token_ms:
        readers[POOL_TARGETS] = pool_targets(pipeline, fleet, config, metrics, replicas).read
    counts: Readers = {
        RESPONSES_DROPPED: lambda: {(reason,): store.dropped[reason] for reason in Dropped},
        CACHE_GAPS: lambda: {(role,): index.gaps for role, index in caches.items()},
        LOOP_STALLS: lambda: {(): fleet.awake.stalls},
        LOOP_STALLED: lambda: {(): fleet.awake.stalled_s},
    }
    stops = [gauge(spec, read, REGISTRY) for spec, read in readers.items()]
    return stops + [totals(spec, read, REGISTRY) for spec, read in counts.items()]


def model_workers(fleet: Fleet, expected: Iterable[str]) -> dict[tuple[str, ...], float]:
    """Returns how many workers serve, by model and role. expected: models that may have none."""
    found = Counter[tuple[str, ...]](dict.fromkeys(((name, "decode") for name in expected), 0))
    for pool in (fleet.prefills, fleet.decodes):
        found.update((worker.model.name, pool.role) for worker in pool.serving())
    return dict(found)


def leaks(num_requests: int, held: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Returns what requests hold, by kind, when there are no requests, which is a leak. Just after
    the last request it may include what is being freed."""
    return {(kind,): 0 if num_requests else number for kind, number in held.items()}


def vllm_readers(pipeline: Pipeline, fleet: Fleet) -> Readers:
    """Returns a router's own load and its decode pool's memory under vLLM's names. KV covers all
    decode workers, because every router uses them all."""
    use = RouterUse(pipeline, fleet)

    def by_model(counted: Counter[str]) -> dict[tuple[str, ...], float]:
        models = {model.name for model in pipeline.models()}
        return {(model,): counted[model] for model in models | counted.keys()}

    def usage() -> dict[tuple[str, ...], float]:
        blocks, free = Counter[str](), Counter[str]()
        for model, description, load in use.decodes():
            blocks[model] += description.num_blocks
            free[model] += load.free_blocks
        return {(model,): 1 - free[model] / blocks[model] for model in blocks}

    def cache_config() -> dict[tuple[str, ...], float]:
        blocks = Counter[tuple[str, int]]()
        for model, description, _ in use.decodes():
            blocks[model, description.block_size] += description.num_blocks
        return {(model, str(size), str(count)): 1 for (model, size), count in blocks.items()}

    return {
        VLLM_RUNNING: lambda: by_model(use.running()),
        VLLM_WAITING: lambda: by_model(use.waiting()),
        VLLM_KV_USAGE: usage,
        VLLM_CACHE_CONFIG: cache_config,
    }


MOST = 1000
"""More workers than any fleet has; autoscalers have bounds of their own."""

PROMPT = 1024
"""Prompt tokens from which the time per token is computed."""

HOLD_S = 60.0
"""A target stays for so long, so that none is missed between two scrapes. For how long a pool then
keeps its size is its autoscaler's to say."""

Snapshots = Callable[[], Sequence[WorkerSnapshot]]


def pool_targets(
    pipeline: Pipeline,
    fleet: Fleet,
    config: RouterConfig,
    metrics: RouterMetrics,
    replicas: Replicas,
) -> PoolTargets:
    """Returns the targets for `baton_pool_target_workers`."""
    policy = ScalingPolicy(
        config.target_first_token_ms / 1000,
        config.target_between_tokens_ms / 1000,
        lead_s=config.target_startup_s,
        hold_s=HOLD_S,
    )
    return PoolTargets(
        policy,
        fleet.prefills.snapshots,
        fleet.decodes.snapshots,
        lambda: ((entry.item.kind[0], entry.item.input_tokens) for entry in pipeline.gate.queue),
        metrics.arrived,
        replicas.live_replicas,
        monotonic,
        config.model if config.idle_timeout_s else (),
        config.idle_timeout_s,
        pipeline.held_by_model,
    )


class PoolTargets:
    """The workers of each pool that `ScalingRule` wants for each model, from what this router sees.

    It starts and stops no worker; an autoscaler (an HPA, KEDA) does. It samples whenever it is
    read, so it must be read regularly to see growth. Every other router is assumed to receive, to
    have waiting and to refuse as much as this one; workers report what they hold. Refused requests
    are taken to be like those that were accepted last.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        prefills: Snapshots,
        decodes: Snapshots,
        waiting: Callable[[], Iterable[tuple[str, int]]],
        arrived: Arrived,
        routers: Callable[[], int],
        now: Callable[[], float],
        expected: Sequence[str] = (),
        idle_s: float = 0.0,
        held: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """waiting: model and input tokens of each attempt that waits here. routers: the number of
        live routers. now: in seconds, monotonic. expected: models that are known without workers,
        and need none after idle_s without requests. held: `Pipeline.held_by_model`."""
        self._policy = policy
        self._prefills, self._decodes, self._waiting = prefills, decodes, waiting
        self._arrived, self._routers, self._now = arrived, routers, now
        self._expected, self._idle_s, self._held = expected, idle_s, held
        self._refused = arrived.refused
        self._models: dict[str, _ModelTargets] = {}

    def read(self) -> dict[tuple[str, ...], float]:
        """Returns the targets by model and role, without pools about which nothing is known yet.
        Models without workers are forgotten, but for those that are expected."""
        now, routers = self._now(), self._routers()
        prefills, decodes = _by_model(self._prefills()), _by_model(self._decodes())
        waiting: dict[str, list[int]] = {}
        for model, tokens in self._waiting():
            waiting.setdefault(model, []).append(tokens)
        held = self._held()
        names = sorted(prefills.keys() | decodes.keys() | set(self._expected))
        self._models = {
            name: self._models.get(name) or _ModelTargets(self._policy, self._arrived, name)
            for name in names
        }
        came = {name: one.accepted(self._arrived) for name, one in self._models.items()}
        refused, self._refused = self._arrived.refused - self._refused, self._arrived.refused
        # Whoever is refused unread names no model: refusals are shared out as requests are.
        total = sum(came.values())
        found: dict[tuple[str, ...], float] = {}
        for name, one in self._models.items():
            share = came[name] / total if total else 1 / len(names)
            one.refuse(refused * share)
            workers = prefills.get(name, []), decodes.get(name, [])
            targets = one.targets(now, routers, *workers, waiting.get(name, []))
            if name in self._expected:
                asked = came[name] + held.get(name, 0) + len(waiting.get(name, []))
                needed = one.is_needed(now, asked, *workers, self._idle_s)
                targets = targets if needed else {"prefill": 0, "decode": 0}
                if needed:
                    targets.setdefault("decode", 1)
            found |= {(name, role): float(target) for role, target in targets.items()}
        return found


class _ModelTargets:
    """The targets of one model's pools. Counts are of this router until `targets` multiplies."""

    def __init__(self, policy: ScalingPolicy, arrived: Arrived, model: str) -> None:
        self._model = model
        self._rule = ScalingRule(policy, Bounds(0, MOST), Bounds(1, MOST))
        self._requests = arrived.requests[model]
        self._tokens = arrived.prompt_tokens[model]
        self._new_tokens = self._mean_tokens = 0.0
        self._refused = self._placed = self._arrived_s = 0.0
        self._counted_placed = arrived.placed[model]
        self._needed_at: float | None = None

    def is_needed(
        self,
        now: float,
        asked: int,
        prefills: Sequence[WorkerSnapshot],
        decodes: Sequence[WorkerSnapshot],
        idle_s: float,
    ) -> bool:
        """Returns whether the model had work within the last idle_s. Workers that this router finds
        when it starts count as work: it cannot know what they did before. asked: new requests and
        those that wait here."""
        busy = any(
            one.load.running_sequences + one.load.waiting_sequences for one in (*prefills, *decodes)
        )
        if asked or busy or (self._needed_at is None and decodes):
            self._needed_at = now
        return self._needed_at is not None and now - self._needed_at < idle_s

    def accepted(self, arrived: Arrived) -> int:
        """Takes what was accepted and placed since the last call; returns the number of accepted
        requests."""
        requests, tokens = arrived.requests[self._model], arrived.prompt_tokens[self._model]
        came, self._new_tokens = requests - self._requests, float(tokens - self._tokens)
        if came:
            self._mean_tokens = self._new_tokens / came
        self._requests, self._tokens = requests, tokens
        self._placed = arrived.placed[self._model] - self._counted_placed
        return came

    def refuse(self, requests: float) -> None:
        """Adds requests that were refused meanwhile."""
        self._refused += requests
        self._new_tokens += requests * self._mean_tokens

    def targets(
        self,
        now: float,
        routers: int,
        prefills: Sequence[WorkerSnapshot],
        decodes: Sequence[WorkerSnapshot],
        waiting: Sequence[int],
    ) -> dict[str, int]:
        """waiting: input tokens of each attempt that waits in this router."""
        found: dict[str, int] = {}
        signals: DecodeSignals | None = None
        if decodes:
            signals = replace(
                _decode(decodes),
                placed=routers * self._placed,
                refused=routers * self._refused,
                waiting=routers * len(waiting),
                prefills=len(prefills),
            )
            found["decode"] = self._rule.decode(now, signals)
        # Without a prefill worker, decode workers know how long prompts take.
        speed = _speed(prefills) or _speed(decodes)
        if speed is not None:
            held = [] if signals is not None and signals.is_full else waiting
            queued = routers * sum(held) + sum(one.load.waiting_tokens for one in prefills)
            prompts = routers * len(held) + sum(one.load.waiting_sequences for one in prefills)
            self._arrived_s += routers * self._new_tokens * speed.queue_s(PROMPT, 1) / PROMPT
            self._new_tokens = 0.0
            prefill = PrefillSignals(self._arrived_s, speed.queue_s(queued, prompts))
            found["prefill"] = self._rule.prefill(now, prefill)
        return found


def _by_model(workers: Sequence[WorkerSnapshot]) -> dict[str, list[WorkerSnapshot]]:
    found: dict[str, list[WorkerSnapshot]] = {}
    for one in workers:
        found.setdefault(one.model.name, []).append(one)
    return found


def _speed(workers: Sequence[WorkerSnapshot]) -> WorkerSpeed | None:
    """Returns the speed of the median worker."""
    known = [one.load.speed for one in workers if one.load.speed.prefills]
    known.sort(key=lambda speed: speed.queue_s(PROMPT, 1))
    return known[len(known) // 2] if known else None


def _decode(workers: Sequence[WorkerSnapshot]) -> DecodeSignals:
    """Returns the total that all workers hold, and the median worker."""
    known = sorted((one.load.speed for one in workers), key=lambda speed: speed.step_s)
    return DecodeSignals(
        sum(one.load.running_sequences + one.load.waiting_sequences for one in workers),
        sum((one.num_blocks - one.load.free_blocks) * one.block_size for one in workers),
        known[len(known) // 2],
        min(one.num_blocks * one.block_size for one in workers),
        min(one.max_sequences for one in workers),
        len(workers),
    )
