"""Figures and charts of a measurement, and their JSON file, table and plot.

`Result` is one figure; every command writes its figures with `write` in one JSON form. matplotlib
is imported only to draw a plot. numpy is not used: the image of the CPU processes, in which load
tests run, has neither.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batonlm.core.errors import InvalidArgument, install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHART_WIDTH, CHART_HEIGHT = 5.0, 3.2
"""The size of one chart of a plot, in inches."""


@dataclass(frozen=True, slots=True)
class Result:
    """One figure."""

    name: str
    value: float
    unit: str
    against: float | None = None
    """The value it is compared with, in the same unit."""
    ratio: float | None = None
    """The value divided by `against`."""
    goal: float | None = None
    """A limit of the ratio if there is one, else of the value."""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. x and y have the same length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log: bool = False
    """Whether both axes are logarithmic."""


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per (name, value)."""

    title: str
    x_label: str
    bars: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one benchmark, and its charts, which a plot shows side by side."""

    results: list[Result]
    charts: tuple[Chart | Bars, ...] = ()


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of values does not exceed; 0.0 if
    empty."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ms(seconds: Sequence[float], share: float) -> float:
    """Returns a quantile of seconds, in milliseconds."""
    return 1000 * quantile(seconds, share)


def compared(
    name: str, value: float, unit: str, against: float, goal: float | None = None
) -> Result:
    """Returns a figure compared with another one of the same run; the goal is a minimum ratio."""
    ratio = value / against
    return Result(name, value, unit, against, ratio, goal, None if goal is None else ratio >= goal)


def at_most(
    name: str, value: float, unit: str, goal: float, against: float | None = None
) -> Result:
    """Returns a figure with an upper limit of its value, or of its ratio to another figure."""
    ratio = None if against is None else value / against
    met = (value if ratio is None else ratio) <= goal
    return Result(name, value, unit, against, ratio, goal, met)


def goal_text(result: Mapping[str, Any]) -> str:
    """Returns, for example, "≥ 3 (met)"; "" without a goal.

    Whether a goal is a minimum or a maximum follows from whether it was met. If it was reached
    exactly, the goal of a ratio counts as a minimum and that of a value as a maximum.
    """
    goal, met = result["goal"], result["met"]
    if goal is None:
        return ""
    reached = result["value"] if result["ratio"] is None else result["ratio"]
    least = result["ratio"] is not None if reached == goal else (reached > goal) == met
    sign = "≥" if least else "≤"
    return f"{sign} {goal:g} ({'met' if met else 'missed'})"


def number(value: float) -> str:
    """Formats with three significant digits, or all digits of a whole number."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(results: list[Result]) -> str:
    """Returns the figures as lines for a terminal."""
    lines = []
    width = max((len(r.name) for r in results), default=0)
    for r in results:
        line = f"{r.name:<{width}} {number(r.value):>10} {r.unit:<12}"
        if r.against is not None and r.ratio is not None:
            line += f" against {number(r.against):>10}: {r.ratio:.2f}x"
        if r.goal is not None:
            line += f"   goal {goal_text(asdict(r))}"
        lines.append(line)
    return "\n".join(line.rstrip() for line in lines)


def machine() -> str:
    """Returns the CPU's name, its cores and the version of Python."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def commit() -> str:
    """Returns this checkout's commit, with + for uncommitted changes; "" outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return ""
        return done.stdout.strip()

    short = git("rev-parse", "--short", "HEAD")
    return f"{short}+" if short and git("status", "--porcelain", "-uno") else short


def document(seed: int, results: list[Result]) -> dict[str, Any]:
    """Returns what the JSON file holds. Local folders are removed from the command's arguments."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    script = sys.argv[0].startswith("scripts/")
    return {
        "command": " ".join(["python", sys.argv[0], *words] if script else ["baton", *words]),
        "commit": commit(),
        "machine": machine(),
        "seed": seed,
        "results": [asdict(result) for result in results],
    }


def write(path: Path, seed: int, results: list[Result]) -> None:
    """Writes the JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(seed, results), indent=2) + "\n")


def check_plots(field: str = "plot") -> None:
    """Raises InvalidArgument if no plot can be drawn; called before a long measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidArgument(f"plots: {install('bench')}", field=field) from None


def draw(path: Path, charts: Sequence[Chart | Bars]) -> None:
    """Writes one SVG file with the charts side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(charts, columns=len(charts)), encoding="utf-8")


def svg(charts: Sequence[Chart | Bars], columns: int) -> str:
    """Returns one picture of all charts, deterministically."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    rows = -(-len(charts) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "baton", "svg.fonttype": "none", "font.size": 8}):
        size = CHART_WIDTH * columns, CHART_HEIGHT * rows
        figure = Figure(figsize=size, layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flat
        for place, chart in zip(places, charts, strict=False):
            place.set_title(chart.title)
            place.set_xlabel(chart.x_label)
            place.grid(alpha=0.3)
            if isinstance(chart, Bars):
                _draw_bars(place, chart)
            else:
                _draw_lines(place, chart)
        for place in list(places)[len(charts) :]:
            place.set_axis_off()
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def _draw_lines(place: Axes, chart: Chart) -> None:
    few = max(len(line.x) for line in chart.lines) <= 16
    if not any(len(line.x) for line in chart.lines):
        place.text(0.5, 0.5, "nothing to show", ha="center", transform=place.transAxes)
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
    place.set_ylabel(chart.y_label)
    place.legend(frameon=False)


def _draw_bars(place: Axes, chart: Bars) -> None:
    names = [name for name, _ in chart.bars]
    drawn = place.barh(names, [value for _, value in chart.bars], height=0.6)
    place.bar_label(drawn, fmt=number, padding=2)
    place.margins(x=0.15)
    place.set_axisbelow(True)
    place.invert_yaxis()
