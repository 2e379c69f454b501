"""The parts of a start add up to it, and its words say where it stands."""

from __future__ import annotations

import pytest

from batonlm.rpc.server import PARENT_VARIABLE, Startup, process_age_s


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_start_in_words_and_parts() -> None:
    clock = Clock()
    startup = Startup(clock, age_s=2.0)
    assert (startup.words, startup.progress) == ("starting: import", 0.0)
    startup.enter("engine")
    clock.now += 1.0
    startup.weights(43, 100)
    assert (startup.words, startup.progress) == ("loading weights 43 %", 0.43)
    clock.now += 8.0
    startup.weights(100, 100)
    assert (startup.words, startup.progress) == ("starting: check", 1.0)
    clock.now += 0.5
    startup.ready()
    assert (startup.words, startup.progress) == ("ready", 1.0)
    assert startup.took == {"import": 2.0, "engine": 1.0, "weights": 8.0, "check": 0.5}
    assert startup.ready_s == 11.5


def test_only_the_first_time_counts() -> None:
    clock = Clock()
    startup = Startup(clock, age_s=0.0)
    startup.ready()
    clock.now += 60.0
    startup.weights(1, 2)
    startup.ready()
    assert (startup.ready_s, startup.words, startup.progress) == (0.0, "ready", 1.0)


def test_a_supervisor_reads_each_part_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    startup = Startup(Clock(), age_s=0.0)
    for done in (50, 100, 100):
        startup.weights(done, 100)
    assert capsys.readouterr().out.splitlines() == ['{"part": "weights"}', '{"part": "check"}']


def test_a_process_has_an_age() -> None:
    assert process_age_s() > 0
