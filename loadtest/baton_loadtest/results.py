"""The one JSON form of every measurement."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. against: what it is compared with, in the same unit; goal: for the ratio."""

    name: str
    value: float
    unit: str
    against: float | None = None
    ratio: float | None = None
    goal: float | None = None
    met: bool | None = None


def compared(
    name: str, value: float, unit: str, against: float, goal: float | None = None
) -> Result:
    """A figure beside the one it is measured against in the same run; the goal is a least ratio."""
    ratio = value / against
    return Result(name, value, unit, against, ratio, goal, None if goal is None else ratio >= goal)


def at_most(
    name: str, value: float, unit: str, goal: float, against: float | None = None
) -> Result:
    """A figure that is not to exceed its goal: its ratio to another figure, or itself."""
    ratio = None if against is None else value / against
    met = (value if ratio is None else ratio) <= goal
    return Result(name, value, unit, against, ratio, goal, met)


def goal_text(result: Mapping[str, Any]) -> str:
    """ "≥ 3 (met)": a goal is for the ratio if there is one, else for the value. "" without one.

    Whether it is a least or a greatest one follows from whether it was met; where the goal was
    reached exactly, a ratio counts as a least one and a value as a greatest one.
    """
    goal, met = result["goal"], result["met"]
    if goal is None:
        return ""
    reached = result["value"] if result["ratio"] is None else result["ratio"]
    least = result["ratio"] is not None if reached == goal else (reached > goal) == met
    sign = "≥" if least else "≤"
    return f"{sign} {goal:g} ({'met' if met else 'missed'})"


def machine() -> str:
    """Processor, cores and Python, as far as they explain a figure."""
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
    """The commit of the checkout this runs from, or "" outside one; + marks uncommitted changes."""
    root = Path(__file__).resolve().parents[3]

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


def write(path: Path, seed: int, results: list[Result]) -> None:
    said = {
        "command": " ".join(["baton", *map(_portable, sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "seed": seed,
        "results": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=2) + "\n")


def _portable(word: str) -> str:
    """An argument without the folders of this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def number(value: float) -> str:
    """Three digits that matter, all of a whole number."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(results: list[Result]) -> str:
    """The figures as lines for a terminal."""
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
