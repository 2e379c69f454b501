"""Writes the tables of docs and README from docs/benchmarks/*.json; measures nothing.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, where NAME.json is the file; the
plot NAME.svg follows it when there is one. With `matrix` for `table`, figures called `ROW: COLUMN`
become rows and columns, of values alone. What has not been measured yet keeps the text it has.
`--check` writes nothing and fails when a table differs from its file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from baton_loadtest.report import goal_text, number

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs/benchmarks"
PLACE = re.compile(r"(<!-- (?:table|matrix): ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(said: dict[str, Any]) -> str:
    """One Markdown table with where it comes from below it."""
    return "\n".join([*_list(said["results"]), "", _source(said), ""])


def render_matrix(said: dict[str, Any]) -> str:
    """The same, of rows and columns."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, str] = {}
    for r in said["results"]:
        row, _, column = r["name"].partition(": ")
        columns[column] = f"{column}, {r['unit']}" if r["unit"] else column
        cells.setdefault(row, {})[column] = number(r["value"])
    lines = ["| | " + " | ".join(columns.values()) + " |", "|---" * (1 + len(columns)) + "|"]
    for row, own in cells.items():
        lines.append(f"| {row} | " + " | ".join(own.get(c, "") for c in columns) + " |")
    return "\n".join([*lines, "", _source(said), ""])


def _source(said: dict[str, Any]) -> str:
    return f"`{said['command']}`, commit {said['commit']}, {said['machine']}, seed {said['seed']}"


def _list(results: list[dict[str, Any]]) -> list[str]:
    lines = ["| figure | value | against | ratio | goal |", "|---|---|---|---|---|"]
    for r in results:
        unit = f" {r['unit']}" if r["unit"] else ""
        against = "" if r["against"] is None else f"{number(r['against'])}{unit}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}"
        lines.append(
            f"| {r['name']} | {number(r['value'])}{unit} | {against} | {ratio} | {goal_text(r)} |"
        )
    return lines


def fill(place: re.Match[str], folder: Path) -> str:
    """What stands at a table's place on a page of this folder."""
    measured, plot = BENCHMARKS / f"{place[2]}.json", BENCHMARKS / f"{place[2]}.svg"
    if not measured.exists():
        return place[0]
    rendered = render_matrix if place[1].startswith("<!-- matrix") else render
    text = rendered(json.loads(measured.read_text()))
    if plot.exists():
        text += f"\n![{place[2]}]({os.path.relpath(plot, folder)})\n"
    return place[1] + text + place[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a table is out of date")
    check = parser.parse_args().check
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        fresh = PLACE.sub(partial(fill, folder=page.parent), text)
        if fresh != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(fresh)
    if check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run 'make tables'")


if __name__ == "__main__":
    main()
