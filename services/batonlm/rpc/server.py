"""One process's gRPC server: its services, health, reflection and the progress of its start.

`Probes` opens the ports for health and /metrics at once, so that a process that still starts does
not look dead. Health is plain text there even when the process uses TLS: probes present no
certificate. `ProcessServer.start` binds the port for work when everything is loaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf.internal import api_implementation
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from batonlm.core.errors import Internal, NotFound, Overloaded, Unavailable
from batonlm.rpc import metrics
from batonlm.rpc.address import PortInUse, check_listen, is_loopback, join, split
from batonlm.rpc.channels import INTERNAL_MESSAGE_BYTES, LONGEST_CALL_S, Arguments, bind
from batonlm.rpc.errors import Check, ErrorInterceptor
from batonlm.rpc.metrics import REGISTRY, TASKS, MetricsServer, gauge, serve_metrics
from batonlm.rpc.peers import check_caller, check_token
from batonlm.rpc.tls import Certificates

log = logging.getLogger(__name__)

PUBLIC_RECEIVE_BYTES = 2**20
PUBLIC_STREAMS = 100

_SERVER: Arguments = (
    # With SO_REUSEPORT two servers on one port would share its connections at random; without it
    # the second one fails.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Below the clients' interval: with gRPC's default of 300 s the server answers pings with GOAWAY
    # too_many_pings, which ends every call of the connection. (The name has no "recv" in it.)
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The event loop takes up one call a turn. gRPC drops those that waited for it longer than 30 s,
    # and their callers read CANCELLED; here a call waits until its own deadline.
    ("grpc.server_max_unrequested_time_in_server", int(LONGEST_CALL_S)),
)

INTERNAL_SERVER: Arguments = (
    *_SERVER,
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
)
"""Streams are not limited: a cancel must never wait behind work. Admission bounds the work."""


@dataclass(frozen=True, slots=True)
class PublicLimits:
    """Limits on the connections of a public port."""

    max_connections: int = 4096
    idle_s: float = 75.0
    """A connection without calls is closed after so long."""
    max_age_s: float = 8.0
    """An older connection takes no new calls, and its client opens another one, possibly to another
    server. gRPC varies it by a tenth."""
    last_calls_s: float = 3600.0
    """The time that running calls get from then on."""
    handshake_s: float = 10.0
    """The time until HTTP/2's handshake must be complete."""
    streams: int = PUBLIC_STREAMS
    """Simultaneous calls of one connection."""


def public_server(limits: PublicLimits) -> Arguments:
    """The arguments of a public server.

    How far a stream runs ahead of a slow reader is set by the reader's flow-control window: 4 MiB
    with gRPC's defaults. No argument of the server changes that (measured).
    """
    return (
        *_SERVER,
        ("grpc.max_receive_message_length", PUBLIC_RECEIVE_BYTES),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_metadata_size", 16 * 2**10),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_connection_idle_ms", _ms(limits.idle_s)),
        ("grpc.max_connection_age_ms", _ms(limits.max_age_s)),
        ("grpc.max_connection_age_grace_ms", _ms(limits.last_calls_s)),
        ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_s)),
    )


def longest_age_s(limits: PublicLimits) -> float:
    """The age after which no connection takes new calls: gRPC varies max_age_s by a tenth."""
    return 1.1 * limits.max_age_s


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))


PARENT_VARIABLE = "BATON_PARENT_PID"
"""The number of the process that supervises this one, ends with it and reads its stdout."""
SAY_EVERY_S = 5.0
IMPORT = "import"
WEIGHTS = "weights"
CHECK = "check"
READY = "ready"


