"""Starts `ring_process.py` and describes it, for tests that read from another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from batonlm.v1 import handover_pb2 as pb


@dataclass(frozen=True)
class Neighbour:
    """A living process whose buffer i is full of the byte i + 1."""

    process: subprocess.Popen[str]
    instance_id: str
    metadata: bytes
    ring: pb.StagingPoolDescription


@contextmanager
def neighbour(
    transport: str, num_buffers: int, buffer_bytes: int, **environment: str
) -> Iterator[Neighbour]:
    command = [sys.executable, "-m", "tests.kv.ring_process", transport]
    process = subprocess.Popen(
        [*command, str(num_buffers), str(buffer_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdin and process.stdout
    try:
        line = process.stdout.readline()
        assert line, "the neighbour did not start"
        told = json.loads(line)
        ring = pb.StagingPoolDescription(
            base_address=told["base_address"], buffer_bytes=buffer_bytes, num_buffers=num_buffers
        )
        yield Neighbour(process, told["instance_id"], bytes.fromhex(told["metadata"]), ring)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
