"""Plays recorded traffic to a Baton on the cluster of KUBECONFIG, three times: the planner sizes
its engine pools, HPAs do, or nobody does.

    python scripts/sizes_on_cluster.py --trace azure_2023_conv.csv --json cluster-sizes.json

Sizes are what is compared, so steps of its workers only take their time (`batonlm.testing.worker`)
and a worker costs next to no CPU: routers, hand-overs, planner, HPA controller and pods are real.
A run is a day in minutes; the HPA's five minutes and the planner's cool-down shrink with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import pi, sin
from pathlib import Path
from random import Random
from typing import Any

from baton_loadtest import report, traces
from baton_loadtest.drive import (
    ORDINARY,
    REFUSED,
    HttpLoadClient,
    LoadLimits,
    OpenLoop,
    Piece,
    Run,
    Session,
    TokenIds,
    Turn,
    Workload,
)
from baton_loadtest.report import Result
from batonlm.cli.access import Access

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.k8s.cluster import Cluster, Failed
from tests.k8s.conftest import CPU_IMAGE, ENGINE_IMAGE
from tests.k8s.reach import reached
from tests.k8s.release import Release

POOLS = ("prefill", "decode")
MODEL_LEN = 2048
"""Of the fake runner: longer requests of the trace are left out."""
STEP_MS = {"prefill": (10.0, 2.0), "decode": (40.0, 0.0)}
"""A step, and each token in it."""
RUNNING = 4
"""Sequences of a decode worker: few, so that a rate that two cores can carry takes several."""
LENGTHS = 0.5
"""Times the trace's tokens."""
FIRST_TOKEN_S, BETWEEN_TOKENS_S = 2.0, 0.1
STARTUP_S = 10.0
POLL_S = 2.0
REST_S = 60.0
SETTINGS = {
    "decode.config.max_running": str(RUNNING),
    "router.config.target_first_token_ms": f"{1000 * FIRST_TOKEN_S:.0f}",
    "router.config.target_between_tokens_ms": f"{1000 * BETWEEN_TOKENS_S:.0f}",
    "router.config.target_startup_s": f"{STARTUP_S:.0f}",
}
SETTLE_S = 180.0

