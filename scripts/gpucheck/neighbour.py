"""A second process of a section, and its side of the conversation: JSON, line by line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_LINE = 1 << 20


class Neighbour:
    """The process that was started. The section's own time limit bounds every wait."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def listen(self) -> dict[str, Any]:
        """Its next line. Raises RuntimeError when it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline(LONGEST_LINE)
        if not line:
            raise RuntimeError(f"the second process ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.listen()


@contextmanager
def neighbour(module: str, *arguments: str) -> Iterator[Neighbour]:
    """Starts `python -m module`, whose log goes where ours goes; ends it."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Neighbour(process)
    finally:
        process.kill()
        process.wait()


def answer(**line: Any) -> None:
    """In the second process: says a line to the first one."""
    print(json.dumps(line), flush=True)


def questions() -> Iterator[dict[str, Any]]:
    """In the second process: what is asked, until the first one ends."""
    for line in sys.stdin:
        yield json.loads(line)
