"""Asks running workers for their own speed measurements.

Workers report them in the load messages of Watch, which routers use as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import grpc

from baton_loadtest.simulator.calibration import Calibration
from baton_loadtest.simulator.settings import WorkerFacts
from batonlm.cli.access import peer_token
from batonlm.core.errors import BatonError, InvalidArgument, Unavailable
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerSpeed
from batonlm.rpc.address import split
from batonlm.rpc.channels import Channels
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.options import TlsOptions
from batonlm.rpc.tls import Certificates
from batonlm.rpc.worker import description_from_proto, load_from_proto
from batonlm.v1 import worker_pb2
from batonlm.v1.worker_pb2_grpc import WorkerStub

ASK_S = 5.0
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    address: str
    description: WorkerDescription
    load: WorkerLoad

    @property
    def role(self) -> str:
        return self.description.identity.role


async def ask(
    addresses: Iterable[str], certificates: Certificates | None, token: str = ""
) -> list[MeasuredSpeed]:
    """Asks all workers at once, each within 5 s. Raises BatonError with the address."""
    channels = Channels(certificates, token=token)
    roles = ("",) if certificates is None else ROLES
    try:
        asking = (_ask(channels, address, roles) for address in addresses)
        return list(await asyncio.gather(*asking))
    finally:
        await channels.close()


def speed_of(measured: Sequence[MeasuredSpeed], role: str) -> WorkerSpeed | None:
    """Returns the mean of the measurements of a role's workers; None without such workers. Raises
    Unavailable if one has no measurements yet."""
    speeds = []
    for one in measured:
        if one.role != role:
            continue
        speed = one.load.speed
        if not (speed.prefills if role == "prefill" else speed.decodes):
            raise Unavailable(
                f"{one.address} has measured nothing yet: send it requests first", field="calibrate"
            )
        speeds.append(speed)
    if not speeds:
        return None
    return WorkerSpeed(**{f.name: _mean(f.name, speeds) for f in fields(WorkerSpeed)})


def _mean(name: str, speeds: Sequence[WorkerSpeed]) -> Any:
    """Returns the mean of the workers that measured it. A decode worker that never prefills reports
    0 for prefill, which is not a time."""
    if name == "prefill_step_tokens":
        return min(speed.prefill_step_tokens for speed in speeds)
    return fmean([getattr(speed, name) for speed in speeds if _measured(name, speed)] or [0.0])


def _measured(name: str, speed: WorkerSpeed) -> bool:
    if name in ("link_bytes_per_s", "handover_s"):
        return bool(getattr(speed, name))
    return speed.prefills if name.startswith("prefill") else speed.decodes


async def _ask(channels: Channels, address: str, roles: Sequence[str]) -> MeasuredSpeed:
    """roles: those for which the certificate at the address may be issued, tried in turn."""
    for role in roles[:-1]:
        with suppress(BatonError):
            return _fitting(await _watch(channels, address, role))
    return _fitting(await _watch(channels, address, roles[-1]))


def _fitting(worker: MeasuredSpeed) -> MeasuredSpeed:
    if worker.role not in ROLES:
        raise InvalidArgument(
            f"{worker.address} is a {worker.role}, not a prefill or decode worker",
            field="calibrate",
        )
    return worker


async def _watch(channels: Channels, address: str, role: str) -> MeasuredSpeed:
    watch: Any = WorkerStub(channels.get(address, role)).Watch(worker_pb2.WatchRequest())
    description: WorkerDescription | None = None
    try:
        async with asyncio.timeout(ASK_S):
            while (message := await watch.read()) is not grpc.aio.EOF:
                if message.HasField("description"):
                    description = description_from_proto(message.description)
                elif message.HasField("load") and description is not None:
                    return MeasuredSpeed(address, description, load_from_proto(message.load))
    except grpc.aio.AioRpcError as error:
        code = from_rpc_error(error)
        raise Unavailable(f"{address} cannot be asked: {code.message}", field="calibrate") from None
    except TimeoutError:
        pass
    finally:
        watch.cancel()
    raise Unavailable(f"{address} does not say how fast it is", field="calibrate")


def add_calibrate(group: Any) -> None:
    """group: an argument group of a parser."""
    group.add_argument(
        "--calibrate", nargs="+", default=[], metavar="HOST:PORT",
        help="running prefill and decode workers, whose own measurements count",
    )  # fmt: skip
    for name in ("tls-cert", "tls-key", "tls-ca"):
        group.add_argument(
            f"--{name}", default=os.environ.get(f"BATON_{name.upper().replace('-', '_')}", ""),
            metavar="FILE", help="to ask workers that use TLS; the certificate is a doctor's",
        )  # fmt: skip


def asked(args: argparse.Namespace) -> Sequence[MeasuredSpeed]:
    """Asks the workers in the arguments. Raises BatonError with the address."""
    for address in args.calibrate:
        split(address, "calibrate")
    tls = TlsOptions(args.tls_cert, args.tls_key, args.tls_ca)
    if not args.calibrate:
        return ()
    return asyncio.run(ask(args.calibrate, tls.certificates(), peer_token(args.calibrate)))


def calibration_of(measured: Sequence[MeasuredSpeed]) -> Calibration:
    """Converts workers' reports to facts for the simulator. All workers of a role are assumed to be
    like the first one, with the mean of their speeds. Prefill curves that decode workers did not
    measure are those of prefill workers; without a prefill worker, the facts of decode workers are
    used for both roles. Raises InvalidArgument without a decode worker."""
    decode = speed_of(measured, "decode")
    if decode is None:
        raise InvalidArgument("names no decode worker", field="calibrate")
    prefill = speed_of(measured, "prefill")
    first = {one.role: one for one in reversed(measured)}
    model = first["decode"].description.model
    layout = first["decode"].description.layout
    if model is None or layout is None:
        raise InvalidArgument(f"{first['decode'].address} names no model", field="calibrate")
    decodes = _facts(first["decode"], decode.or_else(prefill) if prefill else decode)
    return Calibration(
        _facts(first["prefill"], prefill) if prefill else decodes,
        decodes,
        layout.bytes_per_position,
        model.max_model_len,
    )


def _facts(worker: MeasuredSpeed, speed: WorkerSpeed) -> WorkerFacts:
    has = worker.description
    limits: dict[str, int] = {}
    if speed.prefill_step_tokens:
        limits["step_tokens"] = max(speed.prefill_step_tokens, has.block_size)
    if has.max_sequences:
        limits["max_running"] = has.max_sequences
    return WorkerFacts(speed, has.num_blocks, has.block_size, **limits)