_SCRIPT = """#!/opt/baton/bin/python
import sys
from batonlm.testing.worker import main
sys.exit(main("{role}", ["--fake-step-ms", "{step_ms}", "--fake-token-ms", "{token_ms}"]))
"""
"""In place of a worker's command."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="recorded traffic")
    add("--json", type=Path, help="write the figures here")
    add("--seconds", type=float, default=210.0, help="of traffic, which stand for a day")
    add("--rate", type=float, default=1.1, help="requests a second, on average")
    add("--swing", type=float, default=0.8, help="share of it by which the rate rises and falls")
    add("--most", type=int, default=5, help="workers of each pool")
    add(
        "--hpa-window-s", type=float, default=60.0, help="of its scaling down; Kubernetes' own: 300"
    )
    add("--cool-down-s", type=float, default=24.0, help="of the planner; its own: 120")
    add("--only", choices=("planner", "HPA", "fixed"), action="append", help="default: all three")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    work = workload(args)
    print(f"{work.requests} requests in {work.seconds:.0f} s, thrice", file=sys.stderr)
    results = [Result("requests", work.requests, "")]
    found: dict[str, Day] = {}
    with released(STEP_MS, SETTINGS) as release:
        for name in args.only or ("planner", "HPA", "fixed"):
            found[name] = asyncio.run(day(release, name, work, args))
            results += found[name].results(name)
            print(report.table(found[name].results(name)))
    if {"planner", "HPA"} <= found.keys():
        planner, hpa = found["planner"], found["HPA"]
        results.append(
            report.compared(
                "replica-seconds of the planner, against the HPA's",
                planner.replica_s, "s", hpa.replica_s,
            )
        )  # fmt: skip
    print(report.table(results))
    if args.json:
        report.write(args.json, args.seed, results)


def workload(args: argparse.Namespace) -> Workload:
    """The trace, thinned to a rate that rises once and falls again."""
    recorded = sorted(traces.read(args.trace).requests, key=lambda one: one.at_s)
    began, draw = recorded[0].at_s, Random(f"sizes {args.seed}")
    usual = len(recorded) / (recorded[-1].at_s - began)
    sessions: list[Session] = []
    for one in recorded:
        at_s = one.at_s - began
        lengths = (one.prompt_tokens, one.output_tokens)
        prompt, output = (max(1, round(LENGTHS * tokens)) for tokens in lengths)
        wanted = args.rate * (1.0 - args.swing * sin(2 * pi * (at_s / args.seconds + 0.25)))
        if at_s >= args.seconds:
            break
        if draw.random() < wanted / usual and prompt + output < MODEL_LEN:
            turn = Turn((Piece(str(len(sessions)), prompt),), output)
            sessions.append(Session(at_s, (turn,)))
    return Workload(tuple(sessions), args.seconds)


@contextmanager
def released(
    step_ms: Mapping[str, tuple[float, float]], settings: Mapping[str, str]
) -> Iterator[Release]:
    """A Baton in a namespace of its own, both gone afterwards. step_ms: of a worker of each role, a
    step and each token in it. settings: values of the chart."""
    cluster = Cluster(f"baton-sizes-{secrets.token_hex(3)}")
    cluster.run("kubectl", "create", "namespace", cluster.namespace)
    try:
        scripts = {
            f"baton-{role}": _SCRIPT.format(role=role, step_ms=step, token_ms=token)
            for role, (step, token) in step_ms.items()
        }
        body = {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fake"}, "data": scripts,
        }  # fmt: skip
        cluster.kubectl("create", "-f", "-", text=json.dumps(body))
        values = {key: value for role in step_ms for key, value in _faked(role).items()}
        release = Release(cluster, CPU_IMAGE, ENGINE_IMAGE, values={**values, **settings})
        try:
            release.install()
            yield release
        finally:
            # Not all of it is in the namespace, whose end an APIService without a server holds up.
            release.uninstall()
    finally:
        cluster.run("kubectl", "delete", "namespace", cluster.namespace, "--wait=false")


def _faked(role: str) -> dict[str, str]:
    """The values with which a role's pods run the script in place of their command."""
    found = {
        "config.transport": "nixl",
        "extraVolumes[0].name": "fake",
        "extraVolumes[0].configMap.name": "fake",
        "extraVolumes[0].configMap.defaultMode": "365",
        "extraVolumeMounts[0].name": "fake",
        "extraVolumeMounts[0].mountPath": f"/opt/baton/bin/baton-{role}",
        "extraVolumeMounts[0].subPath": f"baton-{role}",
        "resources.requests.memory": "128Mi",
        "resources.requests.cpu": "20m",
    }
    return {f"{role}.{key}": value for key, value in found.items()}


def scaled_by(name: str, args: argparse.Namespace, replicas: int = 1) -> dict[str, str]:
    """The values of a way to choose sizes; replicas: where nobody does."""
    planner, hpa = name == "planner", name == "HPA"
    found = {
        "planner.enabled": str(planner or hpa).lower(),
        "planner.image.repository": CPU_IMAGE.rpartition(":")[0],
        "planner.image.tag": CPU_IMAGE.rpartition(":")[2],
        "planner.externalMetrics": str(hpa).lower(),
        "planner.coolDownSeconds": f"{args.cool_down_s:g}",
    }
    for role in POOLS:
        autoscaling = f"{role}.autoscaling"
        found |= {
            f"{role}.replicaCount": str(replicas),
            f"planner.scale.{role}.enabled": str(planner).lower(),
            f"planner.scale.{role}.maxReplicas": str(args.most),
            f"{autoscaling}.enabled": str(hpa).lower(),
            f"{autoscaling}.minReplicas": "1",
            f"{autoscaling}.maxReplicas": str(args.most),
            f"{autoscaling}.behavior.scaleDown.stabilizationWindowSeconds": (
                f"{args.hpa_window_s:.0f}"
            ),
        }
    return found


