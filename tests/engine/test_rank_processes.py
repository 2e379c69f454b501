"""Ranks as real processes: tokens equal transformers', and a rank that dies ends its step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic

import pytest

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks import link
from batonlm.engine.ranks.processes import RankProcesses
from batonlm.engine.ranks.runner import STEP_S, RankedRunner
from tests.engine.driving import generate, random_prompts, together
from tests.engine.test_parity import expected
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.deep

PATIENCE_S = 120.0


@pytest.mark.parametrize(
    "victim, number", [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_rank_that_dies_or_hangs_at_work_ends_the_step(
    victim: int,
    number: signal.Signals,
    saved: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that hangs after a silence, a fraction of the time that a step may take."""
    # A third of the usual time: ranks show life every second.
    quicker = partial(link.watch, silence_s=link.SILENCE_S / 3)
    monkeypatch.setattr("batonlm.engine.ranks.runner.watch", quicker)
    ranks = RankProcesses(2, 1)
    seen: list[tuple[int, int]] = []
    config = EngineConfig(str(saved("llama")), num_blocks=128, threads=1)
    runner = RankedRunner.open(ranks, config, lambda done, total: seen.append((done, total)))
    try:
        died = threading.Event()
        runner.on_death(died.set)
        prompts = random_prompts((5, 33), VOCAB)
        assert generate(runner, prompts, together(2, 4), 4) == expected("llama", prompts, 4)
        (prompt,) = random_prompts((1500,), VOCAB)
        runner.submit(StepPlan(7, (Chunk(0, prompt, 0, ((0, 94),)),)))
        os.kill(ranks.pids[victim], number)
        began = monotonic()
        with pytest.raises(Internal, match="rank"):
            runner.collect()
            # That step may have ended before the signal came.
            for later in count(8):
                runner.submit(StepPlan(later, ()))
                runner.collect()
        assert monotonic() - began < STEP_S / 2
        assert died.wait(PATIENCE_S)
        with pytest.raises(Internal, match="died"):
            runner.submit(StepPlan(0, ()))
    finally:
        runner.close()
    assert all(0 <= done <= total for done, total in seen)


def test_a_refusal_names_its_field_and_leaves_no_process(saved: Callable[[str], Path]) -> None:
    ranks = RankProcesses(3, 1)
    with pytest.raises(InvalidArgument, match="num_attention_heads 4") as refused:
        RankedRunner.open(ranks, EngineConfig(str(saved("llama")), threads=1))
    assert refused.value.field == "tensor_parallel"
    for pid in ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
