"""Tokens with adapters equal those of peft, installed as its users would, which loads the files
that the engine's tests write."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from tests.clients.conftest import RUN_S, beside_ours
from tests.e2e.adapters_at_once import ask_all, save_all, serving
from tests.engine.adapters import save_adapter
from tests.engine.driving import generate, random_prompts, scattered
from tests.engine.tiny_models import VOCAB, save_tiny_model

pytestmark = pytest.mark.clients

PACKAGES = ("peft", "accelerate", "psutil")
"""Without what it requires of torch and transformers: those of this environment are used."""
ARCHS = ("llama", "qwen3", "phi3", "gpt2", "mixtral", "gemma2", "lfm2", "qwen3_next")
SCRIPT = Path(__file__).parent / "scripts/with_peft.py"
JUDGE = Path(__file__).parent / "scripts/judge_with_peft.py"
NEW, BLOCKS = 8, 4
CLOSE = 2e-4
ONE_LAYER = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_ours(tmp_path_factory.mktemp("venv"), PACKAGES)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ARCHS)
def test_peft(arch: str, python: Path, tmp_path: Path) -> None:
    model = save_tiny_model(arch, tmp_path / "model")
    adapters = {
        "plain": save_adapter(arch, tmp_path / "plain", seed=1),
        "rslora": save_adapter(arch, tmp_path / "rslora", seed=2, rank=5, use_rslora=True),
    }
    if arch == "llama":
        patterns: dict[str, Any] = {
            "rank_pattern": {ONE_LAYER: 3},
            "alpha_pattern": {ONE_LAYER: 40},
        }
        adapters["patterns"] = save_adapter(arch, tmp_path / "patterns", seed=3, **patterns)
    prompts = random_prompts((3, 17, 40), VOCAB)
    asked = {
        "model": str(model),
        "adapters": {name: str(folder) for name, folder in adapters.items()},
        "prompts": prompts,
        "count": NEW,
    }
    done = subprocess.run(
        [python, SCRIPT, json.dumps(asked)], capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    runner = TorchRunner.load(
        EngineConfig(str(model), num_blocks=512, adapter_memory_bytes=8 << 20)
    )
    digests = {name: runner.load_adapter(folder).digest for name, folder in adapters.items()}
    # All prompts with all adapters at once.
    pairs = [(prompt, digests[name]) for name in adapters for prompt in prompts]
    tables = scattered(len(pairs), runner.layout.state_blocks(runner.block_size) + BLOCKS)
    ours = generate(
        runner, [p for p, _ in pairs], tables, NEW, adapters=[digest for _, digest in pairs]
    )
    assert ours == [tokens for name in adapters for tokens, _ in theirs[name]]
    params = SamplingParams(temperature=0.0, top_logprobs=0)
    chunks = [
        Chunk(
            i,
            [*prompt, *tokens[:-1]],
            0,
            tables[i],
            (SampleRow(i, 0, 0, params),),
            adapter=digest,
        )
        for i, ((prompt, digest), tokens) in enumerate(zip(pairs, ours, strict=True))
    ]
    runner.submit(StepPlan(0, tuple(chunks)))
    made = {token.sequence_id: token for token in runner.collect().tokens}
    wanted = [logprob for name in adapters for _, logprob in theirs[name]]
    for i, logprob in enumerate(wanted):
        assert made[i].token_id == ours[i][-1]
        own = made[i].logprobs
        assert own is not None and abs(own.logprob - logprob) < CLOSE


@pytest.mark.timeout(1800)
def test_a_hundred_adapters_at_once(python: Path, tmp_path: Path) -> None:
    """Over prefill and decode workers, one of which is killed."""
    adapters = save_all(tmp_path / "adapters")
    with serving(adapters, tmp_path / "running") as relay:
        found = ask_all(relay)
    asked: dict[str, Any] = {
        "model": str(tmp_path / "running/tiny"),
        "adapters": {name: str(folder) for name, folder in adapters.items()},
        "answers": found,
    }

    def wrong(**changes: Any) -> list[str]:
        done = subprocess.run(
            [python, JUDGE],
            input=json.dumps({**asked, **changes}),
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, done.stderr
        names: list[str] = json.loads(done.stdout)
        return names

    assert wrong() == []
    # It would find one: each adapter's answers are no other's.
    first, second, *_ = adapters
    swapped = {first: asked["adapters"][second], second: asked["adapters"][first]}
    assert wrong(adapters=swapped) == [first, second]
