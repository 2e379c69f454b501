"""A hub of one model: tells its files and serves them, in parts too; keeps what it was asked."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "baton/made"
COMMIT = "c0" * 20


class Hub:
    """files: by name. token: asked for, if any. stranger: a token whose account has not accepted
    the terms. damaged: sends another last byte."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.token = ""
        self.stranger = ""
        self.damaged = False
        self.asked: list[str] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def described(self) -> bytes:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 100}
            siblings.append(entry)
        told = {"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings}
        return json.dumps(told).encode()

    def tree(self) -> bytes:
        entries = []
        for entry in json.loads(self.described())["siblings"]:
            named = {"type": "file", "path": entry["rfilename"], "oid": entry["blobId"]}
            if "lfs" in entry:
                named["lfs"] = entry["lfs"] | {"oid": entry["lfs"]["sha256"]}
            entries.append(named | {"size": entry["size"]})
        return json.dumps(entries).encode()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, body: bool) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hub.token and not given:
            self._send(401, b"", body, {"X-Error-Code": "GatedRepo"})
        elif hub.stranger and given == hub.stranger:
            self._send(403, b"", body, {"X-Error-Code": "GatedRepo"})
        elif hub.token and given != hub.token:
            unknown = "Invalid credentials in Authorization header"
            self._send(401, b"", body, {"X-Error-Message": unknown})
        elif path == f"/api/models/{MODEL}/tree/{COMMIT}":
            self._send(200, hub.tree(), body, {"Content-Type": "application/json"})
        elif path.startswith(f"/api/models/{MODEL}"):
            self._send(200, hub.described(), body, {"Content-Type": "application/json"})
        elif (name := path.removeprefix(f"/{MODEL}/resolve/{COMMIT}/")) in hub.files:
            data = hub.files[name]
            if hub.damaged:
                data = data[:-1] + bytes([data[-1] ^ 1])
            etag = f'"{hashlib.sha256(hub.files[name]).hexdigest()}"'
            headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            self._send(200, data, body, headers)
        else:
            self._send(404, b"", body, {"X-Error-Code": "RepoNotFound"})

    def _send(self, code: int, data: bytes, body: bool, headers: Mapping[str, str]) -> None:
        asked = self.headers.get("Range", "")
        if code == 200 and asked.startswith("bytes=") and body:
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            headers = {
                **headers,
                "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}",
            }
            code, data = 206, data[first:]
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Not on the tests' output."""