class Startup:
    """Progress and timings of one process's start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, age_s: float | None = None):
        """age_s: the process's age now; None: read from the kernel."""
        self._clock = clock
        self._entered = clock() - (process_age_s() if age_s is None else age_s)
        self.took: dict[str, float] = {}
        """Seconds that each finished part took."""
        self._done = self._total = 0
        self._logged_at = clock()
        self.ready_s: float | None = None
        """Seconds from the process's start until it was first ready; None before that."""
        self.part = IMPORT
        """The current part; READY once the process was ready."""

    def enter(self, part: str) -> None:
        """Ends the current part and begins `part`. Without effect once the process is ready."""
        if self.part in (part, READY):
            return
        now = self._clock()
        self.took[self.part] = self.took.get(self.part, 0.0) + now - self._entered
        self.part, self._entered = part, now
        if os.environ.get(PARENT_VARIABLE):  # A supervisor reads it.
            print(json.dumps({"part": part}), flush=True)

    def weights(self, done: int, total: int) -> None:
        """Sets how many bytes of the weights are loaded. After the last of them CHECK begins, once:
        a reader may report its end again."""
        if done >= total and self.part == CHECK:
            return
        self.enter(WEIGHTS)
        self._done, self._total = done, total
        if done >= total:
            self.enter(CHECK)
        elif self._clock() - self._logged_at >= SAY_EVERY_S:
            self._logged_at = self._clock()
            log.info("%s", self.words)

    def ready(self) -> None:
        """Marks the process as ready for work. Only the first call counts."""
        self.enter(READY)
        if self.ready_s is None:
            self.ready_s = sum(self.took.values())
            took = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.took.items())
            log.info("ready %.1f s after the process began: %s", self.ready_s, took)

    @property
    def progress(self) -> float:
        """The loaded share of the weights, from 0 to 1; always 1 once the process is ready."""
        if self.part == READY:
            return 1.0
        return min(1.0, self._done / self._total) if self._total else 0.0

    @property
    def words(self) -> str:
        """For people: "loading weights 43 %"."""
        if self.part == WEIGHTS:
            return f"loading {WEIGHTS} {100 * self.progress:.0f} %"
        return self.part if self.part == READY else f"starting: {self.part}"

    def export(self) -> Callable[[], None]:
        """Exports progress and timings on /metrics until the returned function is called."""
        ends = [
            gauge(metrics.LOAD_PROGRESS, lambda: {(): self.progress}),
            gauge(metrics.STARTUP, lambda: {(p,): s for p, s in dict(self.took).items()}),
            gauge(metrics.READY, lambda: {} if self.ready_s is None else {(): self.ready_s}),
        ]

        def end() -> None:
            for stop in ends:
                stop()

        return end


def process_age_s() -> float:
    """Seconds since the kernel started this process; 0 where that is not known."""
    try:
        # Fields are counted behind the process's name, which is in brackets and may hold blanks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


