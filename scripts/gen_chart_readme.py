"""Writes the tables of the chart's README of values.yaml: each key, its default, its comment.

Of the five components a key is described once, at the router or at the first one that has it;
below, those keys follow whose default differs. The text above the mark is written by hand.
`--check` writes nothing and fails when the file differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml

import gen_values_schema as schema

README = schema.CHART / "README.md"
MARK = "<!-- Made of values.yaml by scripts/gen_chart_readme.py: `make chart-schema`. -->\n"
Node = dict[str, Any]


def tables(values: Node, described: Node) -> str:
    """Markdown. described: the schema's properties of the same keys."""
    components = [key for key in values if key in schema.CONFIGS]
    release = {key: value for key, value in values.items() if key not in components}
    parts = ["## Values\n", _table(_leaves(release, described, ""))]
    known: dict[str, str] = {}
    for component in components:
        rows = []
        properties = described[component]["properties"]
        for key, default, words in _leaves(values[component], properties, ""):
            if known.get(key) != default:
                rows.append((f"{component}.{key}", default, words))
            known.setdefault(key, default)
        parts.append(f"### {component}\n\n{described[component].get('description', '')}\n")
        parts.append(_table(rows))
    return "\n".join(parts)


def _leaves(values: Node, described: Node, path: str) -> Iterator[tuple[str, str, str]]:
    """Keys that hold no further described keys, with their default and their description."""
    for key, value in values.items():
        node = described.get(key, {})
        words = node.get("description", "")
        if isinstance(value, dict) and "properties" in node and value:
            if words:
                yield f"{path}{key}", "", words
            yield from _leaves(value, node["properties"], f"{path}{key}.")
        else:
            yield f"{path}{key}", json.dumps(value), words


def _table(rows: Any) -> str:
    lines = ["| key | default | |", "|---|---|---|"]
    for key, default, words in rows:
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{key}` | {shown} | {words} |".replace("<", "&lt;"))
    return "\n".join(lines) + "\n"


def make(text: str) -> str:
    """The whole README. text: the present one. Raises ValueError without the mark."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{README.name} has no line {MARK.strip()}")
    source = (schema.CHART / "values.yaml").read_text()
    return head + mark + "\n" + tables(yaml.safe_load(source), schema.make(source)["properties"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the README is out of date")
    check = parser.parse_args().check
    text = README.read_text()
    fresh = make(text)
    if not check:
        README.write_text(fresh)
    elif text != fresh:
        sys.exit("out of date: the chart's README.md; run 'make chart-schema'")


if __name__ == "__main__":
    main()
