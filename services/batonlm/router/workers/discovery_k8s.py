"""Discovery through a Kubernetes service, watched on a thread (`rpc/kubernetes_api.py`).

The router's service account needs get, list and watch on endpointslices only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from batonlm.core.errors import InvalidArgument, install
from batonlm.rpc.address import join
from batonlm.rpc.kubernetes_api import Answer, KubernetesApi, NoAnswer, open_api

log = logging.getLogger(__name__)

MAX_ENDPOINTS = 4096

Json = Mapping[str, Any]

_FAMILIES = ("IPv4", "IPv6")
"""Best first, because a pod with both is one endpoint. FQDN endpoints are not addresses of pods."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One pod behind a service, with the conditions of its EndpointSlice."""

    address: str
    """In the form host:port."""
    ready: bool
    """Whether it accepts traffic; null counts as true. False: it starts, or its probe fails."""
    terminating: bool
    """Whether it is terminating; null counts as false."""


def endpoints(slices: Iterable[Json], port: str) -> tuple[Endpoint, ...]:
    """Returns all endpoints of a service, each once, sorted by address.

    port: digits, used as they are, or the name of one of the slices' ports; a slice without such a
    port contributes no endpoint.
    """
    found: dict[str, Endpoint] = {}
    held = list(slices)
    for family in _FAMILIES:
        for entry in held:
            number = _port(entry, port)
            if entry.get("addressType") == family and number is not None:
                for pod, endpoint in _of_slice(entry, number):
                    # While an endpoint moves between slices it is briefly in both.
                    if pod not in found or found[pod].terminating:
                        found[pod] = endpoint
    return tuple(sorted(found.values(), key=lambda each: each.address))[:MAX_ENDPOINTS]


def _of_slice(entry: Json, port: int) -> Iterable[tuple[str, Endpoint]]:
    for endpoint in entry.get("endpoints") or ():
        addresses = endpoint.get("addresses") or ()
        if not addresses:
            continue
        conditions = endpoint.get("conditions") or {}
        pod = (endpoint.get("targetRef") or {}).get("uid") or addresses[0]
        yield (
            pod,
            Endpoint(
                join(addresses[0], port),
                ready=conditions.get("ready") is not False,
                terminating=conditions.get("terminating") is True,
            ),
        )


def _port(entry: Json, wanted: str) -> int | None:
    if wanted.isdecimal():
        return int(wanted)
    for port in entry.get("ports") or ():
        if port.get("name") == wanted and port.get("port"):
            return int(port["port"])
    return None