MAX_WATCHERS = 64
STARTUP = "startup"
PROGRESS = "baton-progress"

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1 of one process. The service name selects what is checked:

    - "" is liveness: SERVING as long as the event loop answers, also while a model loads.
    - "startup" is SERVING, for good, once the process has finished starting, whether or not the
      peers that it needs are there.
    - A full service name is readiness: whether the process takes work now. All services change
      together. Before `set_started`, every name is NOT_SERVING.

    An answer of NOT_SERVING carries `baton-progress` in its trailing metadata, in words.
    """

    def __init__(self, startup: Startup) -> None:
        self._startup = startup
        self._services: frozenset[str] | None = None
        self._started = False
        self._serving = False
        self._leaving = False
        self._changed = asyncio.Event()
        self._watchers = 0

    def set_started(self, services: Iterable[str]) -> None:
        """Marks the process as started, with these services. They are not ready yet."""
        self._services = frozenset(services)
        self._started = True
        self._notify()

    def set_serving(self, serving: bool) -> None:
        """Sets the readiness of all services, for every Check and Watch. Without effect after
        `leave`."""
        self._serving = serving and not self._leaving
        if self._serving:
            self._startup.ready()
        self._notify()

    @property
    def services(self) -> frozenset[str]:
        """Empty until the process has started."""
        return self._services or frozenset()

    @property
    def serving(self) -> bool:
        """Whether the services are ready."""
        return self._serving

    def leave(self) -> None:
        """Turns all services to NOT_SERVING for good; later calls of `set_serving` do not change
        that."""
        self._leaving = True
        self.set_serving(False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            raise NotFound("no such service here", field="service")
        if status != _Response.SERVING:
            words = "leaving" if self._leaving else self._startup.words
            context.set_trailing_metadata(((PROGRESS, words),))
        return _Response(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        names = ["", STARTUP, *sorted(self._services or ())]
        return health_pb2.HealthListResponse(
            statuses={name: _Response(status=self._status(name)) for name in names}
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded("too many health watchers")
        self._watchers += 1
        try:
            last = None
            while True:
                changed, status = self._changed, self._status(request.service)
                if status != last:
                    yield _Response(status=status)
                    last = status
                else:
                    await changed.wait()
        finally:
            self._watchers -= 1

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if not service:
            good = True
        elif service == STARTUP:
            good = self._started
        elif self._services is not None and service not in self._services:
            return int(_Response.SERVICE_UNKNOWN)
        else:
            good = self._serving
        return int(_Response.SERVING if good else _Response.NOT_SERVING)


class Probes:
    """The ports for health and /metrics, which are open while the process starts."""

    def __init__(
        self,
        *,
        health_listen: str = "",
        metrics_listen: str = "",
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """Both are "host:port"; empty: there is no such port. registry: what metrics are served."""
        self.startup = Startup()
        """The process's progress, which health and /metrics report."""
        self.health = Health(self.startup)
        """The health service, also for the process's other gRPC ports."""
        self.health_address = ""
        """The actual "host:port" of health, or ""."""
        self._health_listen = health_listen
        self._metrics_listen = metrics_listen
        self._registry = registry
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self._open = False
        self._unexport: Callable[[], None] = lambda: None

    @property
    def metrics_address(self) -> str:
        """Where /metrics is served, or ""."""
        return self._metrics.address if self._metrics else ""

    async def open(self) -> None:
        """Opens the ports. Idempotent. Raises PortInUse or InvalidArgument naming the option; then
        nothing stays bound.
        """
        if self._open:
            return
        self._open = True
        self._unexport = self.startup.export()
        try:
            if self._metrics_listen:
                self._metrics = serve_metrics(self._metrics_listen, self._registry)
            if self._health_listen:
                self._server = await self._serve_health()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Closes the ports. Idempotent."""
        self._open = False
        unexport, self._unexport = self._unexport, lambda: None
        unexport()
        server, self._server = self._server, None
        metrics, self._metrics = self._metrics, None
        try:
            if server is not None:
                await server.stop(0)
        finally:
            if metrics is not None:
                await asyncio.to_thread(metrics.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve_health(self) -> grpc.aio.Server:
        host, _ = split(self._health_listen, "health_listen")
        # Checked first, because gRPC does not report why a port cannot be bound.
        check_listen(self._health_listen, "health_listen")
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=public_server(PublicLimits())
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        try:
            self.health_address = join(host, bind(server, self._health_listen))
        except RuntimeError:
            message = f"cannot listen on {self._health_listen}"
            raise PortInUse(message, field="health_listen") from None
        await server.start()
        return server


def stop_listening(port: int) -> int:
    """Closes the listening sockets of a TCP port of this process, while its connections stay open.
    Returns how many there were.

    gRPC for Python has no such call: `Server.stop` also drops calls that have arrived and were not
    begun, and their callers read CANCELLED.
    """
    return sum(_end(descriptor, port) for descriptor in _descriptors())


def _descriptors() -> list[int]:
    # Not /proc/self/fd, which only Linux has.
    return [int(name) for name in os.listdir("/dev/fd") if name.isdigit()]


def _end(descriptor: int, port: int) -> bool:
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False  # closed meanwhile, or no socket
    with copy:
        try:
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens or copy.getsockname()[1:2] != (port,):
                return False
            # It acts on the socket, so that gRPC's own descriptor stops listening too.
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


SETTLE_S = 0.2
"""The time that a GOAWAY takes to reach a client, and the client's last calls to arrive. A stopping
server that took up no call for so long has taken up all that have arrived."""


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service of a server."""

    name: str
    """The full gRPC service name, such as "baton.v1.Decode"."""
    register: Callable[[grpc.aio.Server], None]
    """Adds the servicer to a server."""


