"""`--calibrate`: asks the workers that it names, and makes what they say into facts to simulate."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from baton.cli.access import peer_token
from baton.core.errors import InvalidArgument
from baton.core.routing.load import WorkerSpeed
from baton.rpc.address import split
from baton.rpc.tls_options import TlsOptions
from baton_loadtest.planner.measured import MeasuredSpeed, ask, speed_of
from baton_loadtest.simulator.calibration import Calibration
from baton_loadtest.simulator.settings import WorkerFacts


def asked(args: argparse.Namespace) -> Sequence[MeasuredSpeed]:
    """Raises BatonError, which names the address."""
    for address in args.calibrate:
        split(address, "calibrate")
    tls = TlsOptions(args.tls_cert, args.tls_key, args.tls_ca)
    if not args.calibrate:
        return ()
    return asyncio.run(ask(args.calibrate, tls.certificates(), peer_token(args.calibrate)))


def calibration_of(told: Sequence[MeasuredSpeed]) -> Calibration:
    """What workers said of themselves; of a role, all are taken to be like the first one, with the
    mean of their speeds. Curves that decode workers did not measure, because they never prefilled,
    are prefill workers'; without a prefill worker those would be as decode workers are. Raises
    InvalidArgument without a decode worker."""
    decode = speed_of(told, "decode")
    if decode is None:
        raise InvalidArgument("names no decode worker", field="calibrate")
    prefill = speed_of(told, "prefill")
    first = {one.role: one for one in reversed(told)}
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


def _facts(told: MeasuredSpeed, speed: WorkerSpeed) -> WorkerFacts:
    has = told.description
    said: dict[str, int] = {}
    if speed.prefill_step_tokens:
        said["step_tokens"] = max(speed.prefill_step_tokens, has.block_size)
    if has.max_sequences:
        said["max_running"] = has.max_sequences
    return WorkerFacts(speed, has.num_blocks, has.block_size, **said)
