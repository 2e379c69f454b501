"""The state file of `baton up` is believed only while its supervisor runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batonlm.cli import state
from batonlm.cli.main import main
from batonlm.core.errors import InvalidArgument


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


def test_batons_of_different_names_run_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(state.NAME_VARIABLE, "")
    assert main(["status"]) == 1
    assert "nothing runs" in capsys.readouterr().err
    me = state.process(os.getpid()) | {"grpc": "g", "processes": []}
    with state.locked():
        state.write(me | {"http": "http://one"})
        monkeypatch.setenv(state.NAME_VARIABLE, "second")
        assert state.read() is None
        with state.locked():
            state.write(me | {"http": "http://two"})
            assert "'baton down --name second' stops it" in state.who_runs()
            assert {n: s["http"] for n, s in state.everyone().items()} == {
                "": "http://one",
                "second": "http://two",
            }
            assert main(["status"]) == 0
            shown = capsys.readouterr().out
            assert "(no name): http://one" in shown and "second: http://two" in shown
        monkeypatch.setenv(state.NAME_VARIABLE, "")
    assert state.everyone() == {}


def test_a_name_is_not_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(state.NAME_VARIABLE, "")
    with pytest.raises(InvalidArgument):
        state.choose("../up")
