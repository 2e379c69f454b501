"""Starts the server of known latencies and reads its records; measures nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from baton.core.errors import BatonError
from baton_loadtest.bench.known_server import Latencies, Record

END_S, READ_S = 10.0, 30.0


class Known:
    """One that runs. address: host:port."""

    def __init__(self, address: str, pid: int) -> None:
        self.address, self.pid = address, pid

    def records(self) -> list[Record]:
        """Of answers that ended since the last time."""
        with urllib.request.urlopen(f"http://{self.address}/records", timeout=READ_S) as answer:
            return [Record(**each) for each in json.load(answer)]


@contextmanager
def known(latencies: Latencies) -> Iterator[Known]:
    """Ended on the way out. Raises BatonError when it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "baton_loadtest.bench.known_server", json.dumps(asdict(latencies))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise BatonError("the server of known latencies did not start")
            yield Known(f"127.0.0.1:{port}", process.pid)
        finally:
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
