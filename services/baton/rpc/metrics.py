"""The metrics of every process, by name, and where their values go.

One registry a process. Counters and histograms are added to where things happen; gauges, and counts
that somebody keeps anyway, are read from a callable when somebody scrapes, so that they are never
out of date and cost nothing in between.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from baton.core.observe.timings import BOUNDS_S, Timings
from baton.rpc.scrape import MetricsServer, serve

log = logging.getLogger(__name__)

# Else every counter and histogram has a gauge beside it that tells when it began.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

GaugeReader = Callable[[], Mapping[tuple[str, ...], float]]
"""Label values (in the order of the spec's labels) to value. Called on the scrape's thread."""

TimingsReader = Callable[[], Mapping[tuple[str, ...], Timings]]
"""Like GaugeReader, for times that are kept as `Timings`."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. Names of counters alone end in _total, those of times in _seconds.

    labels: each has few values, that no client chooses.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_SIZES = tuple(float(1 << power) for power in range(15))
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)

BLOCKS = Spec("baton_blocks", "Blocks of the pool.", ("state",))
SWAP_BLOCKS = Spec(
    "baton_swap_blocks", "Blocks of memory beside the pool for preempted KV.", ("place", "state")
)
BUFFERS = Spec("baton_slots", "Staging buffers for KV chunks.", ("ring", "state"))
ATTEMPTS_HERE = Spec("baton_attempts", "Attempts on this worker, whatever they wait for.")
SEQUENCES = Spec("baton_sequences", "Sequences on this worker.", ("state",))
STREAMS = Spec("baton_streams", "Shared streams that are open.", ("kind",))
WAITING_TOKENS = Spec("baton_waiting_tokens", "Prompt tokens that wait to be computed.")
WORKERS = Spec(
    "baton_workers",
    "Workers by what they say of themselves; silent and gone ones say nothing.",
    ("role", "state"),
)
REQUESTS_OPEN = Spec("baton_requests_open", "Requests that have not ended.")
TASKS = Spec("baton_tasks", "Tasks of the process's event loop.")
LEAKS = Spec(
    "baton_leaks",
    "Things held while no request, attempt or probe is here; what stays is owned by nobody.",
    ("kind",),
)
PROCESS = Spec("baton_process_info", "Always 1. What this process is.", ("role", "version"))
LOAD_PROGRESS = Spec("baton_load_progress", "Share of the weights that is loaded; 1 once ready.")
READY = Spec("baton_ready_seconds", "From the process's start until it first took work.")
STARTUP = Spec("baton_startup_seconds", "Time of one part of the process's start.", ("part",))

TLS_STALE = Spec(
    "baton_tls_stale", "Sets of certificate files that were replaced by ones that cannot be used."
)
API_KEYS = Spec("baton_api_keys", "API keys that are accepted.")
API_KEYS_STALE = Spec(
    "baton_api_keys_stale", "1 while the file of API keys cannot be used and an older state is."
)
UNAUTHENTICATED = Spec(
    "baton_unauthenticated_total", "Calls without a key that is known.", ("face",)
)

REQUESTS = Spec("baton_requests_total", "Requests that ended.", ("outcome",))
REMOTE_PREFILL = Spec(
    "baton_remote_prefill_total", "Attempts whose KV a prefill worker computed and handed over."
)
LOCAL_PREFILL = Spec("baton_local_prefill_total", "Attempts whose KV their decode worker computed.")
PROMPT_TOKENS = Spec("baton_prompt_tokens_total", "Prompt tokens of accepted requests.")
ENCODED_TOKENS = Spec("baton_encoded_tokens_total", "Tokens that a tokenizer made of prompts.")
CACHED_TOKENS = Spec("baton_cached_tokens_total", "Input tokens found in a prefix cache.")
CACHE_LOOKUPS = Spec(
    "baton_tokenizer_cache_lookups_total",
    "Long texts looked up among encoded conversations.",
    ("outcome",),
)
PREFILL_TOKENS = Spec("baton_prefill_tokens_total", "Input tokens whose KV was computed.")
DECODE_TOKENS = Spec("baton_decode_tokens_total", "Output tokens sampled.")
PREEMPTIONS = Spec(
    "baton_preemptions_total",
    "Sequences that gave up their blocks and wait again, by what became of their KV.",
    ("kind",),
)
HANDOVERS = Spec("baton_handovers_total", "Hand-overs that ended.", ("side", "outcome"))
HANDOVER_BYTES = Spec("baton_handover_bytes_total", "KV bytes moved by hand-overs.", ("side",))
KV_SOURCE = Spec(
    "baton_kv_source_total", "Attempts by where their KV really came from.", ("source",)
)
KV_CHUNKS = Spec("baton_parcels_total", "KV chunks given, or collected and verified.", ("side",))
KV_CHUNKS_REFUSED = Spec(
    "baton_parcels_refused_total",
    "KV chunks that did not verify: not the announced one, another header, or other bytes.",
    ("kind",),
)
TRANSFER_ERRORS = Spec(
    "baton_transfer_errors_total", "KV chunks that could not be read, or in time."
)
PEERS_MET = Spec("baton_peers_met_total", "Meetings with senders that ended well.")
PROBES = Spec("baton_probes_total", "Probes of ways for KV.", ("path", "outcome"))
TEXT_BYTES = Spec("baton_text_bytes_total", "UTF-8 bytes of text made from tokens.")

