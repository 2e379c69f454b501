"""Alert rules name what processes export, and fire when they should; reaches no Prometheus.

What fires when is promtool's to say, of `alerts.test.yaml`: skipped where there is none on PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_dashboards import CHART, ROOT, exported, labels_in, labels_of, unknown

FILE = CHART / "files/alerts.yaml"
RUNBOOKS = ROOT / "docs/runbooks"
TRIED = Path(__file__).with_name("alerts.test.yaml")
PROMTOOL = shutil.which("promtool")
GROUPS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    known, expression = exported(), rule["expr"]
    assert not unknown(expression, known)
    allowed = labels_of(expression, known) | {"namespace", "release", "pod", "le"}
    assert labels_in(expression) <= allowed


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_what_it_saw_of_labels_that_are_left(rule: dict[str, Any]) -> None:
    """A label that an expression adds up away would show as nothing."""
    kept = [set(re.split(r",\s*", by)) for by in re.findall(r"by \(([^)]*)\)", rule["expr"])]
    if rule["expr"].startswith("absent("):
        kept = [set(re.findall(r"(\w+)=", rule["expr"]))]  # those that it asked for
    texts = rule["annotations"]
    said = set(re.findall(r"\$labels\.(\w+)", texts["summary"] + texts["description"]))
    assert said <= set.intersection(*kept)
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_rule_is_tried_where_it_fires_and_where_it_does_not() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for tried in yaml.safe_load(TRIED.read_text())["tests"]:
        for one in tried["alert_rule_test"]:
            (fires if one.get("exp_alerts") else silent).add(one["alertname"])
    names = [rule["alert"] for rule in RULES]
    assert fires == silent == set(names) and len(set(names)) == len(names)


def test_a_rule_is_about_one_release_at_a_time() -> None:
    """Each selector has the words in whose place the chart puts its release, and sums keep both."""
    for rule in RULES:
        expression = rule["expr"]
        metrics = re.findall(r"\bbaton_\w+(.)", expression)
        assert metrics and set(metrics) == {"{"}
        assert expression.count('{namespace=~".+"') == len(metrics)
        for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert group.startswith("namespace, release"), expression


def test_docs_explain_every_rule() -> None:
    """In the table, and on a page of its own; no page is left of a rule that is not there."""
    names = {rule["alert"] for rule in RULES}
    text = (ROOT / "docs/monitoring.md").read_text()
    assert set(re.findall(r"^\| \[`(Baton\w+)`\]\(runbooks/\1\.md\)", text, re.M)) == names
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == names
    for rule in RULES:
        page = (RUNBOOKS / f"{rule['alert']}.md").read_text()
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
        assert f"Severity: {rule['labels']['severity']}." in page
        assert re.findall(r"^## (.*)", page, re.M) == [
            *("What it means", "What to look at", "What to do")
        ]
        for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", page):
            assert (RUNBOOKS / link).exists(), link


def test_a_threshold_is_a_value_of_the_chart() -> None:
    """Of the same number, and named in the page of its rule."""
    found = {
        name: (float(number), rule["alert"])
        for rule in RULES
        for number, name in re.findall(r"> ([\d.]+) # (\w+)", rule["expr"])
    }
    values = yaml.safe_load((CHART / "values.yaml").read_text())["alerts"]["thresholds"]
    assert {name: number for name, (number, _) in found.items()} == values
    for name, (_, alert) in found.items():
        assert f"`{name}`" in (RUNBOOKS / f"{alert}.md").read_text()


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_rules_fire_when_they_should() -> None:
    assert PROMTOOL is not None
    for words in (("check", "rules", str(FILE)), ("test", "rules", str(TRIED))):
        done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
