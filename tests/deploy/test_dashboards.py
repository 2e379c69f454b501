"""Dashboards, triggers and docs name what processes really export; draws nothing."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import batonlm
from batonlm.rpc.metrics import Spec

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/baton"
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
PROMTOOL = shutil.which("promtool")
DASHBOARDS = sorted(CHART.glob("dashboards/*.json"))
MODULES = (
    "batonlm.rpc.metrics",
    "batonlm.router.observe.metrics",
    "batonlm.router.observe.gauges",
    "batonlm.router.observe.records",
)

SAID_NOT_TO_BE = {"vllm:lora_requests_info"}

_PARTS = ("_bucket", "_count", "_sum")
_METRIC = re.compile(r"\b(?:baton_|vllm:|gen_ai_server_|process_)[a-z0-9_:]+")
_OF_EVERY_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


@functools.cache
def exported() -> dict[str, Spec]:
    """Metrics by name that are defined and that some other line fills."""
    sources = "\n".join(path.read_text() for path in Path(batonlm.__path__[0]).rglob("*.py"))
    found = {}
    for module in map(importlib.import_module, MODULES):
        for constant, value in vars(module).items():
            told = r"(?:counter|histogram|gauge|totals|timings)"
            used = (
                rf"{told}\(\s*(?:\w+\.)?{constant}\b|\({constant},"  # a call
                rf"|\n +{constant}: |\[{constant}\] ="  # a table of readers
            )
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
    return {name for name in names if name not in known and _base(name) not in known}


def labels_of(expression: str, known: dict[str, Spec]) -> set[str]:
    """That the metrics of an expression have, without those of Prometheus."""
    names = map(_base, _METRIC.findall(expression))
    return {label for name in names if name in known for label in known[name].labels}


def labels_in(expression: str) -> set[str]:
    asked = set(re.findall(r"(\w+)!?=~?\"", expression))
    for group in re.findall(r"\b(?:by|on|ignoring|group_left|without) \(([^)]*)\)", expression):
        asked |= {label.strip() for label in group.split(",") if label.strip()}
    return asked


def _base(name: str) -> str:
    """Of a histogram's sample."""
    return next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), name)


@pytest.mark.deep
def test_a_metric_that_is_defined_is_filled() -> None:
    defined = {
        value.name
        for module in map(importlib.import_module, MODULES)
        for value in vars(module).values()
        if isinstance(value, Spec)
    }
    assert defined == exported().keys()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_docs_name_metrics_and_labels_that_exist(path: Path) -> None:
    known, text = exported(), path.read_text()
    for name, labels in re.findall(
        r"`((?:baton_|vllm:|gen_ai_server_)[a-z0-9_:]+)(?:\{([^}`]*)\})?", text
    ):
        if name.endswith("_") or name in SAID_NOT_TO_BE:
            continue  # an underscore: the beginning of several
        assert not unknown(name, known), name
        given = {label.partition("=")[0].strip() for label in labels.split(",") if label}
        assert given <= labels_of(name, known), (name, given)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_metrics_that_exist(path: Path) -> None:
    known = exported()
    for expression in expressions(json.loads(path.read_text())):
        assert not unknown(expression, known), expression


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_about_the_release_that_is_chosen(path: Path) -> None:
    """Where nothing adds the label, "All" is what has none."""
    dashboard = json.loads(path.read_text())
    (release,) = [v for v in dashboard["templating"]["list"] if v["name"] == "release"]
    assert release["allValue"] == ".*"
    for expression in expressions(dashboard):
        if not expression.startswith("label_values("):
            selectors = re.findall(r"\{[^}]*\}", expression)
            chosen = 'namespace="$namespace",release=~"$release"'
            assert selectors and all(chosen in each for each in selectors), expression


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_labels_that_exist(path: Path) -> None:
    known = exported()
    for expression in expressions(json.loads(path.read_text())):
        allowed = labels_of(expression, known) | {"namespace", "release", "pod", "le"}
        assert labels_in(expression) <= allowed, expression


@pytest.mark.parametrize("path", [*DASHBOARDS, CHART / "files/alerts.yaml"], ids=lambda p: p.stem)
def test_what_grows_is_asked_how_fast_and_nothing_else_is(path: Path) -> None:
    """A rate of a gauge is nonsense, and so is a counter as it stands."""
    text = path.read_text()
    for name in set(_METRIC.findall(text)) - {"baton_ready_seconds"}:
        growing = name.endswith(("_total", *_PARTS))
        rates = len(re.findall(rf"(?:rate|increase)\({name}\b", text))
        lists = len(re.findall(rf"label_values\({name}\b", text))
        uses = len(re.findall(rf"\b{name}\b", text)) - lists
        assert rates == (uses if growing else 0), name


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_prometheus_understands_every_panel(tmp_path: Path) -> None:
    asked = [
        re.sub(r"\$\w+", "a", expression.replace("$__rate_interval", "5m"))
        for path in DASHBOARDS
        for expression in expressions(json.loads(path.read_text()))
        if not expression.startswith("label_values(")
    ]
    rules = [{"record": f"panel:{n}", "expr": each} for n, each in enumerate(asked)]
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout and len(rules) > 60


def test_what_pools_are_scaled_by_exists() -> None:
    known = exported()
    text = (CHART / "templates/shared/_autoscaling.tpl").read_text()
    named = {"baton_pool_target_workers", "baton_waiting_tokens", "baton_queued_tokens"}
    assert named < set(_METRIC.findall(text))
    assert not unknown(text, known)


def test_panels_do_not_overlap_and_have_titles_of_their_own() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)
        titles = [panel["title"] for panel in panels]
        assert len(set(titles)) == len(titles)
