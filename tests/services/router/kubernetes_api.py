"""A small HTTP server that speaks list and watch of EndpointSlices, as the API server does.

Versions, pages, bookmarks, chunked watches and 410 are real; everything else of Kubernetes is not
here. Its methods may be called on any thread.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from tests.rpc.authority import Files

NAMESPACE, SERVICE, PORT_NAME = "models", "decode", "grpc"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
SELECTOR = f"kubernetes.io/service-name={SERVICE}"

Json = dict[str, Any]


def endpoint(address: str, **conditions: bool | None) -> Json:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"uid": f"u-{address}"}}


def slice_of(name: str, *endpoints: Json, port: int = 7000, family: str = "IPv4") -> Json:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": family,
        "ports": [{"name": "metrics", "port": 9}, {"name": PORT_NAME, "port": port}],
        "endpoints": list(endpoints),
    }


class FakeApi:
    """Start with `serving`. Watches end with the server, on `hang_up`, and after their time."""

    def __init__(self) -> None:
        self.port = 0
        self.queries: list[Json] = []
        self.tokens: list[str] = []
        """The header Authorization of each request."""
        self.refusals: list[int] = []
        """HTTP statuses that the next requests meet, in order."""
        self.watching = 0
        self.longest_watch_s = 600.0
        self._changed = threading.Condition()
        self._version = 10
        self._oldest = 10
        self._slices: dict[str, Json] = {}
        self._events: list[tuple[int, Json]] = []
        self._hung_up = 0
        self._over = False

    def put(self, entry: Json) -> None:
        name = entry["metadata"]["name"]
        with self._changed:
            kind = "MODIFIED" if name in self._slices else "ADDED"
            self._happened(kind, entry)
            self._slices[name] = entry

    def delete(self, name: str) -> None:
        with self._changed:
            self._happened("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        with self._changed:
            self._happened("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    def forget(self) -> None:
        """All versions so far are too old from now on; running watches are told so."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._events.clear()
            self._changed.notify_all()

    def hang_up(self) -> None:
        """Breaks every running watch in the middle."""
        with self._changed:
            self._hung_up += 1
            self._changed.notify_all()

    def _happened(self, kind: str, entry: Json) -> None:
        self._version += 1
        entry["metadata"]["resourceVersion"] = str(self._version)
        self._events.append(
            (self._version, {"type": kind, "object": json.loads(json.dumps(entry))})
        )
        self._changed.notify_all()

    def page(self, query: Json) -> Json:
        with self._changed:
            names = sorted(self._slices)
            start, limit = int(query.get("continue", 0)), int(query["limit"])
            items = [self._slices[name] for name in names[start : start + limit]]
            metadata = {"resourceVersion": str(self._version)}
            if start + limit < len(names):
                metadata["continue"] = str(start + limit)
            return {"metadata": metadata, "items": json.loads(json.dumps(items))}

    def events(self, query: Json) -> Iterator[Json | None]:
        """None: the watch breaks here."""
        told, began = int(query["resourceVersion"]), self._hung_up
        with self._changed:
            self.watching += 1
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        partial(self._news, told, began),
                        timeout=min(int(query["timeoutSeconds"]), self.longest_watch_s),
                    )
                    if self._over:
                        return
                    if self._hung_up != began:
                        yield None
                        return
                    if told < self._oldest:
                        yield {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
                        return
                    fresh = [(v, event) for v, event in self._events if v > told]
                if not fresh:
                    return
                for version, event in fresh:
                    yield event
                    told = version
        finally:
            with self._changed:
                self.watching -= 1

    def _news(self, told: int, began: int) -> bool:
        return self._over or self._hung_up != began or told < self._oldest or self._version > told

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    api: FakeApi


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        api = cast(_Server, self.server).api
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        api.queries.append(query)
        api.tokens.append(self.headers.get("authorization", ""))
        right = parts.path == PATH and query.get("labelSelector") == SELECTOR
        status = api.refusals.pop(0) if api.refusals else 200 if right else 404
        self.close_connection = True
        self.send_response(status)
        self.send_header("connection", "close")
        if status != 200 or "watch" not in query:
            body = json.dumps(api.page(query) if status == 200 else {"code": status}).encode()
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for event in api.events(query):
                if event is None:
                    return
                line = json.dumps(event).encode() + b"\n"
                # In two pieces, as a proxy may cut it.
                for piece in (line[:7], line[7:]):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path, tls: Files | None = None) -> Iterator[tuple[FakeApi, str]]:
    """The API and the kubeconfig file that leads to it, without TLS."""
    server = _Server(("127.0.0.1", 0), _Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    api = server.api = FakeApi()
    api.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {"token": "made-up"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
        ],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    try:
        yield api, str(path)
    finally:
        api.stop()
        server.shutdown()
        server.server_close()
        thread.join()
