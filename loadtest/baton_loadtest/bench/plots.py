"""Draws a report's charts as one SVG file.

matplotlib is imported when something is drawn, so that measuring does not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import InvalidArgument
from baton_loadtest.bench.report import Bars, Chart
from baton_loadtest.results import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 5.0, 3.2
"""Of one chart, in inches."""


def check() -> None:
    """Raises InvalidArgument when nothing can be drawn here, before an hour of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidArgument(
            "needs matplotlib: pip install 'baton[bench]'", field="plot"
        ) from None


def draw(path: Path, charts: Sequence[Chart | Bars]) -> None:
    """The same charts always give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "baton", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(WIDTH * len(charts), HEIGHT), layout="constrained")
        places = figure.subplots(1, len(charts), squeeze=False)[0]
        for place, chart in zip(places, charts, strict=True):
            place.set_title(chart.title)
            place.grid(alpha=0.3)
            if isinstance(chart, Bars):
                _bars(place, chart)
            else:
                _lines(place, chart)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _lines(place: Axes, chart: Chart) -> None:
    few = max(len(line.x) for line in chart.lines) <= 16
    for line in chart.lines:
        place.plot(line.x, line.y, marker="o" if few else "", ms=3, lw=1, label=line.name)
    if chart.log:
        place.set_xscale("log", base=2)
        place.set_yscale("log")
        place.set_xticks(sorted({x for line in chart.lines for x in line.x}))
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_formatter(lambda value, _: number(value))
        place.minorticks_off()
    else:
        place.set_ylim(bottom=0)
    place.set_xlabel(chart.x_label)
    place.set_ylabel(chart.y_label)
    place.legend(frameon=False)


def _bars(place: Axes, chart: Bars) -> None:
    names = [name for name, _ in chart.bars]
    drawn = place.barh(names, [value for _, value in chart.bars], height=0.6)
    place.bar_label(drawn, fmt=number, padding=2)
    place.margins(x=0.15)
    place.set_axisbelow(True)
    place.invert_yaxis()
    place.set_xlabel(chart.x_label)
