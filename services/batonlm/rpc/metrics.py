"""The metrics of every process, by name, and the port that serves them.

There is one registry per process. Counters and histograms are updated where events happen. Gauges,
and counts that the process keeps anyway, are read from a callable at each scrape: they are never
out of date and cost nothing in between. Scrapes are answered on separate threads, also while the
event loop is busy, and need no key. On loopback, only Host headers with this machine's own names
are accepted, so that no web page can read the metrics (DNS rebinding).
"""

from __future__ import annotations

import functools
import logging
import math
import selectors
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from itertools import accumulate
from threading import BoundedSemaphore, Thread
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from batonlm.core.observe.timings import BOUNDS_S, Durations
from batonlm.rpc.address import AllowedHosts, is_loopback, join, refusal, split

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Simultaneous connections; each takes a thread. Further ones are closed."""


_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Serves until closed."""

    def __init__(self, server: ThreadingHTTPServer, host: str) -> None:
        self.address = join(host, server.server_port)
        """The actual "host:port"."""
        self._server = server
        self._thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port. Idempotent; returns when the thread has ended."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve(listen: str, registry: CollectorRegistry, field: str = "metrics_listen") -> MetricsServer:
    """Serves a registry at "host:port". Raises PortInUse or InvalidArgument naming the field."""
    host, port = split(listen, field)
    server_class = _Server6 if ":" in host else BoundedServer
    hosts = AllowedHosts(listen) if is_loopback(host) else None
    handler = type("Handler", (_Handler,), {"registry": registry, "hosts": hosts})
    try:
        server = server_class((host, port), handler)
    except OSError as error:
        raise refusal(error, listen, field) from None
    return MetricsServer(server, host)


class BoundedServer(ThreadingHTTPServer):
    """With at most MAX_CONNECTIONS threads, one for each connection. It sleeps until a connection
    or `shutdown` comes, where the base class looks twice a second whether it should end."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS
    timeout = 0
    """Of `handle_request`, which is called when there is one."""

    def __init__(self, *arguments: Any) -> None:
        self._room = BoundedSemaphore(MAX_CONNECTIONS)
        self._open, self._closed = socket.socketpair()
        super().__init__(*arguments)

    def serve_forever(self, poll_interval: float = math.inf) -> None:
        """Until `shutdown`. poll_interval: not used."""
        with selectors.DefaultSelector() as selector:
            for readable in (self.socket, self._closed):
                selector.register(readable, selectors.EVENT_READ)
            while all(key.fileobj is self.socket for key, _ in selector.select()):
                self.handle_request()

    def shutdown(self) -> None:
        """Ends `serve_forever`, now or when it begins, without waiting for that."""
        self._open.close()

    def server_close(self) -> None:
        """Frees the port, once `serve_forever` has ended. Idempotent."""
        super().server_close()
        self._open.close()
        self._closed.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            self.answer(request, client_address)
        finally:
            self._room.release()

    def answer(self, request: Any, client_address: Any) -> None:
        """Answers one connection, on a thread of its own."""
        super().process_request_thread(request, client_address)

    def server_bind(self) -> None:
        """Binds without looking up the machine's own name, which may take seconds."""
        # SO_REUSEADDR only skips TIME_WAIT: a port that is in use is still refused.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]


