"""Follows the EndpointSlices of one Kubernetes service: list, then watch from there, for ever.

Blocks, so it runs on a thread of its own (`KubernetesSource`). Knows what the API promises, and
nothing of what is in a slice but its name and version. The rules of the API:

    list            all slices, in pages, with the version they are true at
    watch           what changed since a version, until the server's time for it is over; a bookmark
                    moves the version on and changes nothing
    410             the version is too old, as the HTTP status or as an event: list again
    anything else   the connection or the server failed: a pause that grows, then list again

A watch that ends well is continued from the newest version at once. Each watch is short, so that a
server which vanished without a word is noticed within `WATCH_S` and a little.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from baton.router.workers.endpoint_slices import Json

log = logging.getLogger(__name__)

WATCH_S = 60
CONNECT_S = 5.0
READ_S = WATCH_S + 5.0
LIST_READ_S = 30.0
PAGE = 500
MAX_LINE_BYTES = 8 << 20
"""Of one event; a slice with the most endpoints that Kubernetes allows has about a megabyte."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0

_GONE = 410


class SliceApi(Protocol):
    """The one call of the API that is made."""

    def get(self, namespace: str, query: dict[str, Any], timeout_s: tuple[float, float]) -> Any:
        """GET of the namespace's endpointslices: urllib3's response, its body not read yet.
        query: in the client's words. timeout_s: to connect, and between two reads. Raises ApiFailed
        for whatever is not a 200.
        """


class ApiFailed(Exception):
    """status: HTTP's, or 0 when there was no answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SliceWatch:
    """tell: given all slices whenever they may have changed, on the thread that runs this."""

    def __init__(
        self, api: SliceApi, namespace: str, service: str, tell: Callable[[list[Json]], None]
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._service = service
        self._tell = tell
        self._slices: dict[str, Json] = {}
        self._stopped = threading.Event()
        self._response: Any = None
        self._failures = 0

    def run(self) -> None:
        """Until stopped. Never raises."""
        while not self._stopped.is_set():
            try:
                version = self._list()
                while not self._stopped.is_set():
                    version = self._follow(version)
            except Exception as failure:
                if not self._stopped.is_set():
                    self._failed(failure)

    def stop(self) -> None:
        """Lets `run` return soon. May be called on any thread, and more than once."""
        self._stopped.set()
        response = self._response
        if response is not None:
            with suppress(Exception):
                response.shutdown()

    def _failed(self, failure: Exception) -> None:
        # A version that was just listed and is too old already must not be asked for in a loop.
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
        """Learns all slices anew. Returns the version they are true at."""
        found: dict[str, Json] = {}
        query: dict[str, Any] = {"limit": PAGE}
        while True:
            with self._asked(query, LIST_READ_S) as parts:
                page = _json(b"".join(parts))
            metadata = page.get("metadata") or {}
            for entry in page.get("items") or ():
                found[_name(entry)] = entry
            if not metadata.get("continue"):
                break
            query["_continue"] = metadata["continue"]
        self._slices = found
        if self._failures:
            log.info("service %s/%s is watched again", self._namespace, self._service)
        self._tell(list(found.values()))
        return str(metadata.get("resourceVersion", ""))

    def _follow(self, version: str) -> str:
        """One watch, to its end. Returns the newest version seen."""
        query = {
            "watch": True,
            "resource_version": version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_S,
        }
        with self._asked(query, READ_S) as parts:
            for line in _lines(parts):
                version = self._take(_json(line), version)
                self._failures = 0
        return version

    @contextmanager
    def _asked(self, query: dict[str, Any], read_s: float) -> Iterator[Iterator[bytes]]:
        """The body of one answer, in parts as they come; closed on leaving, whatever happened."""
        selector = f"kubernetes.io/service-name={self._service}"
        whole = {"label_selector": selector, **query}
        response = self._response = self._api.get(self._namespace, whole, (CONNECT_S, read_s))
        try:
            if self._stopped.is_set():
                raise ApiFailed(0, "stopped")
            yield _parts(response)
        finally:
            self._response = None
            response.close()

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
        self._tell(list(self._slices.values()))
        return _version(entry, version)


def _parts(response: Any) -> Iterator[bytes]:
    """The body as it comes."""
    import urllib3

    try:
        yield from response.stream(1 << 16)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ApiFailed(0, type(error).__name__) from error


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