class ProcessServer:
    """The gRPC server of one process. It is created, started and stopped on one event loop."""

    def __init__(
        self,
        *,
        listen: str,
        services: Sequence[Service],
        reflection: bool = True,
        probes: Probes | None = None,
        public: bool = False,
        limits: PublicLimits | None = None,
        field: str = "listen",
        certificates: Certificates | None = None,
        token: str = "",
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        claimed: bool = False,
    ) -> None:
        """public: clients call it, so that messages, streams and connections are limited, by
        `limits`; otherwise callers are Baton's processes, which `batonlm.rpc.peers` authorizes by
        certificate and token.

        field: the option of `listen`, for errors. certificates: enables TLS. token: required of
        Baton's processes; empty: none. interceptors: run before the services; an error that they
        raise reaches the caller like a handler's. probes: opened by `start` unless they are open,
        and closed by `stop`; None: there are no ports besides `listen`. claimed: a process of this
        user claims the port (`address.claimed`), and this server binds beside the claim.
        """
        self._listen = listen
        self._field = field
        self._services = tuple(services)
        self._reflection = reflection
        self._probes = probes or Probes()
        self._public = public
        self._limits = (limits or PublicLimits()) if public else None
        self._arguments = INTERNAL_SERVER
        if self._limits is not None:
            self._arguments = public_server(self._limits)
        self._claimed = claimed
        if claimed:
            others = (one for one in self._arguments if one[0] != "grpc.so_reuseport")
            self._arguments = (("grpc.so_reuseport", 1), *others)
        self._certificates = certificates
        self._token = token
        self._interceptors = tuple(interceptors)
        self._health = self._probes.health
        self._server: grpc.aio.Server | None = None
        self._num_calls = 0
        """Calls that were taken up since the start."""
        self._stopping = False
        self._port = 0
        self._untell: Callable[[], None] = lambda: None

    @property
    def metrics_address(self) -> str:
        """Where /metrics is served, or ""."""
        return self._probes.metrics_address

    async def start(self) -> str:
        """Binds and serves, not ready yet. Returns the actual "host:port".

        Raises PortInUse or InvalidArgument naming the option; then nothing stays bound.
        """
        # The pure-Python parser recurses without a bound on hostile input.
        if api_implementation.Type() != "upb":
            raise Internal("protobuf runs without its C parser (upb); install a binary wheel")
        host, _ = split(self._listen, self._field)
        if not (self._public or self._certificates or is_loopback(host)):
            log.warning(
                "%s is plain text%s: whoever %s can use this worker (--tls-cert, --tls-key and "
                "--tls-ca end that)",
                self._listen,
                "" if self._token else " and asks nobody who they are",
                "reads the network" if self._token else "reaches it",
            )
        # Checked first, because gRPC does not report why a port cannot be bound.
        if not self._claimed:
            check_listen(self._listen, self._field)
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor(*self._checks()), *self._interceptors],
            options=self._arguments,
        )
        for service in self._services:
            service.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.name for service in self._services]
        if self._reflection:
            reflection.enable_server_reflection(
                (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
            )
        # Before the port is bound: a server that never started keeps its port.
        await self._probes.open()
        try:
            self._port = self._bind(server)
            await server.start()
        except BaseException:
            await self._probes.close()
            raise
        self._server = server
        self._health.set_started(names)
        loop = asyncio.get_running_loop()
        self._untell = gauge(TASKS, lambda: {(): len(asyncio.all_tasks(loop))})
        return join(host, self._port)

    @property
    def goodbye_s(self) -> float:
        """How long `send_away` takes, in seconds."""
        return 0.0 if self._limits is None else longest_age_s(self._limits) + SETTLE_S

    def set_serving(self, serving: bool) -> None:
        """Sets the readiness of all services in health; liveness stays. Without effect after
        `leave`.
        """
        self._health.set_serving(serving)

    def leave(self) -> None:
        """Turns not ready for good. Calls are still served."""
        self._health.leave()

    async def send_away(self) -> None:
        """Refuses new connections, and returns when each open one has received a GOAWAY. Calls that
        arrive until then are served as usual.

        It takes as long as the maximum age of a public connection, because gRPC sends the GOAWAY
        when a connection reaches that age.
        """
        if self._server is not None and self._limits is not None:
            stop_listening(self._port)
            await asyncio.sleep(self.goodbye_s)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones `grace_s` to end, cancels the rest. Idempotent.

        Calls that have arrived and were not taken up are answered first, within `grace_s`: gRPC
        drops those, and their callers read CANCELLED.
        """
        self.leave()
        self._stopping = True
        server, self._server = self._server, None
        untell, self._untell = self._untell, lambda: None
        untell()
        try:
            if server is not None:
                left_s = 0.0
                try:
                    left_s = await self._settle(grace_s)
                finally:
                    await server.stop(left_s)
        finally:
            # Last, so that probes are answered as long as calls are.
            await self._probes.close()

    async def _settle(self, grace_s: float) -> float:
        """Returns once all calls that have arrived are taken up. Returns what is left of grace_s,
        which bounds it."""
        clock = asyncio.get_running_loop().time
        end, begun, number = clock() + grace_s, clock(), -1
        # A pause that took too long was one of a busy loop, which takes up calls late.
        while clock() < end and (number != self._num_calls or clock() > begun + 2 * SETTLE_S):
            begun, number = clock(), self._num_calls
            await asyncio.sleep(min(SETTLE_S, end - begun))
        return max(0.0, end - clock())

    def _take_up(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._num_calls += 1
        if self._stopping:
            raise Unavailable("this process is leaving", retry_after_s=1.0)

    def _checks(self) -> Iterator[Check]:
        yield self._take_up
        if self._public:
            return
        if self._certificates is not None:
            yield check_caller
        if self._token:
            yield check_token(self._token)

    def _bind(self, server: grpc.aio.Server) -> int:
        try:
            return bind(server, self._listen, self._certificates)
        except RuntimeError:
            raise PortInUse(f"cannot listen on {self._listen}", field=self._field) from None
