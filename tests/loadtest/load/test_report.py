"""Figures and pages of a run."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from baton_loadtest.drive import ANSWERED, REFUSED
from baton_loadtest.load import page
from baton_loadtest.load.summary import Objectives, Summary
from batonlm.core.errors import InvalidArgument
from tests.loadtest.load.model_client import ModelClient, even, virtually


def a_summary() -> Summary:
    """Every fourth of 40 requests is refused; of the others every second is slow."""
    client = ModelClient(
        first_s=lambda number: 1.0 if number % 2 else 0.1,
        end=lambda number: REFUSED if number % 4 == 0 else ANSWERED,
    )
    return Summary(virtually(client, even(10, 4)), Objectives(first_s=0.5))


def test_figures() -> None:
    summary = a_summary()
    found = {result.name: result for result in summary.results()}
    assert found["requests due"].value == 40
    assert found["rate asked"].value == 10
    assert found["answered"].value == 30
    assert found["refused"].value == 10
    assert found["within objectives"].value == 25
    assert found["goodput"].value == 2.5
    assert found["first token, p50"].value == pytest.approx(1000, abs=1)
    assert found["first token, longest"].value == pytest.approx(1000, abs=1)
    assert found["between tokens, p99"].value == pytest.approx(10, abs=0.1)
    assert found["prompt tokens"].value == 160
    assert found["schedule kept"].value == 1
    assert found["left late, p99"].met is True


def test_figures_of_nothing() -> None:
    client = ModelClient(end=lambda number: "status 500")
    found = Summary(virtually(client, even(1, 2)), Objectives()).results()
    by_name = {result.name: result.value for result in found}
    assert by_name["failed: status 500"] == 2
    assert by_name["within objectives"] == 0
    assert "first token, p50" not in by_name


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)


def test_a_page_is_complete_in_itself(tmp_path: Path) -> None:
    summary = a_summary()
    page.write(tmp_path / "new" / "page.html", page.of_run(summary, "<b>&chat"))
    text = (tmp_path / "new" / "page.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.seen.count("svg") == 1
    assert all(f">{chart.title}<" in text for chart in page.charts(summary))
    assert "<b>" not in text and "&lt;b&gt;&amp;chat" in text
    assert not re.search(r"""(?:href|src)=["']?(?!["']?#)""", text)  # nothing is fetched
    assert not {"script", "link", "img"} & set(tags.seen)
    for result in summary.results():
        assert f"<td>{result.name}</td>" in text


def test_a_page_of_nothing() -> None:
    client = ModelClient(end=lambda number: REFUSED)
    text = page.of_run(Summary(virtually(client, even(1, 2)), Objectives()), "nothing")
    assert "nothing to show" in text


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument) as caught:
        page.write(tmp_path / "file" / "page.html", "")
    assert caught.value.field == "html"
