"""A worker with Ray's ranks: Ray is open to nobody else, and nothing of it outlives the worker."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from baton.engine.ranks.ray_ranks import FAMILY
from tests.engine.tiny_models import save_tiny_model
from tests.services.worker.pair import until
from tests.services.worker.processes import Process, worker
from tests.services.worker.test_degrees import RAY, REAL, SMALL

pytestmark = pytest.mark.chaos


@dataclass
class Ranked:
    """A serving worker and all that it has started, Ray's processes and their children."""

    worker: Process
    family: list[psutil.Process]

    @property
    def ranks(self) -> list[psutil.Process]:
        return [child for child in self.family if "RankActor" in child.name()]

    @property
    def environ(self) -> dict[str, str]:
        (server,) = (child for child in self.family if child.name() == "gcs_server")
        return server.environ()

    def alive(self) -> list[psutil.Process]:
        return [c for c in self.family if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
async def ranked(tmp_path: Path) -> AsyncIterator[Ranked]:
    folder = save_tiny_model("llama", tmp_path / "m")
    async with worker("baton.decode", folder, *SMALL, *RAY, **REAL) as process:
        yield Ranked(process, psutil.Process(process.process.pid).children(recursive=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_stays_of_a_worker_that_ends(ranked: Ranked, number: signal.Signals) -> None:
    check_closed_to_others(ranked)
    folder = files(ranked)
    ranked.worker.process.send_signal(number)
    await ranked.worker.exit_code()
    await until(lambda: not ranked.alive() and not folder.exists())


async def test_a_worker_ends_with_a_rank(ranked: Ranked) -> None:
    """Though it is idle, and nothing waits for the rank."""
    folder = files(ranked)
    ranked.ranks[1].kill()
    assert await ranked.worker.exit_code() == 1
    await until(lambda: not ranked.alive() and not folder.exists())


def files(ranked: Ranked) -> Path:
    folder = Path(ranked.environ[FAMILY])
    assert folder.is_dir() and len(ranked.ranks) == 2
    return folder


def check_closed_to_others(ranked: Ranked) -> None:
    """On loopback only, and for those who know the token."""
    listening = [
        (child.name(), connection.laddr.ip)
        for child in ranked.family
        for connection in child.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert all(ip_address(ip.removeprefix("::ffff:")).is_loopback for _, ip in listening), listening
    assert ranked.environ["RAY_AUTH_MODE"] == "token" and ranked.environ["RAY_AUTH_TOKEN"]
