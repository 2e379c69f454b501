"""The benchmark of tokenizers and detokenizers runs to its end, and says what it measures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton_loadtest.bench.tokens import batches_of
from batonlm.cli.main import main


@pytest.mark.slow
def test_tokens(tmp_path: Path) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    few = ["--seconds", "0.1", "--sizes", "1024,65536", "--streams", "1,4"]
    allowed = os.sched_getaffinity(0)
    assert main(["bench", "tokens", *few, "--json", str(file), "--plot", str(plot)]) == 0
    assert os.sched_getaffinity(0) == allowed
    assert "<svg" in plot.read_text()
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    whole = found["encoding, 64 KiB a request, against the library called directly"]
    assert whole["goal"] == 0.8 and whole["against"] > 0
    assert found["1 MiB of digits"]["value"] > 0
    assert found["encoding, 64 KiB a request, two workers against one"]["ratio"] > 0
    assert found["detokenizing, 4 streams, with stop strings"]["value"] > 0


@pytest.mark.parametrize("size", [256, 1024, 1 << 14, 1 << 20])
def test_a_batch_is_as_large_as_it_says(size: int) -> None:
    for batch in batches_of("ab" * (1 << 20), size):
        assert sum(map(len, batch)) == size and len(batch) <= 256
