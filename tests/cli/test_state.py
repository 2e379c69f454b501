"""The state file of `baton up` is believed only while its supervisor runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batonlm.cli import state


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_written_read_removed() -> None:
    assert state.read() is None
    me = state.process(os.getpid())
    with state.locked():
        state.write(me | {"http": "h"})
        assert state.read() == me | {"http": "h"}
    assert not state.state_file().exists()
    assert [path.name for path in state.folder().iterdir()] == ["up.lock"]


def test_a_second_one_is_told_of_the_first() -> None:
    with state.locked():
        with pytest.raises(state.AlreadyRuns, match="is starting"), state.locked():
            pass
        state.write(state.process(os.getpid()) | {"http": "http://h"})
        with pytest.raises(state.AlreadyRuns, match="already running at http://h"), state.locked():
            pass
        assert state.read() is not None
    with state.locked():
        pass


def test_a_dead_supervisor_counts_as_none() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    state.write(state.process(os.getpid()) | {"pid": ended.pid})
    assert state.read() is None


def test_a_zombie_is_not_alive() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert zombie.stdout is not None
    zombie.stdout.read()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert not state.alive(state.process(zombie.pid))
    zombie.stdout.close()
    zombie.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}', "null"])
def test_a_broken_file_counts_as_none(text: str) -> None:
    state.folder().mkdir(parents=True)
    state.state_file().write_text(text)
    assert state.read() is None
