"""Runs a contender's job in a process of its own, pinned and bounded in time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import baton
from baton.core.errors import BatonError


class ContenderFailed(BatonError):
    """A contender ended without an answer, or ran out of time."""


def call(
    module: str, job: dict[str, Any], *, threads: int, deadline_s: float, python: str = ""
) -> dict[str, Any]:
    """What a bench module's `run(job)` returns in a new process on the first `threads` cores.

    python: another interpreter, which then sees nothing of Baton's dependencies. Progress goes to
    stderr. Raises ContenderFailed, then the process is gone as well.
    """
    command = [*_pin(threads), python or sys.executable]
    command += ["-m", "baton_loadtest.bench.child", module]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        # The package alone on the path, not what is installed beside it for another interpreter.
        Path(folder, "baton").symlink_to(next(iter(baton.__path__)))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        others = "" if python else os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, others)))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
        timer = threading.Timer(deadline_s, process.kill)
        timer.start()
        try:
            answer = _talk(process, job)
        finally:
            in_time = timer.is_alive()
            timer.cancel()
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if answer is None:
            errors.seek(0)
            last_words = (errors.read().strip().splitlines() or ["ended without an answer"])[-1]
            reason = last_words if in_time else f"not done after {deadline_s:.0f} s"
            raise ContenderFailed(f"{module}: {reason}")
        return answer


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def check_cpu_clock() -> None:
    """Raises BatonError where `cpu_spent_s` cannot be had."""
    if sys.platform != "linux":
        raise BatonError("another process's processor time can be read on Linux only")


def cpu_spent_s(pid: int) -> float:
    """User and system time of all threads of a process so far. On Linux."""
    # Its name for another process's CPU clock, as clock_getcpuclockid(3) would give it.
    return time.clock_gettime((~pid << 3) | 2)


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _talk(process: subprocess.Popen[str], job: dict[str, Any]) -> dict[str, Any] | None:
    assert process.stdin is not None and process.stdout is not None
    try:
        json.dump(job, process.stdin)
        process.stdin.close()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        said = json.loads(line)
        if "answer" in said:
            answer: dict[str, Any] = said["answer"]
            return answer
        say(f"  {said['progress']}")
    return None


def _pin(threads: int) -> list[str]:
    """Keeps a process on the first cores it may use, where the system can."""
    if not hasattr(os, "sched_getaffinity") or not shutil.which("taskset"):
        return []
    allowed = sorted(os.sched_getaffinity(0))[:threads]
    return ["taskset", "-c", ",".join(map(str, allowed))]