class _Server6(BoundedServer):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    hosts: AllowedHosts | None
    timeout = READ_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body_follows=True)

    def do_HEAD(self) -> None:
        self._answer(body_follows=False)

    def _answer(self, *, body_follows: bool) -> None:
        asked = [host.encode("latin-1", "replace") for host in self.headers.get_all("Host", [])]
        if self.hosts is not None and not self.hosts.allow(asked):
            self._send(421, _TEXT, b"this machine's own names only\n", body_follows)
            return
        if self.path.partition("?")[0] != "/metrics":
            self._send(404, _TEXT, b"see /metrics\n", body_follows)
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._send(200, content_type, encode(self.registry), body_follows)

    def _send(self, code: int, content_type: str, body: bytes, body_follows: bool) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body_follows:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing: scrapes are not logged."""


# Otherwise every counter and histogram comes with a gauge of its creation time.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

GaugeReader = Callable[[], Mapping[tuple[str, ...], float]]
"""Returns values by label values (in the order of the spec's labels). Called on the scrape's
thread."""

TimingsReader = Callable[[], Mapping[tuple[str, ...], Durations]]
"""Like GaugeReader, for times that are kept as `Durations`."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The declaration of one metric."""

    name: str
    """Names of counters end in _total, those of times in _seconds."""
    help: str
    labels: tuple[str, ...] = ()
    """Each label has few values, and no client chooses them."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_SIZES = tuple(float(1 << power) for power in range(15))
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)

BLOCKS = Spec("baton_blocks", "Blocks of the pool.", ("state",))
SWAP_BLOCKS = Spec(
    "baton_swap_blocks", "Blocks of memory beside the pool for preempted KV.", ("place", "state")
)
BUFFERS = Spec("baton_slots", "Staging buffers for KV chunks.", ("ring", "state"))
ATTEMPTS_HERE = Spec("baton_attempts", "Attempts on this worker, whatever they wait for.")
ADAPTERS = Spec("baton_adapters", "LoRA adapters that requests may name on this worker.")
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
VECTOR_TOKENS = Spec("baton_vector_tokens_total", "Tokens that encode workers computed.")
CACHED_TOKENS = Spec("baton_cached_tokens_total", "Input tokens found in a prefix cache.")
CACHE_LOOKUPS = Spec(
    "baton_tokenizer_cache_lookups_total",
    "Long texts looked up among encoded conversations.",
    ("outcome",),
)
PREFIX_TOKENS = Spec(
    "baton_prefix_collected_tokens_total",
    "Input tokens whose KV came from another worker's prefix cache, by that worker's role. They "
    "are among those found in this worker's.",
    ("source",),
)
PREFIX_COLLECTS = Spec(
    "baton_prefix_collects_total",
    "Prefixes that were to come from another worker's cache, by how that ended.",
    ("outcome",),
)
RESTORED_TOKENS = Spec(
    "baton_prefix_restored_tokens_total",
    "Input tokens whose KV came back from a tier. They are among those found in the prefix cache.",
    ("tier",),
)
TIER_READS = Spec(
    "baton_prefix_tier_reads_total",
    "Units of 64 tokens that were to come back from a tier, by how that ended.",
    ("tier", "outcome"),
)
TIER_WRITES = Spec(
    "baton_prefix_tier_writes_total",
    "Units of 64 tokens that were to be written to a tier, by how that ended.",
    ("tier", "outcome"),
)
TIER_BYTES = Spec("baton_prefix_tier_bytes", "Bytes that are known to be in a tier.", ("tier",))
PREFILL_TOKENS = Spec("baton_prefill_tokens_total", "Input tokens whose KV was computed.")
DECODE_TOKENS = Spec("baton_decode_tokens_total", "Output tokens sampled.")
PREEMPTIONS = Spec(
    "baton_preemptions_total",
    "Sequences that gave up their blocks and wait again, by what became of their KV.",
    ("kind",),
)
DRAFTS = Spec(
    "baton_drafts_total",
    "Drafts that were computed, and those of them that were right, by where they came from.",
    ("kind", "outcome"),
)
SAVED_STEPS = Spec(
    "baton_saved_steps_total",
    "Steps that sequences would have taken more without drafts, by where these came from.",
    ("kind",),
)
ORPHANS = Spec(
    "baton_orphaned_sequences",
    "Sequences that are kept for another router because theirs is gone, ended ones included.",
)
ORPHANS_TOTAL = Spec(
    "baton_orphans_total",
    "Sequences whose router is gone that were kept beyond the resume window; that another router "
    "adopted, within that window too; that expired; or that were dropped, for room.",
    ("outcome",),
)
ADOPTIONS_REFUSED = Spec(
    "baton_adoptions_refused_total",
    "Attempts that were to go on with a sequence whose router is gone: it was not here (gone), or "
    "is another request's (differs).",
    ("reason",),
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
    """The counter of a spec, created once per registry."""
    return Counter(spec.name, spec.help, spec.labels, registry=registry)


@functools.cache
def histogram(spec: Spec, registry: CollectorRegistry = REGISTRY) -> Histogram:
    """The histogram of a spec, created once per registry."""
    return Histogram(spec.name, spec.help, spec.labels, registry=registry, buckets=spec.buckets)


def gauge(
    spec: Spec, read: GaugeReader, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Reads a gauge from `read` at every scrape, until the returned function is called.

    Values of several readers of one spec are added up.
    """
    readers = _gauges(registry).readers[spec]
    readers.append(read)
    return lambda: readers.remove(read)


def totals(
    spec: Spec, read: GaugeReader, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Like `gauge`, for counters kept elsewhere, which never decrease."""
    readers = _gauges(registry).totals[spec]
    readers.append(read)
    return lambda: readers.remove(read)


def tell_role(role: str) -> None:
    """Exports role and version of this process on /metrics."""
    labels = role, version("batonlm")
    gauge(PROCESS, lambda: {labels: 1})


def timings(
    spec: Spec, read: TimingsReader, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Exports what `read` returns at every scrape as a histogram, until the returned function is
    called. Several readers of one spec must not return the same label values.
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
    """All metrics of one registry that are read at each scrape."""

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


def _buckets(times: Durations) -> list[tuple[str, float]]:
    bounds = (*map(str, BOUNDS_S), "+Inf")
    return list(zip(bounds, accumulate(times.counts), strict=True))


@functools.cache
def _gauges(registry: CollectorRegistry) -> _Gauges:
    gauges = _Gauges()
    registry.register(gauges)
    return gauges


def _sum(spec: Spec, readers: Iterable[GaugeReader]) -> dict[tuple[str, ...], float]:
    """The readers' values, added up by labels. The values of a reader that raises are left out and
    the exception is logged: one bad gauge must not hide all others."""
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


# Metrics under vLLM's names, for endpoint pickers of the Gateway API Inference Extension,
# dashboards and autoscalers that were made for vLLM. `vllm:lora_requests_info` is left out, see
# docs/gateway.md.

VLLM_RUNNING = Spec(
    "vllm:num_requests_running", "Requests that are being computed.", ("model_name",)
)
VLLM_WAITING = Spec(
    "vllm:num_requests_waiting", "Requests that wait to be computed.", ("model_name",)
)
VLLM_KV_USAGE = Spec(
    "vllm:kv_cache_usage_perc", "Share of the KV blocks that are in use, from 0 to 1.",
    ("model_name",),
)  # fmt: skip
VLLM_CACHE_CONFIG = Spec(
    "vllm:cache_config_info",
    "Always 1. How many KV blocks there are, and how many positions each has.",
    ("model_name", "block_size", "num_gpu_blocks"),
)

_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
VLLM_FIRST_TOKEN = Spec(
    "vllm:time_to_first_token_seconds", "From arrival to the first token.", ("model_name",),
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
     80, 160),
)  # fmt: skip
VLLM_INTER_TOKEN = Spec(
    "vllm:inter_token_latency_seconds", "Between tokens of a choice.", ("model_name",), BOUNDS_S
)
VLLM_PER_TOKEN = Spec(
    "vllm:request_time_per_output_token_seconds",
    "Mean time of each token behind the first of a request.",
    ("model_name",),
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
VLLM_REQUEST_TIME = Spec(
    "vllm:e2e_request_latency_seconds", "From arrival to the last token.", ("model_name",),
    _REQUEST_S,
)  # fmt: skip
VLLM_PROMPT_TOKENS = Spec(
    "vllm:prompt_tokens_total", "Prompt tokens of accepted requests.", ("model_name",)
)
VLLM_OUTPUT_TOKENS = Spec(
    "vllm:generation_tokens_total", "Output tokens of requests that ended.", ("model_name",)
)
VLLM_SUCCEEDED = Spec(
    "vllm:request_success_total",
    "Choices that ended well, by why they ended.",
    ("model_name", "finished_reason"),
)
