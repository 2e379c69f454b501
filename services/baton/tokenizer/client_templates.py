"""Renders chat templates that clients bring, each in a process that may be killed. Knows no chats.

A client's program is a stranger's: besides the sandbox it gets a process of its own with little
memory, which is killed when its time is up. One that rendered in time is used again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import baton
from baton.core.errors import InvalidArgument, Unavailable
from baton.tokenizer.sandbox import OverBudget

START_S = 30.0
SLACK_S = 1.0
"""Beyond the processor time it may use: the machine has other work, too."""


class TemplateFailed(Exception):
    """The template raised something, which is not told."""


class ClientTemplates:
    """May be used by several threads; each has a process to itself meanwhile.

    cpu_s, max_characters: what one render may use.
    """

    def __init__(self, *, cpu_s: float, max_characters: int) -> None:
        self._cpu_s = cpu_s
        self._max_characters = max_characters
        self._idle: list[subprocess.Popen[bytes]] = []

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises InvalidArgument (`template`) if it is no template, OverBudget, TemplateFailed, or
        Unavailable when no process can be had.
        """
        process = self._idle.pop() if self._idle else _started()
        job = {
            "source": source,
            "variables": variables,
            "cpu_s": self._cpu_s,
            "max_characters": self._max_characters,
        }
        try:
            answer = _ask(process, json.dumps(job).encode() + b"\n", self._cpu_s + SLACK_S)
        except BaseException:
            _end(process)
            raise
        if answer is None:
            _end(process)
            raise OverBudget
        self._idle.append(process)
        match json.loads(answer):
            case {"text": str(text)}:
                return text
            case {"line": line}:
                raise InvalidArgument(f"is broken at line {line}", field="template")
            case {"over_budget": True}:
                raise OverBudget
        raise TemplateFailed

    def close(self) -> None:
        while self._idle:
            _end(self._idle.pop())


def _started() -> subprocess.Popen[bytes]:
    # Nothing of our environment, which may hold secrets, is in its own.
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.tokenizer.client_template_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(next(iter(baton.__path__))).parent)},
    )
    try:
        if _ask(process, b"", START_S):
            return process
    except BaseException:
        _end(process)
        raise
    _end(process)
    raise Unavailable("no process for a client's chat template can be started")


def _ask(process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes | None:
    """The line it answers; None if it is gone, at the latest when the time is up."""
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        return None
    finally:
        timer.cancel()
    return answer if answer.endswith(b"\n") else None


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    process.stdout.close()
    with suppress(BrokenPipeError):
        process.stdin.close()
