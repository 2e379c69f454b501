"""Writes the tables of docs and README from docs/benchmarks/*.json; measures nothing.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, where NAME.json is the file.
`--check` writes nothing and fails when a table differs from its file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs/benchmarks"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(said: dict[str, Any]) -> str:
    """One Markdown table with where it comes from below it."""
    lines = ["| figure | value | against | ratio | goal |", "|---|---|---|---|---|"]
    for r in said["results"]:
        unit = f" {r['unit']}" if r["unit"] else ""
        against = "" if r["against"] is None else f"{number(r['against'])}{unit}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}"
        goal = "" if r["goal"] is None else f"{r['goal']:g} ({'met' if r['met'] else 'missed'})"
        lines.append(f"| {r['name']} | {number(r['value'])}{unit} | {against} | {ratio} | {goal} |")
    source = f"`{said['command']}`, commit {said['commit']}, {said['machine']}, seed {said['seed']}"
    return "\n".join([*lines, "", source, ""])


def number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a table is out of date")
    check = parser.parse_args().check
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        fresh = PLACE.sub(
            lambda m: m[1] + render(json.loads((BENCHMARKS / f"{m[2]}.json").read_text())) + m[3],
            text,
        )
        if fresh != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(fresh)
    if check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run 'make tables'")


if __name__ == "__main__":
    main()
