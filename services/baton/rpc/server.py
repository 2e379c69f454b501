"""One process's gRPC server: its services, health, reflection and the progress of its start.

`Probes` are the ports that are open from the beginning: health and /metrics. So a process that
still starts does not look dead. Health is plain text there even where the process speaks TLS:
probes show no certificate. `ProcessServer.start` binds the port for work when everything is loaded.
"""

from __future__ import annotations

import asyncio
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

from baton.core.errors import Internal, NotFound, Overloaded
from baton.rpc import metrics
from baton.rpc.address import PortInUse, check_listen, is_loopback, join, split
from baton.rpc.channels import INTERNAL_MESSAGE_BYTES, Arguments, bind
from baton.rpc.errors import Check, ErrorInterceptor
from baton.rpc.metrics import TASKS, MetricsServer, gauge, serve_metrics
from baton.rpc.peers import check_caller, check_token
from baton.rpc.tls import Certificates

log = logging.getLogger(__name__)

PUBLIC_RECEIVE_BYTES = 2**20
PUBLIC_STREAMS = 100

_SERVER: Arguments = (
    # Two servers on one port would share its connections at random; that must be an error.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Less than the clients' interval: gRPC's own default of 300 s answers pings with GOAWAY
    # too_many_pings, which ends every call of the connection. (The name has no "recv" in it.)
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

INTERNAL_SERVER: Arguments = (
    *_SERVER,
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
)
"""No limit on streams: a cancel must never wait behind work. Work is bounded by the processes."""


@dataclass(frozen=True, slots=True)
class PublicLimits:
    """What a public port bears of connections. idle_s: without a call. max_age_s: an older one
    takes no new calls, and its client opens another, maybe to another server; varied by a tenth.
    last_calls_s: what running calls get from then on. handshake_s: to the end of HTTP/2's greeting.
    streams: calls of one connection at a time.
    """

    max_connections: int = 4096
    idle_s: float = 75.0
    max_age_s: float = 8.0
    last_calls_s: float = 3600.0
    handshake_s: float = 10.0
    streams: int = PUBLIC_STREAMS


def public_server(limits: PublicLimits) -> Arguments:
    """How far a stream runs ahead of a slow reader is the reader's own window: 4 MiB with gRPC's
    defaults, and no argument of the server changes that (measured).
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
    """After so long a connection takes no new calls. gRPC varies an age by a tenth."""
    return 1.1 * limits.max_age_s


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))


SAY_EVERY_S = 5.0
IMPORT = "import"
WEIGHTS = "weights"
CHECK = "check"
READY = "ready"


class Startup:
    """part: what it does now; READY once it took work. took: the parts that are done, in seconds.
    ready_s: all of them together, once it took work for the first time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, age_s: float | None = None):
        """age_s: of the process now; None: the kernel is asked."""
        self._clock = clock
        self._entered = clock() - (process_age_s() if age_s is None else age_s)
        self.took: dict[str, float] = {}
        self._done = self._total = 0
        self._said = clock()
        self.ready_s: float | None = None
        self.part = IMPORT

    def enter(self, part: str) -> None:
        """What was done so far is done. Without effect once it is ready."""
        if self.part in (part, READY):
            return
        now = self._clock()
        self.took[self.part] = self.took.get(self.part, 0.0) + now - self._entered
        self.part, self._entered = part, now

    def weights(self, done: int, total: int) -> None:
        """So many bytes are in, of all; after the last of them they are checked."""
        self.enter(WEIGHTS)
        self._done, self._total = done, total
        if done >= total:
            self.enter(CHECK)
        elif self._clock() - self._said >= SAY_EVERY_S:
            self._said = self._clock()
            log.info("%s", self.words)

    def ready(self) -> None:
        """It takes work. Only the first time counts."""
        self.enter(READY)
        if self.ready_s is None:
            self.ready_s = sum(self.took.values())
            took = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.took.items())
            log.info("ready %.1f s after the process began: %s", self.ready_s, took)

    @property
    def progress(self) -> float:
        """Of the weights, from 0 to 1; 1 once it is ready, whatever it had to load."""
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
        """Puts it on /metrics, until the returned function is called."""
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
    """Since the kernel started this process; 0 where it cannot be asked."""
    try:
        # The name, in brackets, may hold blanks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


# grpc.health.v1 of one process, which is asked three things by name.
#
# - "" is liveness: SERVING as long as the event loop answers at all, also while a model loads.
# - "startup": SERVING once the process has finished starting, and from then on for good, whether or
#   not others that it needs are there.
# - A full service name is readiness: whether it takes work now.
#
# What is not SERVING comes with `baton-progress` among the answer's trailing metadata, in words for
# people. Until it is told which services there are,
# every name may be one of them, and is NOT_SERVING.

