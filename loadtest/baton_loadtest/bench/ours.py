"""The contender that is Baton: the engine behind a decode worker's scheduler, in one process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from baton_loadtest.bench.serving import open_loop, open_runner, policy, positions_for, serve
from baton_loadtest.bench.workload import Workload

MAX_RUNNING = 64


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: model, threads, exact, quantize, step_tokens, workload, warm. Returns a `Served`."""
    workload = Workload.from_json(job["workload"])
    runner = open_runner(
        job["model"],
        job["threads"],
        positions_for(workload, MAX_RUNNING),
        exact=job["exact"],
        quantize=job["quantize"],
    )
    rules = policy(MAX_RUNNING, job["step_tokens"])
    serve(open_loop(runner, rules), Workload.from_json(job["warm"]))
    return asdict(serve(open_loop(runner, rules), workload))
