"""What a benchmark hands back: its figures and what a plot of them shows; draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_loadtest.results import Result


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; x and y have the same length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one pair of axes. log: both axes grow by factors."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar for each name."""

    title: str
    x_label: str
    bars: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """charts are drawn beside each other."""

    results: list[Result]
    charts: tuple[Chart | Bars, ...] = ()
