"""`baton doctor`: checks this machine, a model and a running Baton, and gives advice."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from batonlm.cli import access, checks, doctor_cluster, gpu_checks, state
from batonlm.cli.checks import Finding, fail, ok
from batonlm.cli.kv import command as kv
from batonlm.rpc.address import split

SERVICE = "baton.v1.Inference"
HEALTH_TIMEOUT_S = 5.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor")
    parser.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    parser.add_argument(
        "--grpc", metavar="HOST:PORT", help="a running Baton (default: where `baton up` runs)"
    )
    access.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    about = parser.add_subparsers(dest="about", metavar="WHAT")
    kv.add_parser(about)
    gpu_checks.add_parser(about)
    doctor_cluster.add_parser(about)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a check failed, else 0. Raises InvalidArgument."""
    if args.about == "kv":
        return kv.run(args)
    if args.about == "gpu":
        return gpu_checks.run(args)
    if args.about == "cluster":
        return doctor_cluster.run(args)
    if args.grpc:
        split(args.grpc, "grpc")
    table: dict[str, Callable[[], Finding]] = {
        "python": checks.python,
        "torch": checks.torch,
        "transformers": checks.transformers,
        "nixl": checks.nixl,
        "gpu": checks.gpu,
        "shared memory": checks.shared_memory,
        "open files": checks.open_files,
        "model": checks.model(args.model),
        "baton": lambda: running(access.access_of(args, "")),
    }
    return checks.report(table.items(), as_json=args.json)


def running(there: access.Access) -> Finding:
    """Checks whether a Baton answers, and accepts the key if there is one. It is no fault if none
    runs, unless an address was given.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from batonlm.v1.inference_pb2 import ListModelsRequest
    from batonlm.v1.inference_pb2_grpc import InferenceStub

    where = there.address
    if not where:
        return ok("none runs here; 'baton up' starts one")
    with there.channel() as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=HEALTH_TIMEOUT_S
            )
        except grpc.RpcError:
            tls = "over TLS" if there.ca is not None else "in plain text (--ca or --tls: TLS)"
            return fail(f"no Baton answers at {where} {tls}", "start it with 'baton up'")
        try:
            if there.key:
                InferenceStub(channel).ListModels(
                    ListModelsRequest(), timeout=HEALTH_TIMEOUT_S, metadata=there.metadata
                )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return fail(f"{where} does not know this API key", "see 'baton keys list'")
            return fail(f"{where} answers health only", f"see {state.log_file()}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return fail(
            f"{where} is up but not ready",
            f"wait for its workers to load, or see why they do not: {state.log_file()}",
        )
    return ok(f"serving at {where}")