MAX_WATCHERS = 64
STARTUP = "startup"
PROGRESS = "baton-progress"

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serves the status of all services of a process; they change together. startup: how far it
    has come; told when it is ready.
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
        """All is loaded, and these are the services. They are not ready yet."""
        self._services = frozenset(services)
        self._started = True
        self._tell()

    def set_serving(self, serving: bool) -> None:
        """What the next Check and every Watch sees, at once; after `leave` always NOT_SERVING."""
        self._serving = serving and not self._leaving
        if self._serving:
            self._startup.ready()
        self._tell()

    def leave(self) -> None:
        """Not serving from now on, whatever is said later by somebody who does not know."""
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

    def _tell(self) -> None:
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
    """health: what is told, here and on the process's other gRPC ports. startup: how far the
    process's start has come, which both tell.
    """

    def __init__(self, *, health_listen: str = "", metrics_listen: str = "") -> None:
        """Empty: there is no such port."""
        self.startup = Startup()
        self.health = Health(self.startup)
        self.health_address = ""
        self._health_listen = health_listen
        self._metrics_listen = metrics_listen
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self._open = False
        self._unexport: Callable[[], None] = lambda: None

    @property
    def metrics_address(self) -> str:
        """Where /metrics is served, or ""."""
        return self._metrics.address if self._metrics else ""

    async def open(self) -> None:
        """Idempotent. Raises PortInUse or InvalidArgument naming the option; nothing stays bound
        then.
        """
        if self._open:
            return
        self._open = True
        self._unexport = self.startup.export()
        try:
            if self._metrics_listen:
                self._metrics = serve_metrics(self._metrics_listen)
            if self._health_listen:
                self._server = await self._serve_health()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Idempotent."""
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
        # Asked first, because gRPC does not say why a port cannot be had.
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


# Ends the listening of a port while its connections go on.
#
# gRPC for Python cannot do that: its `Server.stop` also throws away calls that have arrived and
# were not begun, whose callers then read CANCELLED.


def stop_listening(port: int) -> int:
    """Whoever connects to a TCP port of this process from now on is refused. Returns how many
    sockets listened there.
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
            # Of the socket itself, so gRPC's own descriptor stops too.
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


SETTLE_S = 0.2
"""What a goodbye takes to reach a client, and the client's last calls to reach us."""


@dataclass(frozen=True, slots=True)
class Service:
    """name: full gRPC service name, as "baton.v1.Decode". register: adds the servicer."""

    name: str
    register: Callable[[grpc.aio.Server], None]


class ProcessServer:
    """Serves until stopped. Made, started and stopped on one event loop."""

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
    ) -> None:
        """public: others than Baton's own may call, so messages, streams and connections are
        limited, by limits.

        field: the option that `listen` came from, for errors to name. certificates: speaks TLS;
        callers that are Baton's own are then held to `baton.rpc.peers`. token: what they have to
        show, see `baton.rpc.peers`; empty: nothing. interceptors: see the call before the
        services do; what they raise reaches the caller as a handler's error does.
        probes: opened by `start` where they are not yet, and closed by `stop`. None: there are no
        ports besides `listen`.
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
        self._certificates = certificates
        self._token = token
        self._interceptors = tuple(interceptors)
        self._health = self._probes.health
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._untell: Callable[[], None] = lambda: None

    @property
    def metrics_address(self) -> str:
        """Where /metrics is served, or ""."""
        return self._probes.metrics_address

    async def start(self) -> str:
        """Binds and serves; not ready yet. Returns the actual "host:port".

        Raises PortInUse or InvalidArgument naming the option; nothing stays bound.
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
        # Asked first, because gRPC does not say why a port cannot be had.
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
        """What `send_away` takes."""
        return 0.0 if self._limits is None else longest_age_s(self._limits) + SETTLE_S

    def set_serving(self, serving: bool) -> None:
        """Readiness of all services, as health tells it. Liveness is not touched. Without effect
        after `leave`.
        """
        self._health.set_serving(serving)

    def leave(self) -> None:
        """Not ready from now on, for good. Calls are still taken."""
        self._health.leave()

    async def send_away(self) -> None:
        """Refuses new connections, and returns when each of the others has been told to connect
        elsewhere. What they send before they hear it is answered as ever.

        Takes as long as a public connection may grow old: that age is what tells them.
        """
        if self._server is not None and self._limits is not None:
            stop_listening(self._port)
            await asyncio.sleep(self.goodbye_s)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives running ones `grace_s` to end, cancels the rest. Idempotent."""
        self.leave()
        server, self._server = self._server, None
        untell, self._untell = self._untell, lambda: None
        untell()
        try:
            if server is not None:
                await server.stop(grace_s)
        finally:
            # Last, so that probes are answered for as long as anybody is.
            await self._probes.close()

    def _checks(self) -> Iterator[Check]:
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
