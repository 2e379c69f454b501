"""`baton bench ranks`: a model on several ranks, and the cost of their machinery.

The machinery is what a step takes beside computing: plans are encoded, sent, decoded and checked,
results come back. It is measured with steps that compute nothing, and with decode steps of a model
in one rank against the same runner without ranks. All contenders are open at once and take turns.
Of ranks on two machines the second one is this machine, too: what is measured of them is TCP on
loopback in place of pairs of sockets, without a network's own time.
On a machine with fewer cores than ranks, more ranks are slower: what is shown there is that they
work and what they cost, not what they gain.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import count
from statistics import median
from typing import Any

from baton_loadtest.bench import engines
from baton_loadtest.bench.engines import BLOCK_SIZE, StepTimer
from baton_loadtest.bench.options import engine, option
from baton_loadtest.child import progress
from baton_loadtest.launch import call
from baton_loadtest.report import Report, Result, at_most
from batonlm.core.scheduler.plan import ModelRunner, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.ranks.machines import Elsewhere, RankMachines
from batonlm.engine.ranks.processes import RankProcesses
from batonlm.engine.ranks.runner import RankedRunner
from batonlm.engine.ranks.tcp import key_of

PLOTS = False
OPTIONS = (
    *engine(threads=2, shape="8m"),
    option(
        "--degrees", ("1x1", "2x1", "4x1", "2x2", "2x2@2"), "ranks of a stage x stages @ machines"
    ),
    option("--batches", (1, 16, 64)),
    option("--context", 128, "positions"),
    option("--rounds", 20, "in which the contenders take turns"),
)
DEADLINE_S = 900.0
MACHINERY_MS = 1.0
EMPTY_STEPS = 50
"""Of each contender in a round."""
ALONE = "no ranks"
HOST = "127.0.0.1"


def measure(args: argparse.Namespace) -> Report:
    """Raises ContenderFailed if the engine cannot run."""
    job = {
        "model": str(engines.folder(args.shape)),
        "degrees": args.degrees,
        "batches": args.batches,
        "context": args.context,
        "rounds": args.rounds,
    }
    found = call(run_ranks, job, threads=args.threads, deadline_s=DEADLINE_S)
    return Report(results(found, args.batches))


def results(found: dict[str, Any], batches: tuple[int, ...]) -> list[Result]:
    """found: see `run_ranks`."""
    rows = [
        at_most(f"a step without work, {degree}", 1000 * seconds, "ms", MACHINERY_MS)
        for degree, seconds in found["empty"].items()
    ]
    for degree, seconds in found["empty"].items():
        if (near := degree.partition("@")[0]) != degree and near in found["empty"]:
            added = 1000 * (seconds - found["empty"][near])
            rows.append(at_most(f"added by TCP to a step, {degree}", added, "ms", MACHINERY_MS))
    for batch in batches:
        steps = found["decode"][str(batch)]
        alone = steps[ALONE]
        rows += [
            Result(f"decode step, batch {batch}, {degree}", 1000 * seconds, "ms", 1000 * alone)
            for degree, seconds in steps.items()
        ]
        if "1x1" in steps:
            added = 1000 * (steps["1x1"] - alone)
            rows.append(at_most(f"added by one rank, batch {batch}", added, "ms", MACHINERY_MS))
    return rows


def run_ranks(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, degrees, batches, context, rounds.

    Returns in seconds: empty by degree, the median of all steps without work; decode by batch and
    degree, the median over rounds of a round's best steps.
    """
    positions = max(job["batches"]) * (job["context"] + 2 * BLOCK_SIZE)
    with ExitStack() as ends:
        timers: dict[str, StepTimer] = {}
        for degree in (ALONE, *job["degrees"]):
            runner: ModelRunner
            if degree == ALONE:
                runner = engines.open_runner(job["model"], 1, positions)
                ends.callback(runner.close)
            else:
                runner = open_ranks(job["model"], degree, positions, ends)
            timers[degree] = StepTimer(runner)
            progress(f"{degree} is open")
        empty: dict[str, list[float]] = {degree: [] for degree in job["degrees"]}
        decode: dict[str, dict[str, list[float]]] = {
            str(batch): {degree: [] for degree in timers} for batch in job["batches"]
        }
        for _ in range(job["rounds"]):
            for degree, timer in timers.items():
                if degree in empty:
                    empty[degree] += _empty_steps(timer.runner)
                for batch in job["batches"]:
                    best = timer.decode(batch, job["context"], seconds=0.0)
                    decode[str(batch)][degree].append(best)
    return {
        "empty": {degree: median(times) for degree, times in empty.items()},
        "decode": {
            batch: {degree: median(times) for degree, times in by_degree.items()}
            for batch, by_degree in decode.items()
        },
    }


def open_ranks(model: str, degree: str, positions: int, ends: ExitStack) -> RankedRunner:
    """degree: "ranks of a stage x stages @ machines". Each rank has one thread. ends: closes it."""
    shape, _, machines = degree.partition("@")
    tensor, stages = map(int, shape.split("x"))
    config = EngineConfig(
        model=model,
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=-(-positions // BLOCK_SIZE),
        threads=1,
    )
    # What torch has set for this process is not the ranks' business.
    os.environ.pop("OMP_NUM_THREADS", None)
    ranks = (
        _on_machines(tensor, stages, int(machines), ends)
        if machines
        else RankProcesses(tensor, 1, stages=stages)
    )
    runner = RankedRunner.open(ranks, config)
    ends.callback(runner.close)
    return runner


def _on_machines(tensor: int, stages: int, machines: int, ends: ExitStack) -> RankMachines:
    with socket.create_server((HOST, 0)) as held:
        address: tuple[str, int] = held.getsockname()
    token = secrets.token_hex(16)
    for number in range(1, machines):
        joins = ("--leader", f"{HOST}:{address[1]}", "--machine", str(number), "--device", "cpu")
        process = subprocess.Popen(
            [sys.executable, "-m", "batonlm.worker.machine", *joins, "--log-level", "error"],
            env=os.environ | {"BATON_RANKS_TOKEN": token},
        )
        # It ends with the runner, which is closed first.
        ends.callback(process.wait, DEADLINE_S)
    return RankMachines(
        tensor, 1, stages=stages, machines=machines, listen=address, key=key_of(token, ""),
        launcher=Elsewhere(),
    )  # fmt: skip


def _empty_steps(runner: ModelRunner) -> list[float]:
    times = []
    numbers = count(1)
    for _ in range(EMPTY_STEPS):
        began = time.perf_counter()
        runner.submit(StepPlan(next(numbers), ()))
        runner.collect()
        times.append(time.perf_counter() - began)
    return times
