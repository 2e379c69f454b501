"""A worker and its ranks end together, and nothing of them stays."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from batonlm.core.scheduler.plan import StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks.processes import RankProcesses
from batonlm.engine.ranks.runner import RankedRunner
from tests.engine.tiny_models import save_tiny_model
from tests.services.worker.pair import until
from tests.services.worker.processes import Process, worker
from tests.services.worker.test_degrees import REAL, SMALL, STAGED

pytestmark = pytest.mark.chaos


class Ranked:
    """A serving worker and its ranks."""

    def __init__(self, worker: Process) -> None:
        self.worker = worker
        own = psutil.Process(worker.process.pid)
        self.ranks = [
            child for child in own.children() if "batonlm.engine.ranks" in child.cmdline()
        ]

    def alive(self) -> list[psutil.Process]:
        return [rank for rank in self.ranks if rank.is_running() and rank.status() != "zombie"]


@pytest.fixture
async def ranked(tmp_path: Path) -> AsyncIterator[Ranked]:
    folder = save_tiny_model("llama", tmp_path / "m")
    async with worker("batonlm.decode", folder, *SMALL, *STAGED, **REAL) as process:
        yield Ranked(process)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
async def test_ranks_end_with_their_worker(ranked: Ranked, number: signal.Signals) -> None:
    """Also one that is stopped, where nobody tells them. They listen to nobody but each other."""
    assert len(ranked.ranks) == 4
    listening = [
        connection.laddr.ip
        for rank in ranked.ranks
        for connection in rank.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    if number == signal.SIGKILL:
        ranked.ranks[1].suspend()
    ranked.worker.process.send_signal(number)
    await ranked.worker.exit_code()
    await until(lambda: not ranked.alive())


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
async def test_a_worker_ends_with_any_of_its_ranks(ranked: Ranked, rank: int) -> None:
    """Though it is idle, and nothing waits for the rank."""
    ranked.ranks[rank].kill()
    assert await ranked.worker.exit_code() == 1
    await until(lambda: not ranked.alive())


def test_ranks_leave_signals_to_their_worker(tmp_path: Path) -> None:
    """Ctrl-C in a terminal goes to both, and so does the end of a systemd unit: the worker drains,
    which takes steps."""
    folder = save_tiny_model("llama", tmp_path / "m")
    ranks = RankProcesses(2, 1)
    runner = RankedRunner.open(ranks, EngineConfig(str(folder), device="cpu", threads=1))
    try:
        for pid in ranks.pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        runner.submit(StepPlan(1, ()))
        assert runner.collect().step == 1
    finally:
        runner.close()
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids)
