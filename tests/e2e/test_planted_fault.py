"""A prefill pool that serves and silently never gets used is seen: the alert fires on real metrics.

Three real Batons are asked the same and scraped after every request. The first is as it should be,
the second one's router has been told to prefill everything on decode, and the third one's prefill
worker makes KV that decode cannot take. Each scrape counts as a minute for promtool, which runs the
rules that are shipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from batonlm.cli.http_client import scrape
from batonlm.cli.layout import resolve_model
from tests.deploy.test_alerts import FILE
from tests.e2e.relay import Relay

PROMTOOL = shutil.which("promtool")
MINUTES = 45
"""The rule looks 15 min back, and wants to be right for 15 min."""
RULES = FILE.read_text()

Series = dict[str, list[str]]


FLAGS = ("--runner", "fake", "--transport", "loopback")


@dataclass
class Case:
    """planted: whether there is a fault. more: processes that `baton up` does not know of."""

    planted: bool
    running: Relay
    more: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(params=["as it should be", "kept on decode", "KV that does not fit"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("relay")
    with ExitStack() as ends:
        match request.param:
            case "as it should be":
                made = Case(False, Relay(folder, *FLAGS))
            case "kept on decode":
                told = {"BATON_LOCAL_PREFILL_TOKENS": str(1 << 20)}
                made = Case(True, Relay(folder, *FLAGS, environment=told))
            case _:
                other = ends.enter_context(prefill_of_another_kind())
                told = {"BATON_PREFILLS": other["listen"]}
                made = Case(True, Relay(folder, *FLAGS, "--prefill", "0", environment=told))
                made.more.append(other)
        ends.callback(made.running.close)
        yield made


@contextmanager
def prefill_of_another_kind() -> Iterator[dict[str, Any]]:
    """A prefill worker whose KV no decode worker of `FLAGS` can take; says where it is."""
    model, name = resolve_model("")
    command = [sys.executable, "-m", "batonlm.prefill", "--model", str(model), "--model-name", name]
    listen = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    odd = ("--kv-wire-dtype", "float16")
    with subprocess.Popen([*command, *FLAGS, *listen, *odd], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            yield {**said, "metrics": f"http://{said['metrics']}/metrics"}
        finally:
            process.kill()


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_the_alert_fires_and_no_other_one(case: Case, tmp_path: Path) -> None:
    running = case.running
    series: Series = {}
    for minute in range(MINUTES):
        ask(running, f"{minute} " + "word " * 700)
        for process in [*running.processes(), *case.more]:
            see(series, minute, process["role"], scrape(process["metrics"]))
    # Every client got its answer, and every worker says that it serves: nothing else tells.
    (served,) = (v for k, v in series.items() if "baton_requests_total" in k and "finished" in k)
    assert served[-1] == f"{MINUTES}"
    (pool,) = (v for k, v in series.items() if re.search(r'role="prefill",state="serving"', k))
    assert set(pool) == {"1"}
    fired = [{"labels": '{alertname="BatonPrefillUnused"}', "value": 1}]
    tried = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": " ".join(values)} for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES - 1}m",
                "exp_samples": fired if case.planted else [],
            }
        ],
    }
    path = tmp_path / "fault.test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "tests": [tried]}, width=10**6))
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def ask(running: Relay, prompt: str) -> None:
    body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"{running.http}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def see(series: Series, minute: int, role: str, found: dict[str, float]) -> None:
    """Adds a scrape, with the labels that Prometheus' operator gives its pod. Only what the rules
    ask for."""
    for sample, value in found.items():
        name, _, labels = sample.partition("{")
        if name not in RULES:
            continue
        labels = ",".join(filter(None, ('namespace="a"', f'pod="x-{role}-0"', labels[:-1])))
        values = series.setdefault(f"{name}{{{labels}}}", [])
        values += ["_"] * (minute - len(values))  # it was not there yet
        values.append(f"{value:.9f}".rstrip("0").rstrip("."))
