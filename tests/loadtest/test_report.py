"""Figures have one JSON form, and the tables of the documents are made from it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import tables
from baton_loadtest.report import Result, at_most, compared, goal_text, number, table, write


def test_a_goal_is_met_or_missed() -> None:
    assert compared("a", 90.0, "tokens/s", 100.0, goal=0.8).met is True
    assert compared("a", 70.0, "tokens/s", 100.0, goal=0.8).met is False
    assert compared("a", 70.0, "tokens/s", 100.0).met is None


def test_a_goal_may_be_a_greatest_one() -> None:
    assert at_most("a", 300.0, "µs", 300.0).met is True
    assert at_most("a", 301.0, "µs", 300.0).met is False
    cost = at_most("a", 12.0, "ms", 1.1, against=10.0)
    assert (cost.ratio, cost.met) == (1.2, False)


def test_a_goals_direction_is_told() -> None:
    told = [
        goal_text(asdict(result))
        for result in (
            compared("a", 2.0, "", 1.0, goal=1.5),
            compared("a", 1.0, "", 1.0, goal=1.5),
            at_most("a", 1.0, "", 1.5),
            at_most("a", 2.0, "", 1.5),
            Result("a", 2.0, ""),
            compared("a", 3.0, "", 3.0, goal=1.0),
            at_most("a", 0.0, "", 0.0),
        )
    ]
    assert told[:5] == ["≥ 1.5 (met)", "≥ 1.5 (missed)", "≤ 1.5 (met)", "≤ 1.5 (missed)", ""]
    assert told[5:] == ["≥ 1 (met)", "≤ 0 (met)"]


def test_numbers_are_short() -> None:
    assert [number(v) for v in (7653, 0.0123456, 12.3456, 1234.5)] == [
        "7,653",
        "0.0123",
        "12.3",
        "1,234",
    ]


def test_the_file_names_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "--llama", "/opt/x/lib"])
    write(tmp_path / "x.json", 0, [])
    said = json.loads((tmp_path / "x.json").read_text())
    assert said["command"] == "baton bench --llama lib"


def test_the_file_has_the_agreed_form(tmp_path: Path) -> None:
    figures = [compared("speed", 90.0, "tokens/s", 100.0, goal=1.0), Result("share", 5.0, "%")]
    write(tmp_path / "deep" / "x.json", 7, figures)
    said = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert set(said) == {"command", "commit", "machine", "seed", "results"}
    assert said["seed"] == 7
    assert said["results"][0] == {
        "name": "speed",
        "value": 90.0,
        "unit": "tokens/s",
        "against": 100.0,
        "ratio": 0.9,
        "goal": 1.0,
        "met": False,
    }
    rendered = tables.render(said)
    assert "| speed | 90 tokens/s | 100 tokens/s | 0.90 | ≥ 1 (missed) |" in rendered
    assert "| share | 5 % |  |  |  |" in rendered
    assert "missed" in table(figures)


def test_tables_are_replaced_between_their_marks_only() -> None:
    text = "before\n<!-- table: relay -->\nold\n<!-- end -->\nafter\n"
    assert tables.PLACE.sub(r"\1new\n\3", text) == (
        "before\n<!-- table: relay -->\nnew\n<!-- end -->\nafter\n"
    )


def test_a_table_is_followed_by_its_plot_and_kept_until_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BENCHMARKS", tmp_path / "benchmarks")
    place = tables.PLACE.search("<!-- table: x -->\nnot yet\n<!-- end -->")
    assert place is not None
    assert tables.fill(place, tmp_path) == place[0]
    write(tmp_path / "benchmarks" / "x.json", 7, [Result("share", 5.0, "%")])
    assert "![x]" not in tables.fill(place, tmp_path)
    (tmp_path / "benchmarks" / "x.svg").write_text("<svg/>")
    filled = tables.fill(place, tmp_path)
    assert "not yet" not in filled
    assert "| share | 5 % |" in filled
    assert "![x](benchmarks/x.svg)" in filled
