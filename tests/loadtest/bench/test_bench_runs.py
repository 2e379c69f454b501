"""Every benchmark runs to its end on the tiny shape and says what it says it measures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_loadtest import traces
from baton_loadtest.bench import fabric
from batonlm.cli.layout import resolve_model
from batonlm.cli.main import main
from batonlm.core.errors import InvalidArgument

Bench = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model is built once for all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bench(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs a benchmark; its results by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def run(kind: str, *flags: str) -> dict[str, dict[str, Any]]:
        file, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
        where = ["--json", str(file), "--plot", str(plot)]
        assert main(["bench", kind, "--shape", "tiny", "--threads", "1", *flags, *where]) == 0
        assert "<svg" in plot.read_text()
        said = json.loads(file.read_text())
        assert str(tmp_path) not in said["command"]
        return {result["name"]: result for result in said["results"]}

    return run


@pytest.mark.deep
def test_routing(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ["--workers", "60", "--decisions", "50", "--tokens", "4000", "--json", str(file)]
    assert main(["bench", "routing", *few]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert found["units of a prompt, hashes given"]["value"] == 63
    assert found["memory of an entry"]["met"] is True
    assert found["routing decision, p99"]["goal"] == 1


@pytest.mark.slow
def test_weights(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    file = tmp_path / "figures.json"
    few = ["--rounds", "1", "--batches", "2", "--context", "32", "--prompt", "48"]
    where = ["--shape", "tiny", "--threads", "1", "--json", str(file)]
    assert main(["bench", "weights", *few, *where]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    plain = found["plain, float32: step of 2"]
    assert found["int8 by output, float32: step of 2"]["against"] == plain["value"] > 0
    four, eight, wide = (
        found[f"{name}, float32: weights"]["value"]
        for name in ("4 bits, groups of 32", "fp8 by output", "plain")
    )
    assert four < eight < wide


@pytest.mark.slow
def test_adapters(bench: Bench) -> None:
    few = ["--rounds", "1", "--batch", "4", "--adapters", "1,4", "--context", "32", "--rank", "8"]
    found = bench("adapters", *few)
    assert found["1 distinct adapter"]["against"] == found["without adapters"]["value"]
    assert found["4 distinct adapters"]["value"] > 0
    assert found["one adapter, ready"]["value"] > 0
    assert found["adapters loaded beside streams"]["value"] >= 1
    longest = found["longest gap between tokens beside loads"]
    assert longest["met"] is (longest["ratio"] <= longest["goal"])


@pytest.mark.slow
def test_states(bench: Bench) -> None:
    few = ["--shape", "tiny-hybrid", "--rounds", "1", "--prompts", "130,260", "--turn-tokens", "9"]
    found = bench("states", *few)
    for length, cached in ((130, 128), (260, 256)):
        name = f"{length} tokens and 9 more"
        assert found[f"{name}: found in the cache"]["value"] == cached
        first = found[f"{name}: first token, found against computed"]
        saved = found[f"{name}: saved"]["value"]
        assert saved == pytest.approx((first["against"] - first["value"]) / 1000)


@pytest.mark.deep
def test_speculation(bench: Bench) -> None:
    few = ["--batches", "1,2", "--rounds", "1", "--prompt-tokens", "64", "--output-tokens", "64"]
    found = bench("speculation", *few)
    assert found["edited code, 1 at once: tokens of a sequence in a step"]["value"] > 1
    one = found["other text, 2 at once: output"]
    assert one["met"] is (one["ratio"] >= one["goal"])


@pytest.mark.deep
def test_speculation_of_a_model_that_answers_by_itself(bench: Bench) -> None:
    bundled = str(resolve_model("")[0])
    few = ["--batches", "2", "--rounds", "1", "--output-tokens", "48", "--own"]
    found = bench("speculation", "--shape", bundled, "--draft-model", bundled, *few)
    assert found["other text, by a model, 2 at once: drafts that were right"]["value"] > 50
    assert found["edited code, 2 at once: output"]["value"] > 0


@pytest.mark.deep
def test_batching(bench: Bench) -> None:
    found = bench("batching", "--requests", "6", "--batch", "2")
    assert found["requests with equal tokens"]["value"] == 100
    steps = found["steps"]
    assert steps["value"] < steps["against"]


@pytest.mark.slow
def test_offline(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    file = tmp_path / "figures.json"
    few = ["--shape", "tiny", "--requests", "6", "--rounds", "1", "--transport", "loopback"]
    assert main(["bench", "offline", *few, "--json", str(file)]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert found["requests with equal tokens, LLM and baton up"]["value"] == 100
    assert len(found) == 5 and all(result["value"] > 0 for result in found.values())


@pytest.mark.slow
def test_engine(bench: Bench) -> None:
    found = bench("engine", "--requests", "3", "--rounds", "1", "--quantize", "none")
    assert found["requests"]["value"] == 3
    assert found["Baton float32, not exact: requests with tokens equal to exact"]["unit"] == "%"
    assert found["one sequence, exact, against the bound of memory"]["goal"] == 0.7
    for name in ("step of exact mode, batch 32", "prefill in exact mode"):
        assert found[name]["met"] is (found[name]["ratio"] <= 1.1)


@pytest.mark.slow
def test_engine_against_transformers(bench: Bench) -> None:
    found = bench("engine", "--requests", "10", "--rounds", "1", "--peers")
    for rival in ("continuous batching", "generate, batches of 8", "generate, batches of 32"):
        equal = found[f"transformers {rival}: requests with tokens equal to exact"]
        assert equal["value"] == 100
    against = found["Baton float32, exact against transformers continuous batching"]
    assert against["goal"] == 3
    assert against["met"] is (against["ratio"] >= 3)


@pytest.mark.deep
def test_cost(bench: Bench) -> None:
    small = ("--contexts", "64,256", "--batches", "1,4", "--prompts", "64,256")
    found = bench("cost", *small, "--chunks", "64,256", "--kv-gb", "0.0005")
    assert "decode step, batch 1, context 256" in found
    assert "decode step, batch 4, context 256" not in found
    assert "prefill of 256 in chunks of 64" in found
    assert found["scheduler, per step of 256 sequences, p50"]["goal"] == 300
    assert found["KV memory unused, chat requests"]["met"] is True
    assert found["blocks saved by sharing, 8 system prompts, 256 users"]["value"] > 30


@pytest.mark.slow
def test_kv(bench: Bench) -> None:
    small = ("--sizes", "1,2", "--prompt-tokens", "256", "--chunks", "64", "--rounds", "1")
    found = bench("kv", *small)
    for transport in ("nixl", "loopback"):
        buffers = found[f"{transport}, 2 MB: buffer to buffer, verified, against raw"]
        assert buffers["met"] is (buffers["ratio"] >= 0.8)
        pools = found[f"{transport}, 1 MB: pool to pool against the sum of its parts"]
        assert pools["met"] is (pools["ratio"] <= 1.25)
        assert found[f"{transport}, 2 MB: whole hand-over of peers that have not met"]["value"] > 0
    assert all(
        found[f"{digest}: seal and verify"]["value"] > 0 for digest in ("xxh3-128", "poly61")
    )
    hidden = "256 tokens in chunks of 64"
    assert found[f"{hidden}: bytes when decode holds the first half"]["ratio"] == 0.5
    assert found[f"{hidden}: bound of what can be hidden"]["value"] == 75
    assert found[f"{hidden}: last chunk to first decode step"]["value"] > 0


@pytest.mark.slow
def test_stalls(bench: Bench) -> None:
    few = ("--running", "3", "--output-tokens", "48", "--prompt-tokens", "512", "--arrivals", "2")
    found = bench("stalls", *few, "--chunks", "64")
    for name in ("chunks of 64", "no chunks"):
        assert found[f"between tokens, p99 against p50, {name}"]["value"] > 0
        assert found[f"first token of a long prompt, p50, {name}"]["value"] > 0


@pytest.mark.slow
def test_drain(bench: Bench) -> None:
    small = ("--running", "3", "--prompt-tokens", "200", "--output-tokens", "800")
    found = bench("drain", "--shape", "", *small)
    assert found["streams whose KV moved"]["value"] == 3
    assert found["input tokens computed again, drained"]["value"] == 0
    assert found["input tokens computed again, killed"]["value"] >= 3 * 200
    for share in ("p50", "p99"):
        assert found[f"pause, {share}, KV moved against prefilled again"]["value"] > 0


@pytest.mark.slow
def test_rebalance(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ["--running", "16", "--output-tokens", "1200", "--json", str(file)]
    assert main(["bench", "rebalance", *few]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert found["sequences that moved"]["value"] > 0
    spread = found["most sequences less fewest, with"]
    assert spread["value"] < spread["against"] == 8


def turn(at: int, *blocks: int) -> str:
    lengths = {"input_length": 512 * len(blocks), "output_length": 64}
    return json.dumps({"timestamp": at, **lengths, "hash_ids": blocks}) + "\n"


CONVERSATIONS = (turn(1, 0, 1, 2), turn(2, 0, 3), turn(3, 0, 1, 2, 4), turn(4, 0, 3, 5))


def test_conversations_of_a_trace_share_more_than_its_first_block(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join((*CONVERSATIONS, turn(5, 0, 6))))
    args = argparse.Namespace(turns=2, conversations=2, seed=0, block_tokens=32, most_tokens=100)
    first, second = fabric.conversations(traces.read(trace).requests, args)
    assert [len(each.prompt) for each in (*first, *second)] == [96, 100, 64, 96]
    assert first[1].prompt[:96] == first[0].prompt
    assert second[1].prompt[:64] == second[0].prompt
    assert first[0].prompt[:64] != second[0].prompt
    assert {each.output_tokens for each in (*first, *second)} == {4}
    # All begin with one block; the last token of a prompt is computed though it is known.
    assert fabric.distinct([first, second, first]) == 96 + 4 + 32 + 32 + 1 + 4
    with pytest.raises(InvalidArgument):
        fabric.conversations(
            traces.read(trace).requests, argparse.Namespace(turns=3, conversations=1)
        )


@pytest.mark.slow
def test_fabric(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    trace, file = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    trace.write_text("".join(CONVERSATIONS))
    few = ["--conversations", "2", "--turns", "2", "--workers", "2", "--shape", "tiny"]
    command = ["bench", "fabric", "--trace", str(trace), *few, "--json", str(file)]
    assert main(command) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    # Two conversations of three and four blocks, and of two and three.
    assert found["prompt tokens"]["value"] == 32 * 12
    assert found["computed, nothing shared"]["value"] == 32 * 12
    assert found["prompt tokens that nothing can save"]["value"] == 32 * 6
    assert found["computed, own cache only"]["value"] < 32 * 12
    for tier in ("host", "disk", "store"):
        assert f"found, any worker's and tiers: tier {tier}" in found


@pytest.mark.slow
def test_readers(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = {"stalled": 12, "slow": 20, "streams": 4, "output-tokens": 50, "limit-s": 10, "rounds": 1}
    flags = [word for name, value in few.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "readers", *flags, "--json", str(file)]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    for way in ("HTTP", "gRPC"):
        assert found[f"stalled over {way} that were cut"]["value"] == 100
    assert found["between tokens, p99, median turn"]["goal"] == 1.2


@pytest.mark.slow
def test_ranks(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    file = tmp_path / "figures.json"
    few = ["--shape", "tiny", "--rounds", "1", "--batches", "1", "--json", str(file)]
    assert main(["bench", "ranks", *few, "--degrees", "1x1,2x2,2x2@2"]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert found["a step without work, 2x2"]["goal"] == 1
    against = found["decode step, batch 1, 2x2"]["against"]
    assert against == found["decode step, batch 1, no ranks"]["value"]
    local, far = (found[f"a step without work, {d}"]["value"] for d in ("2x2", "2x2@2"))
    assert found["added by TCP to a step, 2x2@2"]["value"] == pytest.approx(far - local)
    added = found["added by one rank, batch 1"]["value"]
    assert added == pytest.approx(found["decode step, batch 1, 1x1"]["value"] - against)
