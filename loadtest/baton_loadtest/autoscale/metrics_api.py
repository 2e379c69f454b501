"""Serves `baton_pool_target_workers` as external.metrics.k8s.io, over HTTPS.

The API server passes HPAs' questions on (an APIService) after it has decided who may ask them. It
shows the certificate of its front proxy, which must be one of the cluster's request header CA;
nobody else gets an answer but to the probe and to the list of metrics.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from socket import socket
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from baton_loadtest.autoscale.readings import TARGETS, Reading
from batonlm.rpc.metrics import READ_TIMEOUT_S, BoundedServer

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
STALE_S = 60.0
"""An older reading is not told: an HPA that gets no number keeps the pool as it is."""
_TERM = re.compile(r"([\w./-]+)\s*(==|=)\s*([\w./-]*)")


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """Who may ask: the API server's proxy."""

    ca: str
    """PEM: the CA of its certificate."""
    names: Collection[str] = ()
    """Allowed common names; empty: any."""


class MetricsApi:
    """The newest reading, as the API has it. Thread-safe."""

    def __init__(self, namespace: str, service: str) -> None:
        """service: the one by which Prometheus would find the routers, a label of the metric."""
        self._namespace, self._service = namespace, service
        self._lock = Lock()
        self._reading: Reading | None = None
        self._at = 0.0

    def publish(self, reading: Reading, now: float) -> None:
        """now: seconds since the epoch."""
        with self._lock:
            self._reading, self._at = reading, now

    def answer(self, path: str, now: float) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body for a GET of a path with its query."""
        url = urlsplit(path)
        if url.path.rstrip("/") == ROOT:
            return 200, _RESOURCES
        parts = url.path.removeprefix(f"{ROOT}/namespaces/").split("/")
        if not url.path.startswith(f"{ROOT}/namespaces/") or len(parts) != 2:
            return _status(404, "NotFound")
        wanted = _selected(parse_qs(url.query).get("labelSelector", [""])[0])
        if wanted is None:
            return _status(400, "BadRequest")
        if parts != [self._namespace, TARGETS]:
            return _status(404, "NotFound")
        with self._lock:
            reading, at = self._reading, self._at
        if reading is None or now - at > STALE_S:
            return _status(503, "ServiceUnavailable")
        stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = []
        for (model, role), value in sorted(reading.targets.items()):
            labels = {"model": model, "role": role, "service": self._service}
            if all(labels.get(name) == text for name, text in wanted.items()):
                items.append(
                    {
                        "metricName": TARGETS,
                        "metricLabels": labels,
                        "timestamp": stamp,
                        "value": str(int(value)),
                    }
                )
        return 200, {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": items,
        }


_RESOURCES = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": f"{GROUP}/{VERSION}",
    "resources": [
        {
            "name": TARGETS,
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
    ],
}


def _selected(text: str) -> dict[str, str] | None:
    """Returns a selector of equalities; None for any other."""
    wanted = {}
    for term in filter(None, (part.strip() for part in text.split(","))):
        found = _TERM.fullmatch(term)
        if found is None:
            return None
        wanted[found[1]] = found[3]
    return wanted


def _status(code: int, reason: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "code": code,
    }


class MetricsServer:
    """Serves until closed."""

    def __init__(
        self, listen: tuple[str, int], cert: str, key: str, proxy: FrontProxy, api: MetricsApi
    ) -> None:
        """cert, key: PEM files. Raises OSError, also for unusable files (ssl.SSLError)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(cert, key)
        context.load_verify_locations(cadata=proxy.ca)
        # The probe shows no certificate; a wrong one is refused.
        context.verify_mode = ssl.CERT_OPTIONAL
        handler = type("Handler", (_Handler,), {"api": api, "names": frozenset(proxy.names)})
        self._server = _Server(listen, handler, context)
        self.port = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, name="metrics-api", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(BoundedServer):
    def __init__(self, listen: tuple[str, int], handler: Any, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(listen, handler)

    def answer(self, request: Any, client_address: Any) -> None:
        """The handshake is on the connection's own thread: a silent peer holds up nobody else."""
        request.settimeout(READ_TIMEOUT_S)
        secured = self._secured(request)
        if secured is not None:
            super().answer(secured, client_address)

    def _secured(self, request: socket) -> ssl.SSLSocket | None:
        try:
            return self._context.wrap_socket(request, server_side=True)
        except OSError:
            self.shutdown_request(request)
            return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    api: MetricsApi
    names: frozenset[str]
    timeout = READ_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "baton", ""

    def do_GET(self) -> None:
        if self.path == "/livez":
            code, body = 200, {"status": "ok"}
        elif self.path.rstrip("/") != ROOT and not self._is_proxy():
            code, body = _status(403, "Forbidden")
        else:
            code, body = self.api.answer(self.path, datetime.now(UTC).timestamp())
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _is_proxy(self) -> bool:
        """Whether the peer's certificate, which the CA has issued, has an allowed name."""
        assert isinstance(self.connection, ssl.SSLSocket)
        shown = self.connection.getpeercert()
        if not shown:
            return False
        subject: Any = shown.get("subject", ())
        names = {value for part in subject for key, value in part if key == "commonName"}
        return not self.names or bool(names & self.names)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
