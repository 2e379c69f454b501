"""Scenario files, those that come with Baton and those that are wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton_loadtest import scenario_file, scenarios
from baton_loadtest.load import scenario
from baton_loadtest.load.scenario import Changes, Drawn, Kind, Replay
from batonlm.core.errors import InvalidArgument

READY = [scenario_file(name) for name in scenarios()]
TRACE = '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}\n'
LATER = '{"timestamp": 4000, "input_length": 9, "output_length": 5, "hash_ids": [7]}\n'
GOOD = """
[arrivals]
rate = 2
seconds = 30
[lengths]
prompt_tokens = 10
output_tokens = 5
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_a_ready_scenario(path: Path) -> None:
    source = scenario.read(path, Changes())
    assert isinstance(source, Drawn)
    workload = source.workload(0)
    assert len(workload.sessions) > 10
    for session in workload.sessions:
        context = sum(turn.prompt_tokens + turn.output_tokens for turn in session.turns)
        assert context <= 2048


def test_there_are_four() -> None:
    assert [path.stem for path in READY] == ["agent", "chat", "code", "rag"]


def test_flags_say_it_instead(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    plain = scenario.read(path, Changes())
    assert isinstance(plain, Drawn) and plain.arrivals.kind is Kind.POISSON
    changed = scenario.read(path, Changes(rate=7.0, seconds=9.0, scale=2.0, most_tokens=15))
    assert isinstance(changed, Drawn)
    assert changed.mean_rate == pytest.approx(7.0)
    assert (changed.arrivals.seconds, changed.scale, changed.most_tokens) == (9.0, 2.0, 15)
    assert changed.lengths.prompt.draw(random.Random(0), 1.0) == 10


def test_a_trace_of_a_flag_or_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE + LATER)
    flag = Changes(trace=tmp_path / "trace.jsonl", speed=2.0, seconds=60.0)
    file = written(tmp_path, '[trace]\nfile = "trace.jsonl"\nspeed = 2\nseconds = 60\n')
    for path, changes in (
        (None, flag),
        (file, Changes()),
        (written(tmp_path / "..", GOOD), flag),
    ):
        source = scenario.read(path, changes)
        assert isinstance(source, Replay)
        assert [one.due_s for one in source.workload(0).sessions] == [0, 2]
    faster = scenario.read(file, Changes(rate=4.0))
    assert [one.due_s for one in faster.workload(0).sessions] == pytest.approx([0, 0.5])


def test_broken_lines_are_told(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE + "{\n" * 5)
    changes = Changes(trace=tmp_path / "trace.jsonl")
    with pytest.raises(InvalidArgument, match="line 2: is no JSON"):
        scenario.read(None, changes)
    source = scenario.read(None, Changes(trace=tmp_path / "trace.jsonl", skip_broken=True))
    told = scenario.skipped(source)
    assert len(told) == 4 and told[-1] == "and 2 more"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "arrivals"),
        ("arrivals = 3", "arrivals"),
        ("[arrival]\nrate = 1", "arrival"),
        (GOOD.replace("rate", "rates"), "arrivals.rates"),
        (GOOD.replace("rate = 2", "rate = 'two'"), "arrivals.rate"),
        (GOOD.replace("rate = 2", "rate = true"), "arrivals.rate"),
        (GOOD.replace("rate = 2", "rate = nan"), "arrivals.rate"),
        (GOOD.replace("rate = 2", "rate = 0"), "arrivals.rate"),
        (GOOD.replace("rate = 2", "rate = 2\nkind = 'waves'"), "arrivals.kind"),
        (GOOD.replace("rate = 2", "rate = 2\nkind = ['ramp']"), "arrivals.kind"),
        (GOOD.replace("rate = 2", "rate = 2\nkind = 'ramp'"), "arrivals.to_rate"),
        (GOOD.replace("seconds = 30", ""), "arrivals.seconds"),
        (GOOD.replace("prompt_tokens = 10", ""), "lengths.prompt_tokens"),
        (GOOD.replace("= 10", "= 1.5"), "lengths.prompt_tokens"),
        (GOOD + "of = 'talk'", "lengths.of"),
        (GOOD + "scale = 0", "lengths.scale"),
        (GOOD + "most_tokens = 1", "lengths.most_tokens"),
        (GOOD + "[prompts]\nturns = 0", "prompts.turns"),
        (GOOD + "[trace]\nfile = 'x'", "arrivals"),
        ("[trace]\nfile = 3", "trace.file"),
        ("[trace]\nfile = 'none.jsonl'", "trace"),
        ("[trace]\nfile = 'none.jsonl'\n[lengths]\nof = 'chat'", "lengths.of"),
        ("[arrivals", "scenario"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        scenario.read(written(tmp_path, text), Changes())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [(Changes(rate=0.0), "rate"), (Changes(speed=2.0), "speed"),
     (Changes(scale=-1.0), "lengths.scale"), (Changes(seconds=0.0), "arrivals.seconds")],
)  # fmt: skip
def test_a_wrong_flag(tmp_path: Path, changes: Changes, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        scenario.read(written(tmp_path, GOOD), changes)
    assert caught.value.field == field


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        scenario.read(tmp_path / "none.toml", Changes())
