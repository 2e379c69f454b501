"""`baton plan fleet`: from configurations alone, and from workers that say how fast they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_loadtest.planner.fleet import Lengths
from baton_loadtest.planner.model import read
from batonlm.cli.layout import resolve_model
from batonlm.cli.main import main
from batonlm.core.request.model import KvLayout, WorkerIdentity
from batonlm.core.routing.load import (
    UNMEASURED,
    WorkerDescription,
    WorkerLoad,
    WorkerSpeed,
    WorkerState,
)
from batonlm.engine.config import EngineConfig
from batonlm.rpc.server import ProcessServer
from batonlm.rpc.worker import worker_service
from tests.loadtest.planner.model_configs import LLAMA_8B, LLAMA_70B, LLAMA_405B

MIXTRAL: dict[str, Any] = {
    **LLAMA_8B,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
ASKED = (
    "--rate", "20", "--input", "2000", "6000", "--output", "300", "900",
    "--first-token-ms", "500", "--between-tokens-ms", "30",
)  # fmt: skip
BY_HAND = ("--gpu-memory-gib", "80", "--gpu-bandwidth", "3350", "--gpu-tflops", "989")
PREFILLS = WorkerSpeed(
    prefill_step_s=0.002, prefill_position_s=2e-5, prefill_read_s=1e-9, prefill_step_tokens=512
)
DECODES = WorkerSpeed(
    step_s=0.004, row_s=1e-4, context_s=1e-8, link_bytes_per_s=2e9, handover_s=0.003
)


def folder(at: Path, settings: dict[str, Any]) -> Path:
    """Of which only the configuration is there."""
    at.mkdir()
    (at / "config.json").write_text(json.dumps(settings))
    return at


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("models") / "llama-8b", LLAMA_8B)


def plan(*words: str) -> int:
    return main(["plan", "fleet", *words])


def figures(file: Path) -> dict[str, float]:
    return {one["name"]: one["value"] for one in json.loads(file.read_text())["results"]}


def test_a_fleet_is_planned_from_a_configuration_and_a_data_sheet(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures" / "plan.json"
    told = ("--gpu", "h100-sxm", "--gpu-price", "3", "--json", str(file))
    assert plan("--model", str(large), *ASKED, *told) == 0
    said = capsys.readouterr().out
    assert "prefill roofline, decode roofline: H100-SXM at 50 % of 989 TFLOP/s" in said
    assert "compute-bound" in said and "bandwidth-bound" in said
    found = figures(file)
    assert found["model: KV of a token"] == 128
    assert found["model: weights"] == pytest.approx(16.06, rel=0.001)
    # All parameters but the embedding, which is looked up.
    assert found["model: parameters at work"] == pytest.approx(8.03 - 0.525, rel=0.001)
    gpus = found["prefill: workers"] + found["decode: workers"]
    tokens = 20 * 3600 * 2300 / 1e6
    assert found["both: a million tokens"] == pytest.approx(3 * gpus / tokens)
    assert found["both: KV of a request"] == pytest.approx(2000 * 0.131072, rel=0.01)
    assert json.loads(file.read_text())["command"].startswith("baton")


SLOWER = (
    "--rate", "2", "--input", "2000", "6000", "--output", "300", "900",
    "--first-token-ms", "6000", "--between-tokens-ms", "80",
)  # fmt: skip


@pytest.mark.parametrize(
    "settings, degree, gpus, weights",
    [
        pytest.param(LLAMA_70B, ("--tensor-parallel", "4"), 4, 141.1, id="70B on four"),
        pytest.param(
            LLAMA_405B,
            ("--tensor-parallel", "8", "--pipeline-parallel", "2"),
            16,
            811.7,
            id="405B on two machines of eight",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_model_larger_than_a_gpu_is_planned(
    settings: dict[str, Any], degree: tuple[str, ...], gpus: int, weights: float, tmp_path: Path
) -> None:
    model, file = folder(tmp_path / "m", settings), tmp_path / "plan.json"
    told = ("--model", str(model), *SLOWER, "--gpu", "h100-sxm", "--gpu-price", "3")
    assert plan(*told) == 1
    assert plan(*told, *degree, "--json", str(file)) == 0
    found = figures(file)
    assert found["model: weights"] == pytest.approx(weights, rel=0.001)
    workers = found["prefill: workers"] + found["decode: workers"]
    tokens = 2 * 3600 * 2300 / 1e6
    assert found["both: a million tokens"] == pytest.approx(3 * gpus * workers / tokens)
    # A step reads all weights with the bandwidth of one stage, and sums twice a layer.
    tensor = int(degree[1])
    read_s = 1e9 * (weights - 2.1) / (0.7 * tensor * 3350e9)
    sums_s = 2 * settings["num_hidden_layers"] * 20e-6
    assert found["decode: between tokens"] > 1000 * (read_s + sums_s)


@pytest.mark.parametrize("tensor, told", [("3", "no multiple of 3"), ("0", "at least 1")])
def test_degrees_that_cannot_be_are_refused(
    large: Path, tensor: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--gpu", "h100-sxm", "--tensor-parallel", tensor)
    assert plan("--model", str(large), *ASKED, *asked) == 1
    said = capsys.readouterr().err
    assert told in said and "tensor_parallel" in said


def test_a_gpu_without_a_name_is_described(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", str(large), *ASKED, *BY_HAND) == 0
    said = capsys.readouterr().out
    assert "described at 50 %" in said and "rest of a hand-over" not in said
    assert plan("--model", str(large), *ASKED, *BY_HAND[:4]) == 1
    assert "(gpu_tflops)" in capsys.readouterr().err


def test_experts_are_told_apart_from_what_every_token_goes_through(tmp_path: Path) -> None:
    config = EngineConfig(
        str(folder(tmp_path / "moe", MIXTRAL)), device="cuda", kv_memory_bytes=0, dtype="bfloat16"
    )
    facts = read(config, 1 << 40).facts
    expert = 3 * 4096 * 14336
    assert facts.experts == 32 * 8 * expert and (facts.num_experts, facts.chosen) == (8, 2)
    attention = 4096 * (4096 * 2 + 1024 * 2)
    assert facts.body == 32 * (attention + 8 * 4096)
    assert facts.read_bytes(1) == pytest.approx(
        facts.weights - facts.unread - 0.75 * facts.experts * 2
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("--gpu", "H900"), "'H900' is not known; B200, H200, H100-SXM"),
        ((), "a role that no running worker speaks for"),
        (("--gpu", "L4", "--gpu-memory-gib", "16"), "too few"),
        (("--gpu", "L4"), "takes 1.54 s with a worker to itself"),
        (("--gpu", "H200", "--first-token-ms", "100"), "takes 190 ms with a worker to itself"),
        (("--gpu", "H200", "--between-tokens-ms", "3"), "GB of weights and"),
        (("--gpu", "H200", "--between-tokens-ms", "nan"), "(between_tokens_ms)"),
        (("--gpu", "H200", "--rate", "-1"), "(rate)"),
        (("--gpu", "H200", "--input", "100", "90"), "below the mean (input)"),
        (("--gpu", "H200", "--input", "90000", "140000"), "longer than the model's 131072"),
        (("--gpu", "H200", "--busy", "1"), "(busy)"),
        (("--gpu", "H200", "--link", "0"), "(link)"),
        (("--gpu", "H200", "--compute-efficiency", "2"), "(compute_efficiency)"),
        (("--gpu", "H200", "--shared-prefix", "1"), "(shared_prefix)"),
        (("--gpu", "H200", "--step-tokens", "0"), "(step_tokens)"),
        (("--gpu", "H200", "--dtype", "float32"), "--dtype bfloat16 (dtype)"),
        (("--calibrate", "nowhere"), "'nowhere' is not host:port"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    large: Path, changed: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--model", str(large), *ASKED, *changed) == 1
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


class Telling:
    """A worker of which only what it tells is there."""

    def __init__(self, role: str, layout: KvLayout, speed: WorkerSpeed) -> None:
        self.identity = WorkerIdentity(role, role[0] * 32, "")
        self.layout = layout
        self.speed = speed

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            self.identity, layout=self.layout, num_blocks=5000, block_size=16, max_sequences=40
        )

    def load(self) -> WorkerLoad:
        return WorkerLoad(WorkerState.SERVING, speed=self.speed)


@asynccontextmanager
async def serving(*workers: Telling) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        addresses = []
        for one in workers:
            service = worker_service(one.describe, one.load)
            server = ProcessServer(listen="127.0.0.1:0", services=[service])
            addresses.append(await server.start())
            stack.push_async_callback(server.stop, 0)
        yield addresses


async def calibrated(workers: Sequence[Telling], *words: str) -> int:
    async with serving(*workers) as addresses:
        return await asyncio.to_thread(plan, *ASKED, *words, "--calibrate", *addresses)


@pytest.fixture(scope="module")
def bundled() -> KvLayout:
    """As on a CPU, which keeps its numbers as float32."""
    config = EngineConfig(
        str(resolve_model("")[0]), device="cuda", kv_memory_bytes=0, dtype="float32"
    )
    return read(config, 1 << 40).layout


LONG = ("--first-token-ms", "5000", "--input", "200", "300", "--output", "50", "80")


async def test_workers_say_how_fast_they_are(
    bundled: KvLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    workers = Telling("prefill", bundled, PREFILLS), Telling("decode", bundled, DECODES)
    assert await calibrated(workers, *LONG, "--json", str(file)) == 0
    assert "prefill measured, decode measured\n" in capsys.readouterr().out
    found = figures(file)
    assert found["prefill: a long prompt"] == pytest.approx(1000 * PREFILLS.prefill_s(0, 300))
    assert found["decode: batch"] == 40
    grown = 200 + Lengths(50, 80).weighted_mean
    assert found["decode: sequences that fit"] == int(5000 * 16 / grown)
    assert found["model: KV of a token"] == bundled.bytes_per_position / 1024
    assert "both: rest of a hand-over" in found


async def test_what_was_not_measured_is_a_rooflines(
    large: Path, bundled: KvLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [Telling("decode", bundled, DECODES)]
    told = ("--gpu", "H100-SXM", "--dtype", "bfloat16")
    assert await calibrated(workers, *LONG, *told) == 0
    assert "prefill roofline, decode measured: H100-SXM" in capsys.readouterr().out
    assert await calibrated(workers, *LONG) == 1
    assert "a role that no running worker speaks for" in capsys.readouterr().err
    assert await calibrated(workers, "--model", str(large), *told) == 1
    assert "has another model: num_layers is" in capsys.readouterr().err


async def test_workers_that_cannot_say_it(
    bundled: KvLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await calibrated([Telling("decode", bundled, UNMEASURED)], *LONG) == 1
    assert "has measured nothing yet" in capsys.readouterr().err
    assert await calibrated([Telling("tokenizer", bundled, UNMEASURED)], *LONG) == 1
    assert "is a tokenizer, not a prefill or decode worker" in capsys.readouterr().err
    async with serving(Telling("decode", bundled, DECODES)) as addresses:
        gone = addresses[0]
    assert await asyncio.to_thread(plan, *ASKED, "--calibrate", gone) == 1
    assert f"{gone} cannot be asked" in capsys.readouterr().err
