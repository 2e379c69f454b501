"""`baton down` ends what `baton up` started, in bounded time, and nothing else."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from batonlm.cli import down, state

# A supervisor that has a child and does what it is told on its command line.
SUPERVISOR = """
import json, os, subprocess, sys, time
from batonlm.cli import state
with state.locked():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=2)
    if sys.argv[1] != "starts":
        state.write({
            "http": "http://127.0.0.1:1", **state.process(os.getpid()),
            "processes": [{"role": "router", **state.process(child.pid)}],
        })
    if sys.argv[1] == "hangs":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@contextmanager
def a_stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def stop() -> int:
    return down.run(argparse.Namespace(name=""))


def started(how: str) -> tuple[subprocess.Popen[str], int]:
    """The supervisor and the pid of its child."""
    command = [sys.executable, "-c", SUPERVISOR, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def end(process: subprocess.Popen[str], child: int) -> None:
    for pid in (process.pid, child):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=120)


def test_a_process_that_has_the_number_of_a_dead_supervisor_is_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    process, child = started("ready")
    try:
        assert state.read() is not None
    finally:
        end(process, child)
    # The files of a supervisor that was killed, with a number that was given out again.
    with a_stranger() as stranger:
        for file in (state.state_file(), state.lock_file()):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": stranger.pid}))
        assert state.read() is None
        assert stop() == 0
        assert "nothing runs" in capsys.readouterr().err
        assert stranger.poll() is None


def test_what_another_version_wrote_names_nobody() -> None:
    with a_stranger() as stranger:
        state.write({"pid": stranger.pid, "http": "http://127.0.0.1:1", "processes": []})
        assert stop() == 0
        assert stranger.poll() is None


def test_one_that_starts_is_stopped_too(capsys: pytest.CaptureFixture[str]) -> None:
    process, child = started("starts")
    try:
        assert "is starting" in state.who_runs()
        assert str(process.pid) in state.who_runs()
        assert stop() == 0
        assert process.wait(120) != 0
    finally:
        end(process, child)


def test_one_that_does_not_end_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(down, "PATIENCE_S", 0.2)
    process, child = started("hangs")
    try:
        assert stop() == 0
        assert f"process {process.pid} hangs and is killed" in capsys.readouterr().err
        assert process.wait(120) == -signal.SIGKILL
        assert not state.alive(state.process(child))
        # The lock went with it, and nothing of it is believed.
        with state.locked():
            assert state.read() is None
    finally:
        end(process, child)