TIME_TO_FIRST_TOKEN = Spec(
    "baton_time_to_first_token_seconds", "From arrival to the first token.", buckets=_LATENCY
)
REQUEST_TIME = Spec("baton_request_seconds", "From arrival to the last token.", buckets=_LATENCY)
INTER_TOKEN = Spec("baton_inter_token_seconds", "Between tokens of a choice.", buckets=BOUNDS_S)
STAGE_TIME = Spec(
    "baton_stage_seconds", "Time of one stage of a request.", ("stage",), buckets=_LATENCY
)
STEP_TIME = Spec("baton_step_seconds", "Time of one step.", buckets=_STEP)
STEP_TOKENS = Spec("baton_step_tokens", "Positions that one step computed.", buckets=_SIZES)
STEP_SEQUENCES = Spec(
    "baton_step_sequences", "Sequences that one step computed for.", buckets=_SIZES[:11]
)
HANDOVER_STAGE = Spec(
    "baton_handover_stage_seconds",
    "Time of one stage of a hand-over, or of one of its KV chunks.",
    ("side", "stage"),
    buckets=BOUNDS_S,
)


@functools.cache
def counter(spec: Spec, registry: CollectorRegistry = REGISTRY) -> Counter:
    """The counter of a spec; always the same one."""
    return Counter(spec.name, spec.help, spec.labels, registry=registry)


@functools.cache
def histogram(spec: Spec, registry: CollectorRegistry = REGISTRY) -> Histogram:
    """The histogram of a spec; always the same one."""
    return Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=spec.buckets)


def gauge(
    spec: Spec, read: GaugeReader, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Reads a gauge from `read` at every scrape, until the returned function is called.

    Readers of the same spec are added up.
    """
    readers = _gauges(registry).readers[spec]
    readers.append(read)
    return lambda: readers.remove(read)


def totals(
    spec: Spec, read: GaugeReader, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Like `gauge`, for counts that somebody keeps and that never go down."""
    readers = _gauges(registry).totals[spec]
    readers.append(read)
    return lambda: readers.remove(read)


def tell_role(role: str) -> None:
    """Says on /metrics what this process is."""
    labels = role, version("baton")
    gauge(PROCESS, lambda: {labels: 1})


def timings(
    spec: Spec, read: TimingsReader, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Shows as a histogram what `read` gives at every scrape, until the returned function is
    called. Only one reader of a spec may tell of the same labels.
    """
    readers = _gauges(registry).timings[spec]
    readers.append(read)
    return lambda: readers.remove(read)


def serve_metrics(listen: str, registry: CollectorRegistry = REGISTRY) -> MetricsServer:
    """Serves GET and HEAD /metrics at "host:port" until closed.

    Raises PortInUse or InvalidArgument naming `metrics_listen`.
    """
    return serve(listen, registry)


class _Gauges(Collector):
    """All that is read when somebody scrapes, of one registry."""

    def __init__(self) -> None:
        self.readers: defaultdict[Spec, list[GaugeReader]] = defaultdict(list)
        self.totals: defaultdict[Spec, list[GaugeReader]] = defaultdict(list)
        self.timings: defaultdict[Spec, list[TimingsReader]] = defaultdict(list)

    def collect(self) -> Iterable[Metric]:
        for spec, readers in list(self.readers.items()):
            family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, value in _sum(spec, readers).items():
                family.add_metric(labels, value)
            yield family
        for spec, readers in list(self.totals.items()):
            counted = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, value in _sum(spec, readers).items():
                counted.add_metric(labels, value)
            yield counted
        for spec, kept in list(self.timings.items()):
            histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
            for read in list(kept):
                for labels, times in read().items():
                    histogram.add_metric(labels, _buckets(times), times.total_s)
            yield histogram


def _buckets(times: Timings) -> list[tuple[str, float]]:
    bounds = (*map(str, BOUNDS_S), "+Inf")
    return list(zip(bounds, accumulate(times.counts), strict=True))


@functools.cache
def _gauges(registry: CollectorRegistry) -> _Gauges:
    gauges = _Gauges()
    registry.register(gauges)
    return gauges


def _sum(spec: Spec, readers: Iterable[GaugeReader]) -> dict[tuple[str, ...], float]:
    """A reader that fails leaves its values out: one bad gauge must not hide all others."""
    total: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for read in list(readers):
        try:
            values = read()
        except Exception:
            log.exception("%s cannot be read", spec.name)
            continue
        for labels, value in values.items():
            total[labels] += value
    return total
