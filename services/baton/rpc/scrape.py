"""Serves one registry over HTTP, on threads of its own.

A scrape is answered even while the event loop is busy. Nobody is asked for a key. On loopback only
this machine's own names are answered, so that no web page reads here.
"""

from __future__ import annotations

import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Thread
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from baton.rpc.address import is_loopback, join, refusal, split
from baton.rpc.hosts import AllowedHosts

READ_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""At a time; each takes a thread. More are closed."""


_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Serves until closed. address: the actual "host:port"."""

    def __init__(self, server: ThreadingHTTPServer, host: str) -> None:
        self.address = join(host, server.server_port)
        self._server = server
        self._thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port. Idempotent; returns when the thread has ended."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve(listen: str, registry: CollectorRegistry, field: str = "metrics_listen") -> MetricsServer:
    """Raises PortInUse or InvalidArgument naming the field."""
    host, port = split(listen, field)
    server_class = _Server6 if ":" in host else _Server
    hosts = AllowedHosts(listen) if is_loopback(host) else None
    handler = type("Handler", (_Handler,), {"registry": registry, "hosts": hosts})
    try:
        server = server_class((host, port), handler)
    except OSError as error:
        raise refusal(error, listen, field) from None
    return MetricsServer(server, host)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._room = BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def server_bind(self) -> None:
        """Binds without looking up the own name, which may take seconds."""
        # This only skips TIME_WAIT: a port that somebody listens on is still refused.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]


class _Server6(_Server):
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
        """Scrapes are not logged."""
