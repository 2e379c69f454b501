"""Starts a decode worker: reads the configuration, wires, serves."""

from __future__ import annotations

import sys

from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.decode.service import DecodeService
from batonlm.decode.servicer import DecodeServicer
from batonlm.rpc import metrics
from batonlm.rpc.config import load
from batonlm.rpc.lifecycle import run
from batonlm.rpc.server import Service
from batonlm.transfer.staging import NO_FAULTS, Faults
from batonlm.v1 import decode_pb2_grpc
from batonlm.worker.engine import OpenRunner, open_runner
from batonlm.worker.options import DecodeConfig, WorkerOptions
from batonlm.worker.process import WorkerParts, run_worker


def main() -> int:
    return serve(load(DecodeConfig, prog="baton-decode"))


def serve(
    config: DecodeConfig, open_runner: OpenRunner = open_runner, faults: Faults = NO_FAULTS
) -> int:
    """Runs the worker until it is stopped. Returns the exit code. For the parameters see
    `run_worker`."""

    def policy(settled: WorkerOptions) -> SchedulerPolicy:
        assert isinstance(settled, DecodeConfig)
        return settled.policy

    def service(parts: WorkerParts) -> tuple[DecodeService, Service]:
        made = DecodeService(
            parts.engine,
            parts.sender,
            parts.receiver,
            parts.grammars,
            orphan_s=config.orphan_s,
            tracer=parts.tracer,
            tiers=parts.tiers,
        )
        metrics.gauge(metrics.ORPHANS, lambda: {(): made.num_orphans})
        metrics.gauge(metrics.STREAMS, lambda: {("decode",): len(made.sessions)})
        servicer = DecodeServicer(made, parts.engine, parts.identity)
        return made, Service(
            "baton.v1.Decode",
            lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server),
        )

    return run(run_worker("decode", config, policy, service, open_runner, faults))


if __name__ == "__main__":
    sys.exit(main())
