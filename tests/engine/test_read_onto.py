"""Weights read weight by weight onto a device, against what transformers reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batonlm.engine.checkpoint import Checkpoint, check_files
from batonlm.engine.config import EngineConfig
from batonlm.engine.loader import Bar, load, read_onto

PLAIN_FILES = ("llama", "llama_tied", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "gpt_oss")


@pytest.mark.parametrize("arch", PLAIN_FILES)
def test_weights_read_onto_a_device_are_those_that_transformers_reads(
    arch: str, saved: Callable[[str], Path]
) -> None:
    """The device is this machine's memory, which is a device like another."""
    folder = saved(arch)
    wanted = load(EngineConfig(str(folder), device="cpu"))
    settings = wanted.settings
    model_class = type(wanted.network)
    files = Checkpoint(folder, tuple(check_files(folder)), None)
    given = torch.device("cpu"), model_class, files, settings, torch.float32, Bar(None, 0)
    network = read_onto(*given)
    assert network is not None
    ours, theirs = (
        {**dict(each.named_parameters(remove_duplicate=False)), **dict(each.named_buffers())}
        for each in (network, wanted.network)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    tied = [len({id(weight) for weight in each.parameters()}) for each in (network, wanted.network)]
    assert tied[0] == tied[1]


def test_files_that_name_weights_otherwise_are_left_to_transformers(
    saved: Callable[[str], Path],
) -> None:
    """Experts lie one by one in files; GPT-OSS keeps the weights of norms in float32 where the
    others are in float16."""
    for arch, dtype in (("qwen3_moe", torch.float32), ("gpt_oss", torch.float16)):
        loaded = load(EngineConfig(str(saved(arch)), device="cpu"))
        files = Checkpoint(saved(arch), tuple(check_files(saved(arch))), None)
        given = torch.device("cpu"), type(loaded.network), files, loaded.settings
        assert read_onto(*given, dtype, Bar(None, 0)) is None
