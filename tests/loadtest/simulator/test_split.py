"""`baton plan split`: what it answers where the answer differs, and what it refuses to answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from baton_loadtest.load import scenario
from baton_loadtest.planner.measured import MeasuredSpeed, calibration_of
from baton_loadtest.planner.split import chunk
from baton_loadtest.simulator.prompts import Prompt
from baton_loadtest.simulator.settings import WorkerFacts
from baton_loadtest.simulator.traffic import drawn_requests
from batonlm.cli.main import main
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerSpeed, WorkerState

SPEED = WorkerSpeed(
    step_s=0.01,
    row_s=2e-4,
    context_s=1e-8,
    prefill_step_s=0.001,
    prefill_position_s=5e-5,
    link_bytes_per_s=1e9,
    handover_s=0.002,
)
NOT_PREFILL = ("step_s", "row_s", "context_s", "link_bytes_per_s", "handover_s")


def speeds(at: Path, max_running: int = 64) -> Path:
    worker = {"num_blocks": 4000, "block_size": 64, "step_tokens": 512}
    said = {name: value for name, value in asdict(SPEED).items() if value}
    apart = {name: value for name, value in said.items() if name not in NOT_PREFILL}
    at.write_text(
        json.dumps(
            {
                "model": {"max_model_len": 32768, "kv_bytes_per_position": 1000},
                "prefill": {**worker, "speed": apart},
                "decode": {**worker, "max_running": max_running, "speed": said},
            }
        )
    )
    return at


def trace(
    at: Path, count: int, rate: float, prompts: tuple[int, int], outputs: tuple[int, int]
) -> Path:
    draw, time_s, lines = Random(1), 0.0, []
    for number in range(count):
        size = draw.randint(*prompts)
        blocks = [100 * number + place for place in range(-(-size // 512))]
        lines.append(
            {
                "timestamp": round(1000 * time_s),
                "input_length": size,
                "output_length": draw.randint(*outputs),
                "hash_ids": blocks,
            }
        )
        time_s += draw.expovariate(rate)
    at.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return at


def split(*words: object) -> int:
    return main(["plan", "split", *map(str, words)])


def asked(first_token_ms: float, between_tokens_ms: float) -> tuple[object, ...]:
    return ("--first-token-ms", first_token_ms, "--between-tokens-ms", between_tokens_ms)


@pytest.mark.deep
def test_long_prompts_beside_a_tight_target_between_tokens_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path / "long.jsonl", 100, 6, (1000, 2000), (105, 140))
    figures = tmp_path / "figures" / "split.json"
    files = ("--trace", file, "--speed", speeds(tmp_path / "speeds.json"), "--json", figures)
    assert split("--workers", 2, *files, *asked(1500, 16)) == 0
    told = capsys.readouterr()
    assert "Splitting pays: 1P1D carries" in told.out and "2 aggregated, chunks of 512" in told.out
    document = json.loads(figures.read_text())
    found = {one["name"]: one for one in document["results"]}
    best = found["best split: goodput, against the best aggregated"]
    assert best["ratio"] > 1.15 and best["value"] == found["1P1D: goodput"]["value"]
    assert found["1P1D: between tokens, p99"]["value"] <= 16
    assert found["1P1D: first token, p99"]["value"] <= 1500
    assert str(tmp_path) not in document["command"]


@pytest.mark.deep
def test_short_prompts_and_answers_do_not_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path / "short.jsonl", 120, 100, (20, 60), (10, 30))
    files = ("--trace", file, "--speed", speeds(tmp_path / "speeds.json", max_running=16))
    assert split("--workers", 2, *files, *asked(500, 50)) == 0
    told = capsys.readouterr().out
    assert "Splitting does not pay: 1P1D carries" in told
    # 120 requests are over too soon for a queue to grow.
    assert "longer traffic may carry less" in told


@pytest.mark.deep
def test_with_90_of_100_in_time_more_is_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 40 tokens, one of 39 times between tokens is part of a hand-over's."""
    file = trace(tmp_path / "middling.jsonl", 100, 6, (1000, 2000), (40, 41))
    files = ("--trace", file, "--speed", speeds(tmp_path / "speeds.json"))
    found: dict[int, dict[str, float]] = {}
    for of_100 in (99, 90):
        figures = tmp_path / f"{of_100}.json"
        words = ("--of-100", of_100, "--json", figures)
        assert split("--workers", 2, *files, *asked(1500, 13), *words) == 0
        assert f"first p{of_100}" in capsys.readouterr().out
        results = json.loads(figures.read_text())["results"]
        found[of_100] = {one["name"]: one["value"] for one in results}
    assert found[90]["1P1D: goodput"] > 1.5 * found[99]["1P1D: goodput"]
    assert found[90]["1P1D: between tokens, p90"] <= 13


@pytest.mark.deep
def test_what_differs_by_less_than_the_error_is_not_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path / "even.jsonl", 120, 50, (200, 600), (10, 30))
    files = ("--trace", file, "--speed", speeds(tmp_path / "speeds.json", max_running=16))
    assert split("--workers", 2, *files, *asked(500, 60)) == 0
    told = capsys.readouterr().out
    assert "The difference is less than the error of the model" in told
    assert "stay aggregated, or measure both" in told


