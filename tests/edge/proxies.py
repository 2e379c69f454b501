"""nginx and HAProxy of Debian, as real processes before a running edge."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.edge.edge import LIVENESS_S
from tests.edge.wire import Address

NGINX = """\
daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 100m;
    upstream edge {{ server {edge}; keepalive 8; }}
    server {{
        listen {listen};
        location / {{
            proxy_pass http://edge;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
            proxy_request_buffering {buffering};
        }}
    }}
}}
"""

HAPROXY = """\
global
    maxconn 512
defaults
    mode http
    option abortonclose
    timeout connect 30s
    timeout client 30s
    timeout server 30s
frontend front
    bind {listen}
    default_backend edge
backend edge
    http-reuse always
    server edge {edge}
"""

PROXIES = ("nginx", "nginx-unbuffered", "haproxy")


def needed(program: str) -> str:
    """Its path; a test that needs one which is not there is skipped."""
    # Debian has servers where not everybody's PATH looks.
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"needs Debian's {program}")
    return found


@contextmanager
def proxy(kind: str, edge: str, folder: Path) -> Iterator[Address]:
    """Where it listens. It keeps its connections to the edge and shares them between clients."""
    name = kind.split("-")[0]
    program = needed(name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address: Address = free.getsockname()[:2]
    listen = f"{address[0]}:{address[1]}"
    file = folder / f"{name}.conf"
    words = {"folder": folder, "edge": edge, "listen": listen}
    if name == "nginx":
        buffering = "off" if kind.endswith("unbuffered") else "on"
        file.write_text(NGINX.format(buffering=buffering, **words))
        command = [program, "-p", str(folder), "-e", f"{folder}/error.log", "-c", str(file)]
    else:
        file.write_text(HAPROXY.format(**words))
        command = [program, "-db", "-q", "-f", str(file)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_for(address, process, folder / "output")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(LIVENESS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(address: Address, process: subprocess.Popen[bytes], output: Path) -> None:
    until = time.monotonic() + LIVENESS_S
    while True:
        assert process.poll() is None and time.monotonic() < until, output.read_text()
        try:
            socket.create_connection(address, LIVENESS_S).close()
            return
        except ConnectionError:
            time.sleep(0.01)
