"""Every option of the engine reaches it, and its refusals name the operator's options."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli.layout import resolve_model
from batonlm.core.errors import InvalidArgument
from batonlm.core.scheduler.policy import QueueLimit
from batonlm.engine.config import MIB, EngineConfig
from batonlm.rpc.config import load
from batonlm.testing.worker import (
    DisturbedDecodeConfig,
    DisturbedPrefillConfig,
    open_disturbed,
    replace_constants,
)
from batonlm.worker import options as worker_options
from batonlm.worker.engine import engine_config, open_runner
from batonlm.worker.options import DecodeConfig, PrefillConfig, WorkerOptions

OPTIONS = DecodeConfig(model="m", step_tokens=256, max_running=64, memory_share=0.8)
CHANGES: dict[str, tuple[Any, str, Any]] = {
    "model_name": ("n", "model_name", "n"),
    "dtype": ("float16", "dtype", "float16"),
    "device": ("cuda", "device", "cuda"),
    "block_size": (48, "block_size", 48),
    "kv_memory_mib": (5, "kv_memory_bytes", 5 * MIB),
    "memory_share": (0.3, "memory_share", 0.3),
    "max_model_len": (77, "max_model_len", 77),
    "max_running": (3, "max_batch", 3),
    "exact": (False, "exact", False),
    "threads": (2, "threads", 2),
    "quantize": ("int8", "quantize", "int8"),
    "swap_host_mib": (7, "swap_host_bytes", 7 * MIB),
    "swap_disk_mib": (9, "swap_disk_bytes", 9 * MIB),
    "swap_folder": ("/swap", "swap_folder", "/swap"),
    "graphs": (False, "graphs", False),
    "decoder": ("transformers", "decoder", "transformers"),
    "kv_cache_dtype": ("fp8", "kv_cache_dtype", "fp8"),
    "kv_wire_dtype": ("fp8", "kv_wire_dtype", "fp8"),
    "prefix_host_mib": (15, "prefix_host_bytes", 15 * MIB),
    "adapter_memory_mib": (11, "adapter_memory_bytes", 11 * MIB),
    "adapter_host_mib": (13, "adapter_host_bytes", 13 * MIB),
    "speculation": ("heads", "heads", True),
}


@pytest.mark.parametrize("option", CHANGES)
def test_an_option_reaches_the_engine(option: str) -> None:
    value, field, wanted = CHANGES[option]
    before, after = engine_config(OPTIONS), engine_config(replace(OPTIONS, **{option: value}))
    assert getattr(after, field) == wanted != getattr(before, field)


def test_a_step_has_room_for_prompts_and_running_sequences() -> None:
    config = DecodeConfig(model="m", step_tokens=100, max_running=8, memory_share=0.8)
    assert engine_config(config).max_step_tokens == 108


def test_a_draft_model_drafts_and_runs_on_one_rank() -> None:
    drafting: dict[str, Any] = {"speculation": "draft", "draft_model": "d"}
    assert engine_config(replace(OPTIONS, **drafting)).draft_model == "d"
    for changes, field in (
        ({"speculation": "draft"}, "speculation"),
        ({"draft_model": "d"}, "draft_model"),
        ({**drafting, "tensor_parallel": 2}, "draft_model"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            replace(OPTIONS, **changes)
        assert caught.value.field == field


def test_a_prefill_worker_sets_nothing_aside_for_swapping() -> None:
    config = engine_config(
        PrefillConfig(model="m", step_tokens=256, max_running=64, memory_share=0.8)
    )
    assert (config.swap_host_bytes, config.swap_disk_bytes) == (0, 0)


@pytest.mark.parametrize("tier", ["prefix_host_mib", "prefix_disk_mib"])
def test_tiers_keep_whole_blocks(tier: str) -> None:
    changes: dict[str, Any] = {tier: 1, "block_size": 48}
    with pytest.raises(InvalidArgument) as caught:
        replace(OPTIONS, **changes)
    assert caught.value.field == tier


def test_the_pool_is_sized_by_what_is_free_unless_told() -> None:
    assert engine_config(OPTIONS).kv_memory_bytes == 0


def test_every_field_of_the_engine_can_be_chosen() -> None:
    """But for those that are for tests and measurements."""
    reached = {field for _, field, _ in CHANGES.values()}
    others = {"model", "max_step_tokens", "tokenizer_digest", "num_blocks", "attention", "decoder"}
    others |= {"draft_model"}
    assert {field.name for field in fields(EngineConfig)} == reached | others


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_memory_mib": 1, "block_size": 1024}, "kv_memory_mib"),
        ({"max_model_len": 2000, "kv_memory_mib": 1}, "max_model_len"),
        ({"swap_host_mib": 1 << 30}, "memory_share"),
        ({"block_size": 17}, "block_size"),
        ({"model": "/no/such/folder"}, "model"),
    ],
)
def test_refusals_name_options(changes: dict[str, Any], field: str, fresh_torch: None) -> None:
    bundled: Path = resolve_model("")[0]
    options = replace(OPTIONS, **{"model": str(bundled), "device": "cpu", **changes})
    with pytest.raises(InvalidArgument) as caught:
        open_runner(options)
    assert caught.value.field == field


@pytest.mark.parametrize("cls", [DisturbedPrefillConfig, DisturbedDecodeConfig])
def test_faults_that_are_not_understood_are_refused(
    cls: type[DisturbedPrefillConfig | DisturbedDecodeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    faults = "corrupt@sender.sealed:rate=0.01"
    made = load(cls, ["--model", "m"], {"BATON_KV_FAULTS": faults}, prog="baton-test")
    assert made.kv_faults == faults
    with pytest.raises(SystemExit) as caught:
        load(cls, ["--model", "m", "--kv-faults", "corrupt@nowhere"], {}, prog="baton-test")
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "kv_faults" in said and "points are" in said


@pytest.mark.parametrize("cls", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize("flag", ["--kv-faults", "--poison-token", "--runner", "--fake-step-ms"])
def test_who_serves_cannot_be_disturbed(cls: type[WorkerOptions], flag: str) -> None:
    with pytest.raises(SystemExit) as caught:
        load(cls, ["--model", "m", flag, "1"], {}, prog="baton-test")
    assert caught.value.code == 2


def test_constants_are_replaced_for_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_options, "MAX_WAITING", worker_options.MAX_WAITING)
    replace_constants("batonlm.worker.options.MAX_WAITING=7")
    assert OPTIONS.queue_limit == QueueLimit(2 * OPTIONS.step_tokens, 7)
    for wrong in ("batonlm.worker.options.NO_SUCH=7", "batonlm.worker.options.MAX_WAITING=many"):
        with pytest.raises((AttributeError, ValueError)):
            replace_constants(wrong)


@pytest.fixture
def fresh_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are set before torch is imported; here it may be already."""
    monkeypatch.setattr("batonlm.worker.engine.configure_threads", lambda threads: None)


def test_the_fake_runner_has_one_rank() -> None:
    with pytest.raises(InvalidArgument) as refused:
        open_disturbed(
            DisturbedDecodeConfig(model="m", tensor_parallel=2), lambda done, total: None
        )
    assert refused.value.field == "tensor_parallel"


SPREAD: dict[str, Any] = {
    "model": "m",
    "pipeline_parallel": 2,
    "machines": 2,
    "ranks_listen": "10.0.0.1:50053",
}


def test_rays_machines_need_no_token_of_the_operators() -> None:
    assert DecodeConfig(**SPREAD, ray_address="10.0.0.9:6379").ranks_token == ""
    wrongs: list[dict[str, Any]] = [{}, {"ray_address": "auto", "ranks_token": "short"}]
    for wrong in wrongs:
        with pytest.raises(InvalidArgument, match="16 characters") as refused:
            DecodeConfig(**SPREAD, **wrong)
        assert refused.value.field == "ranks_token"


def test_ray_has_nothing_to_place_for_one_machine() -> None:
    with pytest.raises(InvalidArgument) as refused:
        PrefillConfig(model="m", ray_address="auto")
    assert refused.value.field == "ray_address"
