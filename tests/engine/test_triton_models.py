"""Whole models over Triton's attention and block-major memory against their own attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine import selfcheck
from batonlm.engine.attention.triton.backend import TritonBackend
from batonlm.engine.config import EngineConfig
from batonlm.engine.graphs import refusing_host_waits
from batonlm.engine.loader import load, probe_attention, run_network, wire
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.driving import random_prompts, scattered
from tests.engine.tiny_models import ARCHS, VOCAB, build

BLOCKS = 4
# More than the windows of these models have.
LENGTH = 26
SOME = ("llama", "gemma2", "gpt_oss", "deepseek_v3")


class Model:
    """A model of two sequences over Triton's attention."""

    def __init__(self, folder: Path, device: str):
        loaded = load(EngineConfig(str(folder), dtype="float32", device=device))
        wire(loaded.network)
        shape = probe_attention(loaded)
        self._network = loaded.network
        where = 2 * BLOCKS, 16, loaded.device
        longest = 16 * BLOCKS
        self._backend = TritonBackend(
            shape, *where, max_model_len=longest, max_batch=4, exact=False
        )
        self.cache = self._backend.memory
        self.cache.storage.fill_(torch.nan)
        self._fill = self._backend.decode_buffers(4)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        return run_network(self._network, self._backend.begin(plan))

    @torch.inference_mode()
    def decode(self, plan: StepPlan, rows: int) -> torch.Tensor:
        """In buffers that stay, as a graph does."""
        return run_network(self._network, self._fill(plan, rows))

    @torch.inference_mode()
    def run_as_recorded(self, rows: int) -> None:
        """A step of nothing but padding, in which the host may wait for nothing. Experts take the
        form that GPUs take: the loop of CPUs looks at values."""
        if self._network._can_set_experts_implementation():  # type: ignore[operator]
            self._network.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        inputs = self._fill(StepPlan(0, ()), rows)
        with refusing_host_waits():
            run_network(self._network, inputs)


def check(folder: Path, arch: str, device: str) -> None:
    """Prompts packed and chunked, then tokens of decode in a batch with padding."""
    model = Model(folder, device)
    own = build(arch).to(device)
    texts = selfcheck.prompts(VOCAB, LENGTH)
    tables = scattered(2, BLOCKS)

    @torch.inference_mode()
    def expected() -> list[torch.Tensor]:
        return [own(torch.tensor([text], device=device)).logits[0] for text in texts]

    selfcheck.SelfCheck(model.forward, tables, texts, expected()).parity()
    for token in (7, 8):
        chunks = []
        for i, text in enumerate(texts):
            text.append(token + i)
            chunks.append(Chunk(i, text[-1:], len(text) - 1, tables[i]))
        logits = model.decode(StepPlan(0, tuple(chunks)), 4)
        assert logits.shape == (4, VOCAB)
        torch.testing.assert_close(
            logits[:2], torch.stack([rows[-1] for rows in expected()]), rtol=2e-3, atol=2e-3
        )
    for rows in (1, 4):
        model.run_as_recorded(rows)


@pytest.mark.deep
@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
@pytest.mark.parametrize("arch", SOME)
def test_logits_equal_those_of_the_models_own_attention(
    arch: str, device: str, saved: Callable[[str], Path]
) -> None:
    check(saved(arch), arch, device)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in SOME])
def test_so_they_do_for_all_other_architectures(arch: str, saved: Callable[[str], Path]) -> None:
    check(saved(arch), arch, "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", [INTERPRETER, CUDA])
def test_kv_moves_to_other_blocks_of_another_cache(
    device: str, saved: Callable[[str], Path]
) -> None:
    sender, taker = Model(saved("llama"), device), Model(saved("llama"), device)
    (text,) = random_prompts([40], VOCAB)
    here, there = scattered(2, BLOCKS)
    sender.forward(StepPlan(0, (Chunk(0, text[:39], 0, here),)))
    for first, count in ((0, 5), (5, 16), (21, 18)):
        payload = bytearray(count * sender.cache.layout.bytes_per_position)
        sender.cache.pack(here, first, count, memoryview(payload))
        taker.cache.unpack(there, first, count, memoryview(payload))
    steps = [StepPlan(0, (Chunk(0, text[39:], 39, table),)) for table in (here, there)]
    wanted = sender.decode(steps[0], 1)
    assert torch.equal(taker.decode(steps[1], 1), wanted)
