"""Plots are small text files that do not change unless the figures do."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_loadtest.report import Bars, Chart, Line, draw

CHARTS = (
    Chart("decode", "context", "ms", (Line("batch 1", [128, 512], [1.5, 2.0]),), log=True),
    Chart("occupancy", "step", "sequences", (Line("static", range(100), [8.0] * 100),)),
    Bars("speed", "tokens/s", (("Baton", 150.0), ("another", 48.0))),
)


@pytest.mark.deep
def test_the_same_charts_are_the_same_bytes(tmp_path: Path) -> None:
    draw(tmp_path / "deep" / "a.svg", CHARTS)
    draw(tmp_path / "b.svg", CHARTS)
    drawn = (tmp_path / "deep" / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    for text in ("batch 1", "occupancy", "sequences", "Baton", "150"):
        assert text in drawn
