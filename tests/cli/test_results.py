"""Figures have one JSON form, and the tables of the documents are made from it."""

from __future__ import annotations

import json
from pathlib import Path

import tables
from baton.cli.results import Result, compared, table, write


def test_a_goal_is_met_or_missed() -> None:
    assert compared("a", 90.0, "tokens/s", 100.0, goal=0.8).met is True
    assert compared("a", 70.0, "tokens/s", 100.0, goal=0.8).met is False
    assert compared("a", 70.0, "tokens/s", 100.0).met is None


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
    assert "| speed | 90 tokens/s | 100 tokens/s | 0.90 | 1 (missed) |" in rendered
    assert "| share | 5 % |  |  |  |" in rendered
    assert "missed" in table(figures)


def test_tables_are_replaced_between_their_marks_only() -> None:
    text = "before\n<!-- table: relay -->\nold\n<!-- end -->\nafter\n"
    assert tables.PLACE.sub(r"\1new\n\3", text) == (
        "before\n<!-- table: relay -->\nnew\n<!-- end -->\nafter\n"
    )
