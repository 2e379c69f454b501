"""A contender that fails or hangs is a clear error, and its process is gone."""

from __future__ import annotations

import pytest

from baton_loadtest.bench.cost import run_scheduler
from baton_loadtest.bench.engines import build
from baton_loadtest.launch import ContenderFailed, call


@pytest.mark.deep
def test_a_contender_that_breaks_is_told_in_its_own_words() -> None:
    with pytest.raises(ContenderFailed, match=r"^build: KeyError: 'settings'$"):
        call(build, {"target": "x"}, threads=1, deadline_s=240.0)


def test_a_contender_that_does_not_end_is_ended() -> None:
    # Loading torch alone takes longer than this.
    with pytest.raises(ContenderFailed, match="not done after"):
        call(build, {}, threads=1, deadline_s=0.001)


@pytest.mark.deep
def test_an_answer_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    job = {"seed": 1, "sequences": 4, "lengths": ""}
    answer = call(run_scheduler, job, threads=1, deadline_s=240.0)
    assert len(answer["step_s"]) > 100
    assert set(answer["sharing"]) == {"8 system prompts, 256 users", "4 choices of each request"}
    assert capfd.readouterr().out == ""
