"""The one JSON form of every measurement; knows nothing of what was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


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
        "command": " ".join(["baton", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "seed": seed,
        "results": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=2) + "\n")


def table(results: list[Result]) -> str:
    """The figures as lines for a terminal."""
    lines = []
    for r in results:
        line = f"{r.name:<44} {r.value:>12,.4g} {r.unit}"
        if r.against is not None and r.ratio is not None:
            line += f"   against {r.against:,.4g}: {r.ratio:.2f}x"
        if r.met is not None:
            line += f"   goal {r.goal}: {'met' if r.met else 'missed'}"
        lines.append(line)
    return "\n".join(lines)
