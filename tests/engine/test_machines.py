"""Ranks on two machines, joined by a cable: the same tokens, and the end of all with any part."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from subprocess import Popen
from time import monotonic

import psutil
import pytest

from batonlm.cli.ports import free_ports
from batonlm.core.errors import Internal
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks.machines import Elsewhere, RankMachines
from batonlm.engine.ranks.runner import STEP_S, RankedRunner
from batonlm.engine.ranks.tcp import key_of
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import fill, generate, packed, random_prompts, scattered, together
from tests.engine.machines import (
    HERE,
    TOKEN,
    SecondMachine,
    needs_root,
    ranks_below,
    second_machine,
)
from tests.engine.test_parity import expected
from tests.engine.tiny_models import VOCAB

# A test waits while another process has the second machine.
pytestmark = [pytest.mark.deep, pytest.mark.timeout(900), needs_root]

PATIENCE_S = 120.0
BLOCKS = 6


@pytest.fixture
def machine() -> Iterator[SecondMachine]:
    with second_machine() as made:
        yield made


class Pair:
    """2 x 2 ranks: a stage here, a stage there."""

    def __init__(self, folder: Path, machine: SecondMachine):
        (port,) = free_ports(1)
        self.there: Popen[bytes] = machine.start(f"{HERE}:{port}")
        try:
            self.ranks = RankMachines(
                2,
                1,
                stages=2,
                machines=2,
                listen=(HERE, port),
                key=key_of(TOKEN, ""),
                launcher=Elsewhere(),
            )
            config = EngineConfig(str(folder), device="cpu", num_blocks=128, threads=1)
            self.runner = RankedRunner.open(self.ranks, config)
            self.all = [*map(psutil.Process, self.ranks.pids), *ranks_below(self.there)]
            assert len(self.all) == 4
        except BaseException:
            self.there.kill()
            self.there.wait()
            raise

    def close(self) -> None:
        self.runner.close()
        assert self.there.wait(PATIENCE_S) == 1
        _, alive = psutil.wait_procs(self.all, PATIENCE_S)
        assert not alive


@pytest.mark.parametrize("arch", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_tokens_and_kv_of_two_machines(
    arch: str, machine: SecondMachine, saved: Callable[[str], Path]
) -> None:
    """Of heads, which ranks share out, and of latents, which each rank of a stage has whole."""
    pair, one = (
        Pair(saved(arch), machine),
        TorchRunner.load(EngineConfig(str(saved(arch)), device="cpu", num_blocks=64)),
    )
    try:
        several, prompts = pair.runner, random_prompts((5, 33, 70), VOCAB)
        wanted = expected(arch, prompts, 4)
        here, there = together(len(prompts), BLOCKS), scattered(len(prompts), BLOCKS)
        assert several.layout == one.layout
        assert generate(several, prompts, there, 4) == wanted
        for sender, taker in ((several, one), (one, several)):
            for prompt, source, target in zip(prompts, here, there, strict=True):
                count = min(40, len(prompt) - 1)
                fill(sender, prompt[:count], source)
                taker.unpack(target, 0, count, memoryview(packed(sender, source, 0, count)))
            assert generate(taker, prompts, there, 4, start=40) == wanted
        listening = {
            connection.laddr.ip
            for rank in pair.all[:2]
            for connection in rank.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {HERE}
        # The token is in the environment of the process that joins, and no rank needs it.
        assert not any(name.startswith("BATON_") for rank in pair.all for name in rank.environ())
    finally:
        pair.close()
        one.close()


@pytest.mark.parametrize(
    "victim",
    [
        *("rank 3", "cable"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("rank 0", "machine", "hangs")),
    ],
)
def test_all_end_with_any_part(
    victim: str, machine: SecondMachine, saved: Callable[[str], Path]
) -> None:
    """While steps run. A part that dies is noticed at once, a cut after LOST_S, and a rank that
    hangs after SILENCE_S: long before a step's own time is over."""
    pair = Pair(saved("llama"), machine)
    try:
        died = threading.Event()
        pair.runner.on_death(died.set)
        (prompt,) = random_prompts((1500,), VOCAB)
        pair.runner.submit(StepPlan(7, (Chunk(0, prompt, 0, ((0, 94),)),)))
        began = monotonic()
        if victim == "machine":
            pair.there.kill()
        elif victim == "cable":
            machine.cut()
        elif victim == "hangs":
            pair.all[3].send_signal(signal.SIGSTOP)
        else:
            os.kill(pair.all[int(victim[-1])].pid, signal.SIGKILL)
        with pytest.raises(Internal, match="rank"):
            for number in count(8):
                pair.runner.submit(StepPlan(number, ()))
                pair.runner.collect()
        assert died.wait(PATIENCE_S)
        assert monotonic() - began < STEP_S / 2
    finally:
        pair.runner.close()
        # Its ranks end by themselves, though the worker cannot reach them any more.
        pair.there.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(pair.all, PATIENCE_S)
        assert not alive
