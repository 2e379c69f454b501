"""In which numbers a model runs on CPUs: the first of those left open that fits."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli.layout import resolve_model
from batonlm.cli.precision import (
    BFLOAT16,
    FLOAT32,
    INT8,
    LEAST_KV_BYTES,
    SMALLEST,
    Chosen,
    ModelShare,
    ModelWeights,
    Precision,
    candidates,
    choose,
    copied_bytes_per_s,
    cpu_flags,
    read_weights,
)
from batonlm.core.errors import InvalidArgument
from batonlm.engine.config import EngineConfig
from batonlm.engine.memory import size

GIB = 1 << 30
AMX = frozenset({"avx512_bf16", "amx_bf16", "amx_int8", "avx512_vnni"})
VNNI = frozenset({"avx512_vnni"})
BILLION = ModelWeights(matrices=GIB, others=GIB // 4)
"""float32 takes 5 GiB, bfloat16 2.5, int8 and float32 2, int8 and bfloat16 1.5."""


def chosen(
    free: int,
    engines: int = 1,
    *,
    weights: ModelWeights = BILLION,
    cpu: frozenset[str] = AMX,
    **given: Any,
) -> Chosen:
    (found,) = choose([ModelShare(weights, engines, **given)], free, threads=1, cpu=cpu)
    return found


@pytest.mark.parametrize(
    ("cpu", "order"),
    [
        (AMX, [FLOAT32, BFLOAT16, INT8, SMALLEST]),
        (VNNI, [FLOAT32, INT8, SMALLEST, BFLOAT16]),
        (frozenset({"bf16"}), [FLOAT32, BFLOAT16]),
        (frozenset(), [FLOAT32, BFLOAT16]),
    ],
)
def test_what_the_cpu_multiplies_quickly_comes_first(
    cpu: frozenset[str], order: list[Precision]
) -> None:
    assert candidates(cpu) == order


def test_the_first_precision_that_fits_is_taken() -> None:
    for free, precision in (
        (7 * GIB, FLOAT32),
        (6 * GIB, BFLOAT16),
        (3 * GIB, INT8),
        (2 * GIB, SMALLEST),
    ):
        found = chosen(free)
        assert found.precision == precision
        assert found.kv_bytes == int(free * 0.8) - BILLION.num_bytes(precision)
        assert found.kv_bytes >= LEAST_KV_BYTES
    assert chosen(12 * GIB, engines=2).precision == BFLOAT16
    assert chosen(6 * GIB, cpu=frozenset()).precision == BFLOAT16


def test_the_line_says_what_is_taken_and_how_to_insist() -> None:
    words = chosen(6 * GIB).words
    assert words.startswith("Weights in bfloat16: 2.5 GiB in an engine process, and up to 2.3 GiB")
    assert "of 6 GiB free" in words and "tokens/s" in words
    assert "float32 would take 5 GiB; --dtype float32 insists" in words
    assert "--dtype bfloat16 takes 2.5 GiB" in chosen(7 * GIB).words
    small = chosen(GIB, engines=2, weights=ModelWeights(1000, 0))
    assert "tokens/s" not in small.words and "each of 2 engine processes" in small.words


def test_what_the_user_says_is_taken_or_refused() -> None:
    assert chosen(9 * GIB, dtype="bfloat16").precision == BFLOAT16
    assert chosen(9 * GIB, quantize="int8").precision == INT8
    assert chosen(2 * GIB, quantize="int4").precision == Precision("bfloat16", "int4")
    assert chosen(2 * GIB, quantize="int8").precision == SMALLEST
    assert chosen(9 * GIB, dtype="bfloat16", quantize="int8").precision == SMALLEST
    with pytest.raises(InvalidArgument) as refused:
        chosen(6 * GIB, dtype="float32")
    assert refused.value.field == "model"
    assert "5 GiB for weights in float32" in refused.value.message
    assert "what fits: --dtype bfloat16 (2.5 GiB)" in refused.value.message


def test_a_refusal_says_what_would_fit() -> None:
    with pytest.raises(InvalidArgument) as refused:
        chosen(3 * GIB, engines=2)
    assert "2 engine processes would each take 1.5 GiB" in refused.value.message
    assert refused.value.message.endswith(
        "what fits: --dtype bfloat16 --quantize int4 (1.12 GiB) or "
        "--dtype float32 --quantize int8 --prefill 0 --decode 1 (2 GiB)"
    )
    with pytest.raises(InvalidArgument, match="what fits: --dtype bfloat16 --quantize int4"):
        chosen(int(1.5 * GIB))
    with pytest.raises(InvalidArgument, match="nothing smaller fits"):
        chosen(GIB)


def test_weights_that_are_quantized_already_stay_as_they_are() -> None:
    packed = ModelWeights(0, GIB // 2, is_packed=True, kept_bytes=GIB)
    assert chosen(9 * GIB, weights=packed).precision == FLOAT32
    assert chosen(3 * GIB, weights=packed).precision == BFLOAT16
    with pytest.raises(InvalidArgument, match="nothing smaller fits"):
        chosen(GIB, weights=packed)


SMALL = ModelWeights(matrices=GIB // 8, others=0)
"""float32 takes 512 MiB, bfloat16 256."""


def both(free: int, *, engines: int = 1, kv_bytes: int = 0) -> list[Chosen]:
    shares = [
        ModelShare(BILLION, engines, name="large"),
        ModelShare(SMALL, engines, name="small", kv_bytes=kv_bytes),
    ]
    return choose(shares, free, threads=1, cpu=AMX)


def test_models_share_the_memory_and_never_take_more_than_there_is() -> None:
    for free in (12 * GIB, 7 * GIB, 4 * GIB, int(2.5 * GIB)):
        for engines in (1, 2):
            try:
                found = both(free, engines=engines)
            except InvalidArgument as refused:
                assert f"of {size(free)} free" in refused.message
                continue
            pairs = zip((BILLION, SMALL), found, strict=True)
            taken = [weights.num_bytes(one.precision) + one.kv_bytes for weights, one in pairs]
            assert 0 <= int(free * 0.8) - engines * sum(taken) < 2 * engines
            assert found[0].kv_bytes == found[1].kv_bytes >= LEAST_KV_BYTES


def test_the_model_that_frees_the_most_memory_is_kept_in_smaller_numbers_first() -> None:
    assert [one.precision for one in both(8 * GIB)] == [FLOAT32, FLOAT32]
    assert [one.precision for one in both(6 * GIB)] == [BFLOAT16, FLOAT32]
    assert [one.precision for one in both(int(2.25 * GIB))] == [SMALLEST, BFLOAT16]


def test_what_the_user_gives_a_models_kv_counts() -> None:
    large, small = both(9 * GIB, kv_bytes=GIB)
    assert small.kv_bytes == GIB
    assert large.kv_bytes == int(9 * GIB * 0.8) - int(5.5 * GIB) - GIB
    with pytest.raises(InvalidArgument) as refused:
        both(9 * GIB, kv_bytes=7 * GIB)
    assert "large: 1 engine process would each take" in refused.value.message
    assert "small: 1 engine process would each take 128 MiB" in refused.value.message
    assert "and 7 GiB for KV, and of 9 GiB free 7.2 GiB may be used" in refused.value.message


@pytest.mark.parametrize("kind", ["awq", "compressed int8"])
def test_the_sum_of_quantized_weights_is_about_the_workers_own(kind: str, tmp_path: Path) -> None:
    from baton_loadtest.quantised import write as write_quantised
    from batonlm.engine.footprint import foresee
    from tests.engine.tiny_models import save_tiny_model

    folder, _ = write_quantised(kind, save_tiny_model("llama", tmp_path / "plain"), tmp_path)
    for precision in (FLOAT32, BFLOAT16):
        memory = foresee(EngineConfig(str(folder), device="cpu", dtype=precision.dtype)).memory
        found = read_weights(folder).num_bytes(precision)
        assert found == pytest.approx(memory.weights_bytes, rel=0.06)


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, INT8, SMALLEST], ids=str)
def test_the_sum_is_about_the_workers_own(precision: Precision) -> None:
    from batonlm.engine.footprint import weights_bytes
    from batonlm.engine.loader import outline

    folder = resolve_model("")[0]
    config = EngineConfig(
        model=str(folder), device="cpu", dtype=precision.dtype, quantize=precision.quantize
    )
    model = outline(config)
    own = weights_bytes(model.network, model.device, precision.quantize)
    assert read_weights(folder).num_bytes(precision) == pytest.approx(own, rel=0.03)


def write(file: Path, shapes: dict[str, list[int]]) -> None:
    header = json.dumps({n: {"dtype": "BF16", "shape": s} for n, s in shapes.items()}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def test_an_output_layer_of_its_own_is_not_counted_twice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    shapes = {"model.embed_tokens.weight": [100, 8], "model.norm.weight": [8], "a.weight": [8, 8]}
    write(tmp_path / "a.safetensors", shapes)
    assert read_weights(tmp_path) == ModelWeights(64 + 800, 800 + 8)
    write(tmp_path / "b.safetensors", {"lm_head.weight": [100, 8]})
    assert read_weights(tmp_path) == ModelWeights(64 + 800, 800 + 8)


def test_no_speed_is_said_of_a_model_that_reads_some_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write(
        tmp_path / "a.safetensors", {"model.layers.0.mlp.experts.down_proj": [8, 1 << 14, 1 << 12]}
    )
    weights = read_weights(tmp_path)
    assert weights == ModelWeights(1 << 29, 0, is_sparse=True)
    assert "tokens/s" not in chosen(9 * GIB, weights=weights).words


def test_the_kernel_says_what_the_cpu_can_do(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16\n\nprocessor\t: 1\nflags\t: fpu\n")
    assert cpu_flags(file) == {"fpu", "avx512_bf16"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_a_speed_is_measured() -> None:
    assert copied_bytes_per_s() > 0
