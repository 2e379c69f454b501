"""Sections that go wrong in every way, for the tests of the GPU check's parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from baton_loadtest.report import Result
from gpucheck.check import Check, Skip


def good(check: Check) -> Iterator[Result]:
    yield Result(f"speed{check.part}", 3.0, "B/s")


def slow(check: Check) -> Iterator[Result]:
    yield check.speed("share", 1.0, "B/s", of="speed", goal=0.5)


def hangs(check: Check) -> Iterator[Result]:
    """Leaves a process of its own behind, too, whose id it reports."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Result("before it hung", child.pid, "pid")
    time.sleep(600)


def crashes(check: Check) -> Iterator[Result]:
    yield Result("before it crashed", 1.0, "B")
    os.kill(os.getpid(), signal.SIGSEGV)
    yield Result("after it crashed", 1.0, "B")


def raises(check: Check) -> Iterator[Result]:
    yield Result("before it raised", 1.0, "B")
    raise ValueError("no such kernel")


def skips(check: Check) -> Iterator[Result]:
    raise Skip("it is not installed here")
    yield
