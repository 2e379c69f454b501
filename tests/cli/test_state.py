"""The state file of `baton up` is believed only while its supervisor runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli import state


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_written_read_removed() -> None:
    assert state.read() is None
    state.write({"pid": os.getpid(), "http": "h"})
    assert state.read() == {"pid": os.getpid(), "http": "h"}
    state.remove(os.getpid() + 1)
    assert state.read() is not None
    state.remove(os.getpid())
    assert not state.state_file().exists()


def test_a_dead_supervisor_counts_as_none() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    state.write({"pid": ended.pid})
    assert state.read() is None


def test_a_zombie_is_not_alive() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    zombie.stdout.read()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert not state.alive(zombie.pid)
    zombie.stdout.close()
    zombie.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}', "null"])
def test_a_broken_file_counts_as_none(text: str) -> None:
    state.folder().mkdir(parents=True)
    state.state_file().write_text(text)
    assert state.read() is None
