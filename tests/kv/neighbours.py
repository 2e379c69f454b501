"""Starts `ring_process.py` and describes it, for tests that read from another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.handover_messages import RingDescription


@dataclass(frozen=True)
class Neighbour:
    """A living process whose slot i is full of the byte i + 1."""

    process: subprocess.Popen[str]
    incarnation: str
    metadata: bytes
    ring: RingDescription


@contextmanager
def neighbour(
    transport: str, num_slots: int, slot_bytes: int, **environment: str
) -> Iterator[Neighbour]:
    command = [sys.executable, "-m", "tests.kv.ring_process", transport]
    process = subprocess.Popen(
        [*command, str(num_slots), str(slot_bytes)],
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
        ring = RingDescription(told["base_address"], slot_bytes, num_slots)
        yield Neighbour(process, told["incarnation"], bytes.fromhex(told["metadata"]), ring)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
