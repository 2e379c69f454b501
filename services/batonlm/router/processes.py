"""A router of several processes (`--processes`): the one that starts them, and what each has of it.

    clients ──► the kernel (SO_REUSEPORT) ──┬──►  process 0  ◄─┐  records of each other's requests
                                            └──►  process 1  ◄─┘
    probes, scrapes ──────► the first process ──►  both: health, metrics

Each process is a router of its own, as replicas of a Deployment are: an instance id, connections to
all workers, an equal part of the budgets. What replicas need not do, because a caller can ask each
address, is done here: metrics are merged, and the record of a request is found in whichever process
has it. They ask each other over sockets in a folder that only this user opens, one question a
connection: a line of JSON, answered by a JSON document.

The first process serves no client. It holds the public ports, so that nobody else can take them
while a process restarts; starts the others and restarts those that end, or that hang; and answers
probes and scrapes.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import NotFound, Unavailable
from batonlm.router.api.http.explain import record_document
from batonlm.router.api.http.responses import Json
from batonlm.router.config import RouterConfig
from batonlm.router.observe import gauges
from batonlm.router.request.pipeline import Pipeline
from batonlm.rpc import logs, metrics
from batonlm.rpc.address import claimed
from batonlm.rpc.children import Backoff, end_all
from batonlm.rpc.metrics import REGISTRY
from batonlm.rpc.server import PARENT_VARIABLE, Health, Probes

log = logging.getLogger(__name__)

VARIABLE = "BATON_ROUTER_PROCESS"
"""What a process is of its router; see `OwnProcess.variable`."""

FOLDER = "baton-router-"
FIRST = "first"
"""The name of the first process's socket. Those of the others are their indexes."""
POLL_S = 0.25
"""Seconds between two looks at a process."""
ANSWER_S = 3.0
"""The longest that a process may take to answer another one. Prometheus waits 10 s for metrics."""
ALL_ANSWER_S = 8.0
"""The same, when that one asks all others."""
END_POLL_S = 0.05
"""The same, at the end of processes."""
HANG_S = 60.0
"""A process that does not answer for so long is killed. It is the patience of the chart's liveness
probes."""
END_S = 30.0
"""The time to end after the longest drain. Processes end themselves before (`lifecycle.EXIT_S`)."""

SUMMED = frozenset(
    {
        *("process_virtual_memory_bytes", "process_resident_memory_bytes"),
        *("process_open_fds", "process_max_fds"),
        *(spec.name for spec in (metrics.TASKS, metrics.STREAMS, metrics.LEAKS)),
        *(spec.name for spec in (metrics.REQUESTS_OPEN, gauges.QUEUED, gauges.QUEUED_TOKENS)),
        *(spec.name for spec in (metrics.VLLM_RUNNING, metrics.VLLM_WAITING)),
        gauges.CONCURRENCY_LIMITER.name,
    }
)
"""Gauges of a process's own work. Of all others, which are each process's view of the same fleet
and the same files, the largest value counts."""

Families = list[list[Any]]
"""Metrics: name, documentation, type and samples of each, and name, labels and value of those."""


