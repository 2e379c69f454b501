"""Runs open-loop phases against a fleet, the load in a process of its own, and follows its memory.

What `overload` and `fairness` have in common.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cli.layout import Layout
from baton.cli.supervisor import Supervisor
from baton_loadtest.bench.open_loop import END_S, Asked
from baton_loadtest.bench.process import call
from baton_loadtest.report import quantile

ENGINE_CORE, OTHER_CORE = "0", "1"
AT_ONCE = 96
"""Of the closed load that finds out what the fleet can do: more than run at a time."""

WARM_S = 6.0
SEARCH_S = 12.0
SETTLING_S = 3.0
SAMPLE_S = 0.5
VISIBLE_TOKEN = 70
"""A letter in most vocabularies, which every answer is biased to: an answer that begins with half a
character has no text to time, however fast its first token was."""

MIB = 2**20
TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Phase:
    """What one phase asked. rss: the most resident memory of each process meanwhile, in bytes.
    cpu: seconds of CPU that each used. took_s: until the last answer.
    """

    name: str
    seconds: float
    asked: list[Asked]
    rss: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    took_s: float = 1.0

    def goodput(self, args: argparse.Namespace) -> float:
        """Requests answered within their objectives, a second."""
        return sum(one.meets(args.first_s, args.between_s) for one in self.asked) / self.seconds

    def first_token(self, share: float) -> float:
        """Of those that were let in, in seconds."""
        return quantile([one.first_s for one in self.asked if one.whole], share)

    def refusal(self, share: float) -> float:
        return quantile([s for one in self.asked for s in one.refusals_s], share)

    def retry_after(self, share: float) -> float:
        return quantile([s for one in self.asked for s in one.retry_after_s], share)

    def lag(self, share: float) -> float:
        """By which requests left later than they should have."""
        return quantile([one.lag_s for one in self.asked], share)

    def cores(self, role: str) -> float:
        """CPU that all processes of a role used, in cores."""
        return sum(used for name, used in self.cpu.items() if name.startswith(role)) / self.took_s

    def failed(self) -> int:
        """Neither answered in full nor refused."""
        return sum(not one.whole and one.status != 429 for one in self.asked)


class Arrivals:
    """One fleet's load. headers: of each tenant, whole lines."""

    def __init__(
        self,
        args: argparse.Namespace,
        layout: Layout,
        supervisor: Supervisor,
        headers: Sequence[str] = ("",),
    ) -> None:
        self._args = args
        self._supervisor = supervisor
        routers = [spec for spec in layout.processes if spec.role == "router"]
        body = {
            "model": _model(layout),
            "prompt": "PROMPT",
            "max_tokens": args.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "logit_bias": {str(VISIBLE_TOKEN): 100},
            "stream": True,
            "return_token_ids": True,
        }
        self._job = {
            "targets": [router.metrics for router in routers],
            "headers": list(headers),
            "body": json.dumps(body).replace('"PROMPT"', "PROMPT"),
            "prompt_tokens": args.prompt_tokens,
            "seed": args.seed,
        }

    async def capacity(self) -> float:
        """Requests a second that end when there are always more."""
        warm = {"name": "warm up", "seconds": WARM_S, "closed": AT_ONCE}
        search = {"name": "search", "seconds": SEARCH_S, "closed": AT_ONCE}
        _, found = await self.run([warm, search])
        window = [one for one in found.asked if one.whole]
        ends = sorted(one.at + one.took_s for one in window)
        counted = [end for end in ends if SETTLING_S < end <= SEARCH_S]
        return len(counted) / (SEARCH_S - SETTLING_S)

    async def run(self, phases: Sequence[dict[str, Any]]) -> list[Phase]:
        """One phase behind the other. Memory is followed over all of them, and told by phase."""
        found: list[Phase] = []
        for phase in phases:
            job = {**self._job, "phases": [phase], "seed": self._job["seed"] + len(found)}
            deadline_s = phase["seconds"] + END_S + 30
            working = asyncio.create_task(
                asyncio.to_thread(call, "open_loop", job, threads=1, deadline_s=deadline_s)
            )
            rss: dict[str, int] = defaultdict(int)
            began, cpu = time.perf_counter(), self._cpu()
            while not working.done():
                for name, size in self._rss().items():
                    rss[name] = max(rss[name], size)
                await asyncio.wait([working], timeout=SAMPLE_S)
            used = {name: seconds - cpu.get(name, 0.0) for name, seconds in self._cpu().items()}
            took_s = time.perf_counter() - began
            asked = [Asked(**one) for one in working.result()["phases"][0]]
            found.append(Phase(phase["name"], phase["seconds"], asked, dict(rss), used, took_s))
        return found

    def _cpu(self) -> dict[str, float]:
        """Seconds of CPU that each process has used."""
        found = {}
        for index, process in enumerate(self._supervisor.description()["processes"]):
            try:
                stat = Path(f"/proc/{process['pid']}/stat").read_text()
            except OSError:
                continue
            # Behind the name, which may hold anything.
            user, system = stat.rpartition(")")[2].split()[11:13]
            found[f"{process['role']} {index}"] = (int(user) + int(system)) / TICKS_S
        return found

    def _rss(self) -> dict[str, int]:
        """Resident memory of each process now, in bytes."""
        found = {}
        for index, process in enumerate(self._supervisor.description()["processes"]):
            try:
                status = Path(f"/proc/{process['pid']}/status").read_text()
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("VmRSS:"):
                    found[f"{process['role']} {index}"] = int(line.split()[1]) * 1024
        return found


def stream(rate: float, tenant: int = 0, targets: Sequence[int] = (0,)) -> dict[str, Any]:
    """Poisson arrivals of one tenant."""
    return {"rate": rate, "tenant": tenant, "targets": list(targets)}


def _model(layout: Layout) -> str:
    """The name that the workers were told."""
    command = next(spec.command for spec in layout.processes if spec.role == "decode")
    return command[command.index("--model-name") + 1]
