"""Ranks on two machines of a Ray cluster, whose ports take a token: tokens as of one rank, and the
end of all with any part that Ray has started."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from batonlm.cli.ports import free_ports
from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.scheduler.plan import Chunk, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks.machines import RankMachines
from batonlm.engine.ranks.runner import RankedRunner
from batonlm.engine.ranks.tcp import key_of
from batonlm.worker.placement import RayLauncher
from tests.engine.driving import generate, random_prompts, together
from tests.engine.machines import (
    HERE,
    THERE,
    TOKEN,
    SecondMachine,
    needs_root,
    ranks_below,
    second_machine,
)
from tests.engine.test_parity import expected
from tests.engine.tiny_models import VOCAB

pytest.importorskip("ray", reason="the extra ray is not installed")

pytestmark = [pytest.mark.deep, needs_root, pytest.mark.timeout(600)]

PATIENCE_S = 120.0
SMALL = ("--object-store-memory", "80000000", "--block")


@dataclass
class Cluster:
    """A head here, on which nothing can be placed, and a node on the second machine. `node` is the
    latter's process."""

    address: str
    node: subprocess.Popen[bytes]

    def open(self, folder: Path, address: str = "auto") -> tuple[RankedRunner, RayLauncher]:
        """2 x 2 ranks: a stage here, a stage where Ray puts it."""
        (port,) = free_ports(1)
        launcher = RayLauncher(address, TOKEN, "cpu")
        ranks = RankMachines(
            2, 1, stages=2, machines=2, listen=(HERE, port), key=key_of(TOKEN, ""),
            launcher=launcher,
        )  # fmt: skip
        config = EngineConfig(str(folder), device="cpu", num_blocks=128, threads=1)
        return RankedRunner.open(ranks, config), launcher

    def ranks_there(self) -> list[psutil.Process]:
        return ranks_below(self.node)

    def actor_there(self) -> psutil.Process:
        (rank, *_) = self.ranks_there()
        actor = rank.parent()
        assert actor is not None
        return actor


@pytest.fixture
def machine() -> Iterator[SecondMachine]:
    with second_machine() as made:
        yield made


@pytest.fixture
def cluster(
    machine: SecondMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Its processes are below two of our own, and end with them."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    port = str(free_ports(1)[0])
    address = f"{HERE}:{port}"
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start", *SMALL)
    with ExitStack() as ends:
        _start_node(
            ends,
            tmp_path / "head.log",
            *ray,
            *("--head", "--node-ip-address", HERE, "--port", port, "--include-dashboard=false"),
            *("--num-cpus", "0", "--disable-usage-stats"),
            # Names of sockets in it must be short.
            *("--temp-dir", str(_short(ends, tmp_path))),
        )
        node = _start_node(
            ends,
            tmp_path / "node.log",
            *("ip", "netns", "exec", machine.namespace),
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *ray,
            *("--address", address, "--node-ip-address", THERE, "--num-cpus", "2"),
        )
        # The worker's machine is a node, the head's, for "auto".
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield Cluster(address, node)


@pytest.mark.parametrize("address", ["", "auto"])
def test_ray_places_a_machine_and_tokens_are_the_same(
    address: str, cluster: Cluster, saved: Callable[[str], Path]
) -> None:
    """Whether or not the worker's machine becomes a node of its own."""
    runner, launcher = cluster.open(saved("llama"), address or cluster.address)
    try:
        prompts = random_prompts((5, 33), VOCAB)
        assert generate(runner, prompts, together(2, 4), 4) == expected("llama", prompts, 4)
        launcher.check()
        assert launcher.placed is not None
        assert launcher.placed.nodes == (THERE,)
        there = cluster.ranks_there()
        assert len(there) == 2
    finally:
        runner.close()
    _all_end(there)


@pytest.mark.parametrize("victim", ["actor", "rank", "node", "driver"])
def test_all_end_with_any_part(victim: str, cluster: Cluster, saved: Callable[[str], Path]) -> None:
    runner, launcher = cluster.open(saved("llama"))
    try:
        died = threading.Event()
        runner.on_death(died.set)
        there = cluster.ranks_there()
        (prompt,) = random_prompts((1500,), VOCAB)
        runner.submit(StepPlan(7, (Chunk(0, prompt, 0, ((0, 94),)),)))
        if victim == "actor":
            cluster.actor_there().kill()
        elif victim == "rank":
            there[1].kill()
        elif victim == "node":
            cluster.node.kill()
        else:
            (driver,) = launcher.pids
            os.kill(driver, 9)
        with pytest.raises(Internal, match="rank"):
            for number in count(8):
                runner.submit(StepPlan(number, ()))
                runner.collect()
        assert died.wait(PATIENCE_S)
    finally:
        runner.close()
    _all_end(there)


def test_a_cluster_that_takes_another_token_is_refused_by_name(
    cluster: Cluster, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with pytest.raises(InvalidArgument, match="no Ray cluster") as refused:
        cluster.open(saved("llama"))
    assert refused.value.field == "ray_address"


def _start_node(ends: ExitStack, log: Path, *command: str) -> subprocess.Popen[bytes]:
    """Ray gives a node half a minute to start, which a busy machine may exceed: then again."""
    end = monotonic() + PATIENCE_S
    while True:
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out)
        ends.callback(_end, process)
        while process.poll() is None:
            if b"Ray runtime started" in log.read_bytes():
                return process
            sleep(0.1)
        assert monotonic() < end, "Ray's node does not start"


def _all_end(processes: list[psutil.Process]) -> None:
    """Nobody may have waited for them yet: Ray's own processes ended, too."""
    end = monotonic() + PATIENCE_S
    while any(_runs(process) for process in processes):
        assert monotonic() < end
        sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all processes below it, which Ray would leave a while."""
    below: list[psutil.Process] = []
    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    process.wait()
    for child in below:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(below, PATIENCE_S)


def _short(ends: ExitStack, folder: Path) -> Path:
    """A short name of a folder."""
    link = Path(f"/tmp/ray{os.getpid()}")
    # Of a process that was killed and had the same id.
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    ends.callback(link.unlink)
    return link
