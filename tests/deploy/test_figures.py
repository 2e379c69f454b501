"""One command measures every figure that README and docs show; measures none here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batonlm.cli.main import build_parser, commands
from figures import ELSEWHERE, FIGURES, Figure, chosen, run
from tables import PLACE, render_matrix

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = sorted((ROOT / "docs/benchmarks").glob("*.json"))
GIVEN = {"TRACE": "trace.jsonl", "CONVERSATION": "conv.csv", "LLAMA": "lib", "LARGER": "larger"}


def test_every_table_and_every_file_is_a_figure_that_can_be_measured_again() -> None:
    tables = {place[2] for page in PAGES for place in PLACE.finditer(page.read_text())}
    assert tables == FIGURES.keys() | ELSEWHERE.keys()
    assert {file.stem for file in FILES} <= tables
    plots = {file.stem for file in (ROOT / "docs/benchmarks").glob("*.svg")}
    assert plots <= {name for name, figure in FIGURES.items() if figure.plot}


@pytest.mark.parametrize("name", [name for name, one in FIGURES.items() if not one.is_script])
def test_a_figures_command_is_one_that_baton_knows(name: str) -> None:
    args = build_parser(commands()).parse_args(FIGURES[name].words(name, GIVEN))
    assert str(args.json) == f"docs/benchmarks/{name}.json"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_was_made_by_its_figures_command(file: Path) -> None:
    command = json.loads(file.read_text())["command"]
    if file.stem in ELSEWHERE:
        assert command.startswith(ELSEWHERE[file.stem])
        return
    said = command.split()
    assert said[1 : 1 + len(_verbs(FIGURES[file.stem]))] == _verbs(FIGURES[file.stem])


def test_the_makefile_names_no_other_figure() -> None:
    text = (ROOT / "Makefile").read_text()
    named = {name for line in re.findall(r"\$\(FIGURES\) (.+)", text) for name in line.split()}
    assert named <= FIGURES.keys()


def test_figures_become_rows_and_columns() -> None:
    figures = [("a: x", 1.0, "ms"), ("a: y", 2.5, ""), ("b: y", 3.0, "")]
    results = [{"name": name, "value": value, "unit": unit} for name, value, unit in figures]
    said = {"results": results, "command": "baton", "commit": "1", "machine": "m", "seed": 0}
    lines = render_matrix(said).splitlines()
    assert lines[:4] == ["| | x, ms | y |", "|---|---|---|", "| a | 1 | 2.5 |", "| b |  | 3 |"]


def test_what_lacks_something_is_left_out_and_said() -> None:
    needs = {"simulator": FIGURES["simulator"]}
    assert run(needs, {}) == ["simulator was left out: set TRACE"]
    assert run({"none": Figure("bench nothing")}, {}) == ["none ended with 2"]
    with pytest.raises(SystemExit, match="no figure is called nothing"):
        chosen(["relay", "nothing"])


def _verbs(figure: Figure) -> list[str]:
    """Of the command, up to its first flag."""
    words = figure.command.split()
    return words[: next((i for i, word in enumerate(words) if word.startswith("-")), len(words))]