@pytest.fixture
def few(tmp_path: Path) -> tuple[object, ...]:
    """Traffic that is quickly simulated, and what workers can do."""
    file = trace(tmp_path / "few.jsonl", 100, 10, (100, 200), (3, 5))
    return ("--workers", 2, "--trace", file, "--speed", speeds(tmp_path / "speeds.json"))


@pytest.mark.parametrize(
    ("targets", "said", "field"),
    [
        ((5, 50), "first tokens come within", "first_token_ms"),
        ((500, 5), "A step of one sequence takes", "between_tokens_ms"),
        ((0, 50), "must be more than 0", "first_token_ms"),
    ],
)
def test_targets_that_cannot_be_met(
    targets: tuple[float, float],
    said: str,
    field: str,
    few: tuple[object, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert split(*few, *asked(*targets)) == 1
    told = capsys.readouterr()
    assert said in told.err and f"({field})" in told.err and not told.out


def test_what_it_cannot_work_with_is_named(
    few: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        assert split(*words, *asked(500, 50)) == 1
        return capsys.readouterr().err

    assert "must be at least 2" in refused(*few, "--workers", 1)
    assert "(error)" in refused(*few, "--error", 100)
    assert "not both" in refused(*few, "--calibrate", "127.0.0.1:1")
    assert "(lengths)" in refused(*few, "--lengths", 0.1)
    file = tmp_path / "few.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(["{", *lines[1:]]))
    told = refused(*few)
    assert "line 1: is no JSON" in told and "(trace)" in told
    assert "has 99 requests" in refused(*few, "--skip-broken")


def test_a_scenario_has_the_prefixes_that_its_requests_share(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(
        '[arrivals]\nkind = "poisson"\nrate = 5\nseconds = 20\n'
        "[lengths]\nprompt_tokens = 150\noutput_tokens = 7\n"
        "[prompts]\nshared_tokens = 130\nshared_groups = 2\n"
    )
    workload = scenario.read(file, scenario.Changes()).workload(3)
    found = drawn_requests(workload)
    assert len(found) == workload.requests > 50
    assert {(one.input_tokens, one.output_tokens) for one in found} == {(280, 7)}
    assert [one.arrival for one in found] == [one.due_s for one in workload.sessions]
    prompts = [Prompt(n, one.input_tokens, one.names, one.stretch) for n, one in enumerate(found)]
    # Two whole units of 64 are shared, the third has 2 tokens of the group and 62 of its own.
    assert len({prompt.hashes[:32] for prompt in prompts}) == 2
    assert len({prompt.hashes for prompt in prompts}) == len(prompts)
    file.write_text(file.read_text() + "turns = 3\n")
    with pytest.raises(InvalidArgument) as caught:
        drawn_requests(scenario.read(file, scenario.Changes()).workload(3))
    assert caught.value.field == "prompts.turns"


def told(role: str, speed: WorkerSpeed, max_sequences: int = 0) -> MeasuredSpeed:
    layout = KvLayout("model", "float16", 2, 3, 4, 4)
    description = WorkerDescription(
        WorkerIdentity(role, "i", ""),
        ModelDescription("m", "model", 4096, 100, (), "tokenizer"),
        layout,
        (),
        1000,
        64,
        max_sequences=max_sequences,
    )
    load = WorkerLoad(WorkerState.SERVING, 0, 0, 0, 1000, speed=speed)
    return MeasuredSpeed(f"{role}:1", description, load)


def test_running_workers_say_what_they_can_do() -> None:
    prefills = WorkerSpeed(prefill_position_s=1e-4, prefill_step_tokens=256)
    decodes = WorkerSpeed(step_s=0.01, link_bytes_per_s=1e9, handover_s=0.01)
    both = [told("prefill", prefills), told("decode", decodes, max_sequences=8)]
    found = calibration_of(both)
    assert (found.kv_bytes, found.max_model_len) == (2 * 3 * 8 * 2, 4096)
    assert (found.prefill.step_tokens, found.decode.max_running) == (256, 8)
    # Never having prefilled, decode workers are taken to be as fast at it.
    assert found.decode.speed.prefill_position_s == 1e-4 and found.decode.speed.step_s == 0.01
    with pytest.raises(InvalidArgument, match="names no decode worker"):
        calibration_of(both[:1])


def test_who_never_prefilled_does_not_make_others_faster() -> None:
    never = WorkerSpeed(step_s=0.01, link_bytes_per_s=1e9, handover_s=0.01)
    often = WorkerSpeed(step_s=0.02, prefill_step_s=2e-3, prefill_position_s=1e-4)
    found = calibration_of([told("decode", never), told("decode", often)]).decode.speed
    assert (found.prefill_step_s, found.prefill_position_s) == (2e-3, 1e-4)
    assert found.step_s == pytest.approx(0.015)
    assert found.link_bytes_per_s == 1e9


def test_chunks_leave_a_step_within_the_target() -> None:
    facts = WorkerFacts(SPEED, 100, 64, 512)
    assert chunk(facts, 1.0) == 512
    assert chunk(facts, 0.0) == 64
    tokens = chunk(facts, 0.03)
    assert 0.011 + 5e-5 * tokens <= 0.03 < 0.0112 + 5e-5 * (tokens + 64)