WATCH_S = 60
CONNECT_S = 5.0
READ_S = WATCH_S + 5.0
LIST_READ_S = 30.0
PAGE = 500
MAX_LINE_BYTES = 8 << 20
"""Most bytes of one event; the largest slice that Kubernetes allows has about a megabyte."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0

_GONE = 410


class ApiFailed(Exception):
    """A request to the API failed."""

    def __init__(self, status: int, text: str) -> None:
        """status: the HTTP status, or 0 when there was no answer."""
        super().__init__(text)
        self.status = status


class SliceWatch:
    """Follows the EndpointSlices of one service: lists them, then watches from there, without end.

    It blocks, so it runs on a thread of its own (`KubernetesSource`). The rules of the API:

        list            all slices, in pages, with the version at which they are valid
        watch           changes since a version, until the server's time limit; a bookmark
                        advances the version and changes nothing
        410             the version is too old, as the HTTP status or as an event: list again
        anything else   the connection or the server failed: a growing pause, then list again

    A watch that ends normally is continued from the newest version at once. Each watch is short, so
    that a server which vanished silently is noticed shortly after `WATCH_S`.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        service: str,
        on_change: Callable[[list[Json]], None],
    ) -> None:
        """on_change: called with all slices whenever they may have changed, on the thread that runs
        this."""
        self._api = api
        self._namespace = namespace
        self._service = service
        self._on_change = on_change
        self._slices: dict[str, Json] = {}
        self._stopped = threading.Event()
        self._answer: Answer | None = None
        self._failures = 0

    def run(self) -> None:
        """Runs until stopped. Never raises."""
        while not self._stopped.is_set():
            try:
                version = self._list()
                while not self._stopped.is_set():
                    version = self._follow(version)
            except Exception as failure:
                if not self._stopped.is_set():
                    self._failed(failure)

    def stop(self) -> None:
        """Makes `run` return soon. Thread-safe and idempotent."""
        self._stopped.set()
        answer = self._answer
        if answer is not None:
            answer.stop()

    def _failed(self, failure: Exception) -> None:
        # A version that is too old right after listing must not cause a busy loop.
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        where = f"{self._namespace}/{self._service}"
        if not isinstance(failure, ApiFailed):
            log.error("watching service %s fails by a fault of ours", where, exc_info=failure)
        elif failure.status != _GONE:
            log.log(level, "cannot watch service %s: %s", where, failure)
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10), LONGEST_PAUSE_S)
        self._stopped.wait(pause_s * random.uniform(0.7, 1.3))

    def _list(self) -> str:
        """Lists all slices. Returns the version at which they are valid."""
        found: dict[str, Json] = {}
        query = {"limit": str(PAGE)}
        while True:
            with self._asked(query, LIST_READ_S) as parts:
                page = _json(b"".join(parts))
            metadata = page.get("metadata") or {}
            for entry in page.get("items") or ():
                found[_name(entry)] = entry
            if not metadata.get("continue"):
                break
            query["continue"] = str(metadata["continue"])
        self._slices = found
        if self._failures:
            log.info("service %s/%s is watched again", self._namespace, self._service)
        self._on_change(list(found.values()))
        return str(metadata.get("resourceVersion", ""))

    def _follow(self, version: str) -> str:
        """Runs one watch to its end. Returns the newest version seen."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        with self._asked(query, READ_S) as parts:
            for line in _lines(parts):
                version = self._take(_json(line), version)
                self._failures = 0
        return version

    @contextmanager
    def _asked(self, query: Mapping[str, str], read_s: float) -> Iterator[Iterator[bytes]]:
        """Yields the body of one answer in parts as they arrive, and closes it on exit."""
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        whole = {"labelSelector": f"kubernetes.io/service-name={self._service}", **query}
        try:
            answer = self._api.request("GET", path, whole, (CONNECT_S, read_s))
            self._answer = answer
            try:
                if self._stopped.is_set():
                    raise ApiFailed(0, "stopped")
                if answer.status != 200:
                    raise ApiFailed(answer.status, f"{answer.status} {answer.reason}")
                yield answer.parts()
            finally:
                self._answer = None
                answer.close()
        except NoAnswer as failure:
            raise ApiFailed(0, str(failure)) from failure

    def _take(self, event: Json, version: str) -> str:
        entry = event.get("object") or {}
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self._slices[_name(entry)] = entry
            case "DELETED":
                self._slices.pop(_name(entry), None)
            case "BOOKMARK":
                return _version(entry, version)
            case "ERROR":
                status = int(entry.get("code") or 0)
                raise ApiFailed(status, f"the server ended the watch with {status}")
            case _:
                return version
        self._on_change(list(self._slices.values()))
        return _version(entry, version)


def _lines(parts: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        yield from (line for line in whole if line.strip())
        if len(rest) > MAX_LINE_BYTES:
            raise ApiFailed(0, "an event is too large")


def _json(text: bytes) -> Json:
    try:
        found = json.loads(text)
    except ValueError:
        raise ApiFailed(0, "the answer is not JSON") from None
    if not isinstance(found, dict):
        raise ApiFailed(0, "the answer is not an object")
    return found


def _name(entry: Json) -> str:
    return str((entry.get("metadata") or {}).get("name", ""))


def _version(entry: Json, version: str) -> str:
    return str((entry.get("metadata") or {}).get("resourceVersion") or version)


STOP_S = 2.0
"""Seconds that the thread has to end before it is abandoned; it ends with the process."""


def api_of(field: str, config_file: str = "") -> KubernetesApi:
    """Opens the API, shared by all watches (see `open_api`). Blocks for a second. Raises
    InvalidArgument, naming the field."""
    try:
        return open_api(config_file)
    except ImportError:
        raise InvalidArgument(
            f"k8s:/// outside a pod needs the Kubernetes client: {install('k8s')}", field=field
        ) from None
    except ValueError:
        raise InvalidArgument(
            "k8s:/// needs a cluster: this is no pod with a service account, and neither "
            "KUBECONFIG nor ~/.kube/config is a usable kubeconfig",
            field=field,
        ) from None


class KubernetesSource:
    """The endpoints of one service."""

    lists = True

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        service: str,
        port: str,
        wanted: Callable[[Endpoint], bool],
    ) -> None:
        """wanted: whether an endpoint counts."""
        self._api, self._namespace, self._service = api, namespace, service
        self._port, self._wanted = port, wanted

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        loop = asyncio.get_running_loop()
        newest: asyncio.Queue[list[Json]] = asyncio.Queue(1)

        def keep(slices: list[Json]) -> None:
            if newest.full():
                newest.get_nowait()
            newest.put_nowait(slices)

        def on_change(slices: list[Json]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(keep, slices)

        following = SliceWatch(self._api, self._namespace, self._service, on_change)
        name = f"watch {self._namespace}/{self._service}"
        thread = threading.Thread(target=following.run, name=name, daemon=True)
        thread.start()
        known: frozenset[str] | None = None
        try:
            while True:
                found = self._addresses(await newest.get())
                if found != known:
                    known = found
                    yield found
        finally:
            following.stop()
            await asyncio.to_thread(thread.join, STOP_S)

    def look_again(self) -> None:
        """Does nothing, because the watch reports changes."""

    def _addresses(self, slices: list[Json]) -> frozenset[str]:
        found = endpoints(slices, self._port)
        if slices and not found:
            log.warning("service %s: no endpoint has port %s", self._service, self._port)
        if len(found) == MAX_ENDPOINTS:
            log.warning("service %s: only %d endpoints are used", self._service, MAX_ENDPOINTS)
        return frozenset(each.address for each in found if self._wanted(each))


def runs(endpoint: Endpoint) -> bool:
    """Whether to look for a worker there. The worker's own reports have its state."""
    return not endpoint.terminating


def answers(endpoint: Endpoint) -> bool:
    """Whether a router counts as live, because routers exchange no reports."""
    return endpoint.ready and not endpoint.terminating
