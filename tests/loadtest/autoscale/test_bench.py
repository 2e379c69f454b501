"""`baton bench planner` runs the planner's own loop on a simulated fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batonlm.cli.main import main


@pytest.mark.deep
def test_a_part_of_a_day(tmp_path: Path) -> None:
    file, trace = tmp_path / "figures.json", tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 200, "output_length": 600, "hash_ids": [%d]}'
    trace.write_text("\n".join(line % (1000 * second, second) for second in range(120)))
    few = ["--trace", str(trace), "--hours", "0.2", "--rate", "0.8", "--swing", "0.2"]
    few += ["--startup-s", "20", "--most", "4"]
    assert main(["bench", "planner", *few, "--json", str(file)]) == 0
    found = {one["name"]: one["value"] for one in json.loads(file.read_text())["results"]}
    assert found["always most: workers, mean"] == pytest.approx(8, abs=0.1)
    assert found["always most: changes of a size"] == 0 < found["planner: changes of a size"]
    assert found["planner: requests within the targets"] > 50
    assert 2 <= found["planner: workers, mean"] <= 8
    for wrong in (["--most", "0"], ["--hours", "0"], ["--swing", "2"], ["--rate", "2"]):
        assert main(["bench", "planner", *few, *wrong]) == 1
