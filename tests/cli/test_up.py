"""`baton up` that is stopped while it starts, at several moments, with real processes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from batonlm.cli.ports import free_ports
from tests.e2e.relay import until_it_comes_about

END_S = 120.0
OTHER_MOMENTS = ("Starting 5", "(4 of 5)", "Ready")


def started_here(folder: Path) -> list[int]:
    """The processes whose environment has this state folder."""
    mark = f"XDG_STATE_HOME={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@contextmanager
def starting(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    http, grpc = free_ports(2)
    ports = ("--http-port", str(http), "--grpc-port", str(grpc))
    process = subprocess.Popen(
        [sys.executable, "-m", "batonlm.cli.main", "up", "--runner", "fake", *ports, *flags],
        env={**os.environ, "XDG_STATE_HOME": str(folder), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in started_here(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=END_S)


def read_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """The lines up to one with these words."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(f"it ended before it said {words!r}: {lines}")


def check_nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + END_S
    while left := started_here(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not (folder / "baton" / "up.json").exists()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize(
    "moment", ["(1 of 5)", *(pytest.param(m, marks=pytest.mark.deep) for m in OTHER_MOMENTS)]
)
def test_it_says_what_it_stops_and_leaves_nothing(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    with starting(tmp_path) as process:
        read_until(process, moment)
        process.send_signal(number)
        assert process.stderr is not None
        words = process.stderr.read()
        code = process.wait(END_S)
        check_nothing_is_left(tmp_path)
    # A signal may come before the supervisor has a child, or even takes signals.
    if "Stopping" in words:
        assert code == 0
        assert words.rstrip().endswith("Stopped: nothing runs any more")
    else:
        assert moment == "Starting 5"
    assert "Traceback" not in words


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("moment", ["Starting 5", pytest.param("(1 of 5)", marks=pytest.mark.deep)])
def test_one_that_detaches_takes_what_it_started_with_it(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    folders = (tmp_path / str(tried) for tried in itertools.count())

    def it_was_starting() -> bool:
        """Whether the signal came before all processes served, and it let them go."""
        folder = next(folders)
        with starting(folder, "--detach") as process:
            read_until(process, moment)
            process.send_signal(number)
            assert process.stderr is not None
            words = process.stderr.read()
            if process.wait(END_S) == 0:
                return False
            assert process.returncode == 128 + number
            check_nothing_is_left(folder)
        assert "Stopped: nothing runs any more" in words or moment == "Starting 5"
        assert "Traceback" not in words
        return True

    until_it_comes_about(it_was_starting, "a signal while it starts")


@pytest.mark.deep
def test_it_says_what_workers_do_while_they_start(tmp_path: Path) -> None:
    with starting(tmp_path) as process:
        lines = "".join(read_until(process, "Ready"))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=END_S)
    for worker in ("prefill-0", "decode-0"):
        place = lines.index(f"{worker} tries its transport of KV")
        assert place < lines.index(f"{worker} serves")


@pytest.mark.deep
def test_two_that_start_at_once_take_different_ports(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    with starting(folders[0]) as one, starting(folders[1]) as other:
        for process in (one, other):
            read_until(process, "Ready")
        for process in (one, other):
            process.send_signal(signal.SIGTERM)
        for process in (one, other):
            process.communicate(timeout=END_S)
            assert process.returncode == 0
