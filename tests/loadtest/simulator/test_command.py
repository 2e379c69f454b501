"""`baton simulate` and its files: what they may say, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_loadtest.simulator.calibration import read_speeds
from baton_loadtest.simulator.traffic import Scale, traced_requests
from baton_loadtest.traces import Recorded
from batonlm.cli.main import main
from batonlm.core.errors import InvalidArgument
from batonlm.core.routing.load import WorkerSpeed

DECODE = {
    "num_blocks": 4000,
    "block_size": 64,
    "step_tokens": 512,
    "speed": {
        "step_s": 0.01,
        "context_s": 1e-7,
        "prefill_step_s": 0.004,
        "prefill_position_s": 3e-5,
        "link_bytes_per_s": 1e9,
        "handover_s": 0.003,
    },
}
SAID: dict[str, Any] = {
    "model": {"name": "made-up", "max_model_len": 32768, "kv_bytes_per_position": 1000},
    "prefill": {"num_blocks": 4000, "block_size": 64, "speed": {"prefill_position_s": 3e-5}},
    "decode": DECODE,
}


@pytest.fixture
def speed(tmp_path: Path) -> Path:
    file = tmp_path / "speed.json"
    file.write_text(json.dumps(SAID))
    return file


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * n, "input_length": 1000, "output_length": 20, "hash_ids": [n % 2, n]}
        for n in range(20)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_it_simulates(
    speed: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, fates = tmp_path / "figures.json", tmp_path / "requests.jsonl"
    flags = ["--prefill", "1", "--decode", "2", "--json", str(figures), "--requests", str(fates)]
    files = ["--trace", str(trace), "--speed", str(speed), "--target", "5", "1"]
    assert main(["simulate", *files, *flags]) == 0
    assert "first token, p99" in capsys.readouterr().out
    said = json.loads(figures.read_text())
    found = {result["name"]: result["value"] for result in said["results"]}
    assert found["requests"] == found["answered"] == 20
    assert found["requests within the target"] > 0
    assert str(tmp_path) not in said["command"]
    lines = [json.loads(line) for line in fates.read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(20))
    for line in lines:
        assert line["output_tokens"] == 20 and line["ended_at_s"] > line["first_token_at_s"]
        assert sum(count for _, count in line["gaps"]) == 19
    assert main(["simulate", *files, *flags, "--drafts-right", "0.9"]) == 0
    results = json.loads(figures.read_text())["results"]
    drafted = {result["name"]: result["value"] for result in results}
    assert drafted["answered"] == 20
    assert 0 < drafted["steps of sequences saved by drafts"] <= drafted["drafts computed"]


def test_a_broken_line_is_named(
    speed: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([lines[0], "{", *lines[2:]]))
    assert main(["simulate", "--trace", str(trace), "--speed", str(speed)]) == 1
    error = capsys.readouterr().err
    assert "line 2: is no JSON" in error and trace.name in error and "(trace)" in error


def test_scaling() -> None:
    trace = [Recorded(10.0 + n, 1024, 100, (n, 50 + n)) for n in range(10)]
    plain = traced_requests(trace[::-1], Scale())
    assert [r.arrival for r in plain] == list(range(10)) and plain[3].names == (3, 53)
    fast = traced_requests(trace, Scale(rate=2.0, lengths=0.125, seconds=3.0))
    assert [r.arrival for r in fast] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert {(r.input_tokens, r.output_tokens, r.stretch) for r in fast} == {(128, 12, 64)}
    many = traced_requests(trace, Scale(copies=4))
    assert len(many) == 40 and len({name for r in many for name in r.names}) == 80
    assert [r.arrival for r in many] == sorted(r.arrival for r in many)
    assert max(r.arrival for r in many) < 10.0
    for scale, field in (
        ({"rate": 0.0}, "rate"), ({"lengths": 0.1}, "lengths"), ({"copies": 0}, "copies"),
        ({"seconds": -1.0}, "seconds"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument) as error:
            Scale(**scale)
        assert error.value.field == field


def test_calibration(speed: Path) -> None:
    found = read_speeds(speed)
    assert found.decode.speed == WorkerSpeed(**DECODE["speed"])  # type: ignore[arg-type]
    assert (found.kv_bytes, found.max_model_len, found.decode.step_tokens) == (1000, 32768, 512)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": None}, "model"),
        ({"mode": {}}, "mode"),
        ({"model": {"max_model_len": 5}}, "model.kv_bytes_per_position"),
        ({"decode": {**DECODE, "num_blocks": 1.5}}, "decode.num_blocks"),
        ({"decode": {**DECODE, "blocks": 1}}, "decode.blocks"),
        ({"decode": {**DECODE, "step_tokens": 8}}, "decode.step_tokens"),
        ({"decode": {**DECODE, "speed": {"step_s": "fast"}}}, "decode.speed.step_s"),
        ({"decode": {**DECODE, "speed": {"step_ms": 3}}}, "decode.speed.step_ms"),
        ({"decode": {**DECODE, "speed": {"step_s": 0}}}, "decode.speed.step_s"),
        ({"decode": {**DECODE, "block_size": 48}}, "block_size"),
    ],
)
def test_bad_calibration_is_named(
    changes: dict[str, Any],
    field: str,
    speed: Path,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speed.write_text(json.dumps(SAID | changes))
    assert main(["simulate", "--trace", str(trace), "--speed", str(speed)]) == 1
    assert f"({field})" in capsys.readouterr().err


def test_the_benchmark_runs(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ["--trace", str(trace), "--workers", "20", "--copies", "2", "--json", str(file)]
    assert main(["bench", "simulator", *few]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert found["requests that skipping changed"]["met"] is True
    assert found["answered"]["value"] == found["requests"]["value"] == 40
    assert found["20 workers: CPU time"]["value"] > 0
    assert main(["bench", "simulator", *few, "--block-size", "100"]) == 1
