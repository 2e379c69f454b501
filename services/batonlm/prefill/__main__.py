"""Starts a prefill worker: reads the configuration, wires, serves."""

from __future__ import annotations

import sys
from dataclasses import replace

from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy
from batonlm.prefill.service import PrefillService, PrefillServicer
from batonlm.rpc.config import load
from batonlm.rpc.lifecycle import run
from batonlm.rpc.server import Service
from batonlm.transfer.staging import NO_FAULTS, Faults
from batonlm.v1 import prefill_pb2_grpc
from batonlm.worker.engine import OpenRunner, open_runner
from batonlm.worker.options import PrefillConfig, WorkerOptions
from batonlm.worker.process import WorkerParts, run_worker

BATCH_WINDOW_S = 0.002
"""Longest wait for a fuller batch, in seconds."""

TURN_TOKENS = 512
"""The quantum of fair queueing: prompt tokens of a tenant per turn, times the tenant's weight."""


def main() -> int:
    return serve(load(PrefillConfig, prog="baton-prefill"))


def serve(
    config: PrefillConfig, open_runner: OpenRunner = open_runner, faults: Faults = NO_FAULTS
) -> int:
    """Runs the worker until it is stopped. Returns the exit code. For the parameters see
    `run_worker`."""

    def policy(settled: WorkerOptions) -> SchedulerPolicy:
        return replace(
            PREFILL,
            token_budget=settled.step_tokens,
            batch_window_s=BATCH_WINDOW_S,
            limit=settled.queue_limit,
            quantum=TURN_TOKENS,
        )

    def service(parts: WorkerParts) -> tuple[PrefillService, Service]:
        made = PrefillService(
            parts.engine,
            parts.sender,
            parts.receiver,
            parts.grammars,
            tracer=parts.tracer,
            tiers=parts.tiers,
        )
        servicer = PrefillServicer(made, parts.identity.instance_id)
        return made, Service(
            "baton.v1.Prefill",
            lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server),
        )

    return run(run_worker("prefill", config, policy, service, open_runner, faults))


if __name__ == "__main__":
    sys.exit(main())