def cores() -> int:
    """Returns how many cores this process may use: by its affinity and its cgroup's quota."""
    here = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        here = min(here, int(quota) // int(period))
    return max(1, here)


async def _ask(
    folder: str, name: object, question: dict[str, Any], within_s: float = ANSWER_S
) -> Any:
    """Returns what a process answers. Raises OSError, TimeoutError, or ValueError if it ended
    meanwhile."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_unix_connection(f"{folder}/{name}")
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            return json.loads(await reader.read())
        finally:
            writer.close()


NO_ANSWER = (OSError, TimeoutError, ValueError)


async def _serve(
    folder: str, name: object, answer: Callable[..., Awaitable[object]]
) -> asyncio.Server:
    """Answers the questions of the other processes; `answer` is called with their fields."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ALL_ANSWER_S):
                question = json.loads(await reader.readline())
                writer.write(json.dumps(await answer(**question)).encode())
                await writer.drain()
        except NO_ANSWER:
            log.debug("a process did not wait for its answer", exc_info=True)
        except Exception:
            log.exception("a question of another process has no answer")
        finally:
            writer.close()

    # It takes the place of a socket whose process was killed.
    return await asyncio.start_unix_server(serve, f"{folder}/{name}")


@dataclass
class OwnProcess:
    """One of several processes, as it sees itself."""

    index: int
    count: int
    folder: str
    """Holds the socket of each process."""
    grpc: str
    """Where all listen: with the port that was taken where 0 was asked for."""
    http: str
    pipeline: Pipeline | None = field(default=None, init=False)
    """Set once there is one."""
    _health: Health | None = field(default=None, init=False)
    _server: asyncio.Server | None = field(default=None, init=False)

    @classmethod
    def here(cls) -> OwnProcess | None:
        """Returns None in a process that is no such one."""
        text = os.environ.pop(VARIABLE, "")
        return cls(*json.loads(text)) if text else None

    def variable(self) -> dict[str, str]:
        """Returns the environment of a process by which `here` knows it."""
        fields = (self.index, self.count, self.folder, self.grpc, self.http)
        return {VARIABLE: json.dumps(fields)}

    def config(self, config: RouterConfig) -> RouterConfig:
        """Returns the options of this process. The first one serves probes and scrapes."""
        return replace(
            config,
            grpc_listen=self.grpc,
            http_listen=self.http,
            health_listen="",
            metrics_listen="",
        )

    async def open(self, health: Health) -> None:
        """Answers the other processes from now on."""
        self._health = health
        self._server = await _serve(self.folder, self.index, self._answer)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def metrics(self) -> Collector:
        """Returns the metrics of all processes. Raises Unavailable."""
        try:
            return Written(await _ask(self.folder, FIRST, {"ask": "metrics"}, ALL_ANSWER_S))
        except NO_ANSWER:
            raise Unavailable("The metrics cannot be read now.", retry_after_s=1.0) from None

    async def find(self, request_id: str, tenant: Tenant, replay: str | None) -> Json | None:
        """Returns the record of a request from the process that has it, or None. Raises NotFound
        or Unavailable where that one has nothing to replay it, or not yet."""
        question = {
            "ask": "record",
            "request_id": request_id,
            "tenant": tenant.name,
            "operator": tenant.operator,
            "replay": replay,
        }
        others = (index for index in range(self.count) if index != self.index)
        asked = (_ask(self.folder, index, question) for index in others)
        for found in await asyncio.gather(*asked, return_exceptions=True):
            match found:
                case {"document": dict(document)}:
                    return document
                case {"unavailable": message}:
                    raise Unavailable(message, retry_after_s=1.0)
                case {"not_found": message, "field": str(name)} if name != "request_id":
                    raise NotFound(message, field=name)
        return None

    async def _answer(self, ask: str, **fields: Any) -> object:
        assert self._health is not None
        if ask == "metrics":
            return written(REGISTRY)
        if ask == "health":
            return {"services": sorted(self._health.services), "serving": self._health.serving}
        if self.pipeline is None:
            return None
        tenant = Tenant(fields["tenant"], operator=fields["operator"])
        asked = fields["request_id"], tenant, fields["replay"]
        try:
            return {"document": record_document(self.pipeline, *asked)}
        except NotFound as error:
            return {"not_found": error.message, "field": error.field}
        except Unavailable as error:
            return {"unavailable": error.message}


def written(registry: Collector) -> Families:
    """Returns metrics in the form in which processes exchange them."""
    return [
        [one.name, one.documentation, one.type, [[s.name, s.labels, s.value] for s in one.samples]]
        for one in registry.collect()
    ]


class Written(Collector):
    """Metrics that another process has written."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, documentation, kind, samples in self._families:
            family = Metric(name, documentation, kind)
            for sample, labels, value in samples:
                family.add_sample(sample, labels, value)
            yield family


class Merger:
    """Makes one set of metrics of those of all processes.

    Counts of a process that ended stay in the sums: a counter that falls is taken for a reset of
    all that it counted. What a process counted after it was asked last is lost with it.
    """

    def __init__(self) -> None:
        self._last: dict[int, Families] = {}
        """The last answer of each process that runs, by its number."""
        self._ended: Families = []

    def began(self, pid: int) -> None:
        self._last[pid] = []

    def ended(self, pid: int) -> None:
        self._ended = _sums([self._ended, _counts(self._last.pop(pid))])

    def merge(self, answers: Mapping[int, Families]) -> Families:
        """Returns the metrics of all. answers: of those that answered; the others count as they did
        last, without gauges."""
        # A process may have ended since its answer.
        self._last |= {pid: answer for pid, answer in answers.items() if pid in self._last}
        running = (
            last if pid in answers else _counts(last) for pid, last in sorted(self._last.items())
        )
        return _sums([self._ended, *running])


def _counts(families: Families) -> Families:
    return [family for family in families if family[2] != "gauge"]


def _sums(processes: Iterable[Families]) -> Families:
    """Returns the sums of counts and of gauges in SUMMED, and the largest value of other gauges."""
    found: dict[str, tuple[str, str, dict[Any, float]]] = {}
    for name, documentation, kind, samples in chain(*processes):
        _, _, values = found.setdefault(name, (documentation, kind, {}))
        for sample, labels, value in samples:
            key = sample, tuple(labels.items())
            if kind != "gauge" or name in SUMMED:
                values[key] = values.get(key, 0.0) + value
            else:
                values[key] = max(values.get(key, value), value)
    return [
        [name, documentation, kind, [[s, dict(labels), v] for (s, labels), v in values.items()]]
        for name, (documentation, kind, values) in found.items()
    ]


@dataclass
class _Child:
    """A process, as the first one sees it. It is one place: a process that ends is replaced."""

    own: OwnProcess
    process: subprocess.Popen[bytes] | None = None
    services: frozenset[str] = frozenset()
    """Empty until it has started once."""
    serving: bool = False

    def start(self) -> int:
        """Starts the process, and returns its number."""
        # Not by asyncio: uvloop forks, before which gRPC tries to stop all of its threads.
        self.process = subprocess.Popen(
            (sys.executable, "-m", "batonlm.router", *sys.argv[1:]),
            env=os.environ | self.own.variable() | {PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches the first process alone.
            start_new_session=True,
        )
        return self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code, as shells write it; None while it runs."""
        code = self.process.poll() if self.process else 0
        return 128 - code if code is not None and code < 0 else code

    async def wait(self) -> int:
        while (code := self.code) is None:  # noqa: ASYNC110 (see start)
            await asyncio.sleep(END_POLL_S)
        return code

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)


