"""Dashboards and triggers ask for what processes really export; draws nothing."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import baton
from baton.rpc.metrics import Spec

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/baton"
DASHBOARDS = sorted(CHART.glob("dashboards/*.json"))
MODULES = ("baton.rpc.metrics", "baton.rpc.aliases", "baton.router.metrics")

_METRIC = re.compile(r"\b(?:baton_|vllm:|process_)[a-z_:]+")
_OF_EVERY_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def exported() -> dict[str, Spec]:
    """Metrics by name that are defined and that some other line fills."""
    sources = "\n".join(path.read_text() for path in Path(baton.__path__[0]).rglob("*.py"))
    found = {}
    for module in map(importlib.import_module, MODULES):
        for constant, value in vars(module).items():
            used = rf"(?:counter|histogram|gauge|timings)\(\s*(?:\w+\.)?{constant}\b|\({constant},"
            if isinstance(value, Spec) and re.search(used, sources):
                found[value.name] = value
    return found


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def unknown(text: str, known: dict[str, Spec]) -> set[str]:
    names = set(_METRIC.findall(text)) - _OF_EVERY_PROCESS
    return {name for name in names if name.removesuffix("_bucket") not in known}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_metrics_that_exist(path: Path) -> None:
    known = exported()
    for expression in expressions(json.loads(path.read_text())):
        assert not unknown(expression, known), expression


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_labels_that_exist(path: Path) -> None:
    known = exported()
    added = {"namespace", "pod", "le"}
    for expression in expressions(json.loads(path.read_text())):
        names = [n.removesuffix("_bucket") for n in _METRIC.findall(expression)]
        allowed = added.union(*(known[n].labels for n in names if n in known))
        asked = set(re.findall(r"(\w+)!?=~?\"", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            asked |= {label.strip() for label in group.split(",")}
        assert asked <= allowed, expression


def test_what_pools_are_scaled_by_exists() -> None:
    known = exported()
    text = (CHART / "templates/shared/_autoscaling.tpl").read_text()
    assert {"baton_waiting_tokens", "baton_queued_tokens"} < set(_METRIC.findall(text))
    assert not unknown(text, known)


def test_panels_do_not_overlap_and_have_titles_of_their_own() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)
        titles = [panel["title"] for panel in panels]
        assert len(set(titles)) == len(titles)
