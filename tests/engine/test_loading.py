"""What loading tells about a model: description, KV layout, digest, progress; and its settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.config import EngineConfig, configure_threads
from batonlm.engine.runner import TorchRunner
from batonlm.registry.digest import MANIFEST
from tests.engine.tiny_models import VOCAB, save_tiny_model


def load(folder: Path, **options: Any) -> TorchRunner:
    return TorchRunner.load(EngineConfig(str(folder), **{"num_blocks": 64, **options}))


def test_the_description(saved: Callable[[str], Path]) -> None:
    runner = load(saved("llama"), model_name="mine", tokenizer_digest="ab")
    model = runner.model
    assert (model.name, model.vocab_size, model.eos_token_ids) == ("mine", VOCAB, (2,))
    assert (model.max_model_len, model.tokenizer_digest) == (64 * 16, "ab")
    assert load(saved("llama"), max_model_len=100).model.max_model_len == 100
    assert load(saved("llama")).model.name == "llama"


def test_several_end_tokens(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": [2, 5, 7]})
    )
    assert load(folder).model.eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("llama", (3, 2, 16, 16)),
        ("qwen3", (3, 2, 32, 32)),
        ("gpt2", (3, 4, 16, 16)),
        ("deepseek_v3", (3, 1, 16 + 8, 0)),
        ("deepseek_v2", (3, 1, 24 + 8, 0)),
    ],
)
def test_the_layout_is_what_attention_is_given(
    arch: str, shape: tuple[int, ...], saved: Callable[[str], Path]
) -> None:
    layout = load(saved(arch)).layout
    sizes = (layout.num_layers, layout.num_kv_heads, layout.key_size, layout.value_size)
    assert (layout.dtype, sizes) == ("float32", shape)


@pytest.mark.deep
def test_the_digest_is_of_config_and_weights(tmp_path: Path) -> None:
    one = save_tiny_model("llama", tmp_path / "one")
    same = save_tiny_model("llama", tmp_path / "same")
    other = save_tiny_model("llama", tmp_path / "other", seed=1)
    digest = load(one).model.digest
    assert load(same).model.digest == load(same).layout.model_digest == digest
    assert load(other).model.digest != digest
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert load(same).model.digest != digest


def test_progress_rises_to_the_end(saved: Callable[[str], Path]) -> None:
    calls: list[tuple[int, int]] = []
    config = EngineConfig(str(saved("llama")), num_blocks=64)
    TorchRunner.load(config, lambda done, total: calls.append((done, total)))
    size = (saved("llama") / "model.safetensors").stat().st_size
    assert {total for _, total in calls} == {2 * size}
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == 2 * size
    assert len(set(done)) > 5


def test_the_pool_is_sized_by_memory(saved: Callable[[str], Path]) -> None:
    runner = load(saved("llama"), num_blocks=0, kv_memory_bytes=4 << 20, block_size=32)
    assert runner.num_blocks == (4 << 20) // (32 * runner.layout.bytes_per_position)
    few = load(saved("llama"), num_blocks=0, max_batch=2, max_model_len=200)
    assert few.num_blocks == 2 * 13


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loads_and_says_so(dtype: str, saved: Callable[[str], Path]) -> None:
    runner = load(saved("llama"), dtype=dtype)
    assert runner.layout.dtype == dtype
    assert runner.layout.bytes_per_position == 3 * 2 * 32 * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", "int4"),
        ("device", "tpu"),
        ("attention", "magic"),
        ("block_size", 0),
        ("block_size", 24),
        ("num_blocks", -1),
        ("kv_memory_bytes", -1),
        ("max_model_len", -5),
        ("threads", -1),
        ("max_batch", 0),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        replace(EngineConfig("m"), **{field: value})
    assert caught.value.field == field


def test_threads_are_configured_before_torch_only() -> None:
    with pytest.raises(Internal, match="before torch"):
        configure_threads(2)
    program = (
        "import os, sys\n"
        "from batonlm.engine.config import configure_threads\n"
        "configure_threads(3)\n"
        "assert 'torch' not in sys.modules\n"
        "names = ['OMP_WAIT_POLICY', 'THP_MEM_ALLOC_ENABLE', 'OMP_NUM_THREADS', 'GOMP_SPINCOUNT']\n"
        "print(*(os.environ.get(name) for name in names))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}

    def configured(threads: int) -> list[str]:
        """What the environment of OpenMP is then."""
        lines = program.replace("(3)", f"({threads})")
        output = subprocess.check_output([sys.executable, "-c", lines], env=environment, text=True)
        return output.split()

    assert configured(3) == ["PASSIVE", "1", "3", "100000"]
    environment.pop("OMP_NUM_THREADS", None)
    assert configured(0) == ["PASSIVE", "1", "None", "None"]


def test_the_fake_and_the_settings_need_no_torch() -> None:
    program = (
        "import sys\n"
        "import batonlm.testing.fake_runner, batonlm.engine.config\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_weights_that_are_not_those_that_were_fetched_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "m")
    digest = load(folder).model.digest
    (folder / MANIFEST).write_text(json.dumps({"digest": digest}))
    assert load(folder).model.digest == digest
    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="not those that 'baton fetch' put there"):
        load(folder)
