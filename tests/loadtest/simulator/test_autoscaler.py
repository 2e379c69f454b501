"""Fleets that grow and shrink while they are simulated: nothing is lost, and rules are followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton_loadtest.simulator.autoscaler import Autoscaler, Leading, Reactive, Seen
from baton_loadtest.simulator.requests import Request
from baton_loadtest.simulator.simulation import Simulation
from batonlm.cli.main import main
from batonlm.core.routing.load import WorkerSpeed
from batonlm.core.routing.scaling import (
    Bounds,
    DecodeSignals,
    PrefillSignals,
    ScalingPolicy,
    ScalingRule,
)
from tests.loadtest.simulator.fleets import fleet, traffic


class Planned:
    """Sizes by time, the same for both pools."""

    def __init__(self, sizes: dict[float, int]) -> None:
        self._sizes = sizes

    def prefill(self, now: float, *_: object) -> int:
        return [size for begin, size in self._sizes.items() if begin <= now][-1]

    decode = prefill


def test_workers_join_after_their_start_and_leave_when_they_are_done() -> None:
    requests = traffic(1, 150, 5.0)
    simulation, seen = Simulation(fleet(1, 1)), []
    scaler = Autoscaler(
        simulation,
        fleet(1, 1),
        Planned({0.0: 1, 5.0: 3, 12.0: 1}),
        startup_s=3.0,
        period_s=1.0,
        on_check=lambda now, prefills, decodes: seen.append((now, prefills, decodes)),
    )
    outcome = simulation.run(requests)
    simulation.check()
    assert all(record.tokens == record.request.output_tokens for record in outcome.records)
    assert (len(simulation.senders), len(simulation.receivers)) == (3, 3)
    for record in outcome.records:
        if record.decode:
            # Asked for at 5 s, there at 8; nothing new from 12 s on.
            assert record.placed is not None and 8.0 <= record.placed <= 12.1
    used = {record.decode for record in outcome.records if record.decode is not None}
    assert used == {0, 1, 2}
    # Paid for from the moment it is asked for, until it is gone.
    assert [paid for now, *paid in seen if now in (4.0, 6.0, 11.0)] == [[1, 1], [3, 3], [3, 3]]
    assert seen[-1][1:] == (1, 1)
    assert scaler.worker_s == pytest.approx(sum(p + d for _, p, d in seen))


def test_who_is_still_starting_is_called_off_first() -> None:
    simulation = Simulation(fleet(1, 1))
    sizes = Planned({0.0: 1, 2.0: 4, 3.0: 1})
    Autoscaler(simulation, fleet(1, 1), sizes, startup_s=5.0, period_s=1.0)
    outcome = simulation.run([Request(float(n), 100, 20) for n in range(12)])
    assert all(record.ended for record in outcome.records)
    assert (len(simulation.senders), len(simulation.receivers)) == (1, 1)


def test_prefill_may_go_down_to_none() -> None:
    simulation = Simulation(fleet(2, 1))
    Autoscaler(simulation, fleet(2, 1), _NoPrefill(), startup_s=1.0, period_s=1.0)
    requests = [Request(0.2 * n, 600, 1 if n % 3 else 20) for n in range(60)]
    records = simulation.run(requests).records
    assert all(record.ended for record in records)
    assert records[0].prefill is not None and records[-1].prefill is None


class _NoPrefill:
    def prefill(self, *_: object) -> int:
        return 0

    def decode(self, *_: object) -> int:
        return 1


def test_a_burst_brings_workers_by_what_waits() -> None:
    requests = [Request(20 + n / 50, 1500, 20) for n in range(200)]
    facts, sizes = fleet(1, 1), []
    simulation = Simulation(facts)
    rule = ScalingRule(ScalingPolicy(1.0, 0.05, lead_s=2.0), Bounds(1, 4), Bounds(1, 4))
    Autoscaler(
        simulation, facts, Leading(rule), startup_s=2.0, period_s=1.0,
        on_check=lambda now, prefills, decodes: sizes.append(prefills),
    )  # fmt: skip
    simulation.run([Request(0.0, 10, 2), *requests])
    assert sizes[:19] == [1] * 19 and max(sizes) >= 3


def test_the_reactive_rule_is_an_hpas() -> None:
    rule = Reactive(Bounds(1, 8), Bounds(1, 8), busy=0.5, hold_s=30.0)
    signals = PrefillSignals(0.0, 1e9), DecodeSignals(1e9, 1e9, WorkerSpeed(), 1)
    assert rule.prefill(0.0, Seen(2, 1.0), signals[0]) == 4
    assert rule.prefill(15.0, Seen(4, 0.54), signals[0]) == 4
    assert rule.prefill(45.0, Seen(4, 0.0), signals[0]) == 4
    assert rule.prefill(45.1, Seen(4, 0.0), signals[0]) == 1
    assert rule.decode(0.0, Seen(2, 1.0), signals[1]) == 4


@pytest.mark.deep
def test_the_benchmark_runs(tmp_path: Path) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    few = ["--seconds", "60", "--period-s", "40", "--burst-s", "10", "--burst-rate", "4"]
    where = ["--json", str(file), "--plot", str(plot)]
    assert main(["bench", "scaling", *few, "--rate", "1", "--most", "2", *where]) == 0
    assert "<svg" in plot.read_text()
    found = {one["name"]: one["value"] for one in json.loads(file.read_text())["results"]}
    assert found["always 1: workers, most"] == 2 and found["always most: workers, most"] == 4
    assert found["leading: requests within the targets"] > 0
    assert main(["bench", "scaling", *few, "--startup-s", "-1"]) == 1