@dataclass(frozen=True, slots=True)
class Day:
    """What became of the traffic with one way to choose sizes."""

    run: Run
    replica_s: float
    """Of both pools; pods that start and that leave count."""
    changes: int
    """Of a pool's size as its Deployment is told."""
    seconds: float
    most: dict[str, int]

    def results(self, name: str) -> list[Result]:
        samples = self.run.samples
        firsts = [s.first_s - s.due_s for s in samples if s.tokens]
        betweens = [s.between_s for s in samples if s.tokens > 1]

        def share(count: int) -> float:
            return 100 * count / len(samples)

        met = sum(s.meets(FIRST_TOKEN_S, BETWEEN_TOKENS_S) for s in samples)
        refused = sum(s.end == REFUSED for s in samples)
        failed = sum(not s.tokens for s in samples) - refused
        return [
            Result(f"{name}: requests within the targets", share(met), "%"),
            Result(f"{name}: refused", share(refused), "%"),
            Result(f"{name}: failed", share(failed), "%"),
            Result(f"{name}: first token, p90", report.quantile(firsts, 0.9), "s"),
            Result(f"{name}: between tokens, p90", 1000 * report.quantile(betweens, 0.9), "ms"),
            Result(f"{name}: replica-seconds", self.replica_s, "s"),
            Result(f"{name}: replicas, mean", self.replica_s / self.seconds, ""),
            *(Result(f"{name}: most that {role}", most, "") for role, most in self.most.items()),
            Result(f"{name}: changes of a size", self.changes, ""),
        ]


async def day(release: Release, name: str, work: Workload, args: argparse.Namespace) -> Day:
    replicas = args.most if name == "fixed" else 1
    # Before anybody scales: a planner would keep a size that it saw being set by hand.
    await asyncio.to_thread(release.upgrade, scaled_by("fixed", args, replicas))
    await settled(release, dict.fromkeys(POOLS, replicas))
    if name != "fixed":
        await asyncio.to_thread(release.upgrade, scaled_by(name, args))
    async with reached(release) as (_, http), counted(release) as count:
        client = HttpLoadClient(Access(http))
        limits = LoadLimits(request_s=60.0, rest_s=REST_S)
        try:
            run = await OpenLoop(client, TokenIds(args.seed, *ORDINARY), limits).run(work)
        finally:
            await client.close()
    return Day(run, count.replica_s, count.changes, count.seconds, count.most)


async def settled(release: Release, replicas: Mapping[str, int]) -> None:
    """Returns when each pool has so many pods, and all are ready. Raises Failed."""
    for role, number in replicas.items():
        await asyncio.to_thread(release.scale, role, number)
    until = time.monotonic() + SETTLE_S
    while any(len(release.pods(role)) != number for role, number in replicas.items()):
        if time.monotonic() > until:
            raise Failed("the pools do not come to rest")
        await asyncio.sleep(POLL_S)


class Count:
    """Pods of the engine pools, over time."""

    def __init__(self) -> None:
        self.replica_s = self.seconds = 0.0
        self.changes = 0
        self.most = dict.fromkeys(POOLS, 0)
        self._told: dict[str, int] = {}

    def add(self, passed_s: float, pods: dict[str, int], told: dict[str, int]) -> None:
        """pods: that exist. told: what each Deployment is to have."""
        self.seconds += passed_s
        self.replica_s += passed_s * sum(pods.values())
        for role in POOLS:
            self.changes += role in self._told and self._told[role] != told[role]
            self.most[role] = max(self.most[role], told[role])
        self._told = told


@asynccontextmanager
async def counted(release: Release) -> AsyncIterator[Count]:
    """Counts while the block runs."""
    count = Count()

    async def poll() -> None:
        before = time.monotonic()
        while True:
            found = await asyncio.to_thread(release.cluster.get, "pods,deployments")
            now = time.monotonic()
            count.add(now - before, *sizes(found["items"]))
            before = now
            await asyncio.sleep(POLL_S)

    polling = asyncio.create_task(poll())
    try:
        yield count
    finally:
        polling.cancel()
        done = await asyncio.gather(polling, return_exceptions=True)
        if isinstance(done[0], Exception):
            raise done[0]


def sizes(items: Sequence[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """The pods of each pool, and what its Deployment is told."""
    pods, told = dict.fromkeys(POOLS, 0), dict.fromkeys(POOLS, 0)
    for item in items:
        role = item["metadata"]["labels"].get("app.kubernetes.io/component")
        if role not in POOLS:
            continue
        if item["kind"] == "Deployment":
            told[role] = item["spec"]["replicas"]
        else:
            pods[role] += item["status"]["phase"] in ("Pending", "Running")
    return pods, told


if __name__ == "__main__":
    main()