@contextmanager
def own_folder() -> Iterator[str]:
    """Makes the folder for the sockets of one router, and removes those of routers that were
    killed: nobody locks them."""
    with TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True) as folder, _locked(folder):
        # A folder without a socket is not locked yet.
        for socket in Path(gettempdir()).glob(f"{FOLDER}*/{FIRST}"):
            with suppress(OSError), _locked(socket.parent):
                shutil.rmtree(socket.parent)
        yield folder


@contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Locks a folder until the block or the process ends. Raises OSError where another one does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


async def run_processes(config: RouterConfig, count: int) -> int:
    """Runs so many processes until SIGTERM or SIGINT, and lets them drain. Returns the exit code:
    the largest of theirs, or that of one that did not start. Raises PortInUse or InvalidArgument.
    """
    return await _Processes(config, count).run()


class _Processes(Collector):
    """The first process. It collects the metrics of all."""

    def __init__(self, config: RouterConfig, count: int) -> None:
        self._config = config
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._merger = Merger()
        self._scrape = asyncio.Lock()
        """Scrapes that overlap could store an older answer after a newer one."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._probes = Probes(
            health_listen=config.health_listen,
            metrics_listen=config.metrics_listen,
            registry=registry,
        )
        self._children: list[_Child] = []
        self._started: dict[str, str] = {}
        """What is said once all have started."""
        self._said = False
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> int:
        """See `run_processes`."""
        config = self._config
        logs.setup("router", config.log_level, config.log_json)
        with ExitStack() as held:
            grpc, _ = held.enter_context(claimed(config.grpc_listen, "grpc_listen"))
            http, bound = held.enter_context(claimed(config.http_listen, "http_listen"))
            self._started = {"role": "router", "http": bound, "grpc": grpc}
            folder = held.enter_context(own_folder())
            self._children = [
                _Child(OwnProcess(index, self._count, folder, grpc, http))
                for index in range(self._count)
            ]
            server = await _serve(folder, FIRST, self._answer)
            held.callback(server.close)
            async with self._probes as probes:
                probes.startup.enter("processes")
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._loop.add_signal_handler(number, self._signals.put_nowait, number)
                return await self._until_stopped()

    async def _until_stopped(self) -> int:
        keeping = [asyncio.create_task(self._keep(child)) for child in self._children]
        stopping = asyncio.create_task(self._signals.get())
        await asyncio.wait({stopping, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        failed = [task for task in keeping if task.done()]
        for task in (stopping, *keeping):
            task.cancel()
        await asyncio.wait({stopping, *keeping})
        self._probes.health.leave()
        passing = asyncio.create_task(self._pass_signals())
        drain_s = 2 * self._config.connection_max_age_s + self._config.drain_timeout_s
        await end_all(self._children, self._config.lame_duck_s + drain_s + END_S, asyncio.Event())
        passing.cancel()
        if failed:
            return failed[0].result() or 1
        codes = (child.code for child in self._children)
        return max(1 if code is None else code for code in codes)

    async def _pass_signals(self) -> None:
        while True:
            number = await self._signals.get()
            for child in self._children:
                child.signal(number)

    async def _keep(self, child: _Child) -> int:
        """Starts the process, and again whenever it ends. Returns its exit code if it ends before
        all have started."""
        backoff = Backoff()
        while True:
            began = time.monotonic()
            try:
                pid = child.start()
            except OSError as error:
                if not self._said:
                    raise
                log.error("no process can be started: %s", error.strerror)
            else:
                self._merger.began(pid)
                code = await self._watch(child)
                self._merger.ended(pid)
                if not self._said:
                    return code
                log.error("process %s ended with %s; another one takes its place", pid, code)
                self._look()
            await asyncio.sleep(backoff.after(time.monotonic() - began))

    async def _watch(self, child: _Child) -> int:
        """Follows its health, and kills it if it hangs. Returns its exit code."""
        heard = time.monotonic()
        while (code := child.code) is None:
            try:
                health = await _ask(child.own.folder, child.own.index, {"ask": "health"})
            except NO_ANSWER:
                if time.monotonic() - heard > HANG_S:
                    log.error("a process does not answer and is killed")
                    child.kill()
            else:
                heard = time.monotonic()
                child.services |= frozenset(health["services"])
                child.serving = health["serving"]
                self._look()
            await asyncio.sleep(POLL_S)
        child.serving = False
        return code

    def _look(self) -> None:
        """Makes the health of all the router's own."""
        health = self._probes.health
        if not self._said and all(child.services for child in self._children):
            self._said = True
            health.set_started(self._children[0].services)
            print(json.dumps(self._started), flush=True)
        if self._said:
            health.set_serving(any(child.serving for child in self._children))

    async def _answer(self, ask: str) -> object:
        return await self._metrics()

    async def _metrics(self) -> Families:
        async with self._scrape:
            running = [
                (child.process.pid, child.own)
                for child in self._children
                if child.process is not None and child.code is None
            ]
            asked = (_ask(own.folder, own.index, {"ask": "metrics"}) for _, own in running)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            return self._merger.merge(
                {
                    pid: answer
                    for (pid, _), answer in zip(running, answers, strict=True)
                    if isinstance(answer, list)
                }
            )

    def collect(self) -> Iterator[Metric]:
        """Called on the threads of scrapes."""
        answer = asyncio.run_coroutine_threadsafe(self._metrics(), self._loop)
        return Written(answer.result(ALL_ANSWER_S)).collect()
