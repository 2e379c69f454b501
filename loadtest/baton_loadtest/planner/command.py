"""`baton plan fleet`: reads the model, asks workers where it may, plans, and shows the figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from baton.cli.layout import resolve_model
from baton.core.errors import ContextLengthExceeded, InvalidArgument
from baton.core.request.model import KvLayout
from baton.core.routing.load import WorkerSpeed
from baton.engine.config import EngineConfig, configure_threads
from baton_loadtest import report
from baton_loadtest.planner import calibrate, options
from baton_loadtest.planner.asked import Margins, Traffic
from baton_loadtest.planner.curves import (
    DecodeCurve,
    DecodeRoofline,
    MeasuredDecode,
    MeasuredPrefill,
    PrefillCurve,
    PrefillRoofline,
)
from baton_loadtest.planner.decode_pool import KvRoom
from baton_loadtest.planner.facts import ModelFacts
from baton_loadtest.planner.figures import figures, show
from baton_loadtest.planner.fleet import plan_fleet
from baton_loadtest.planner.gpus import Gpu
from baton_loadtest.planner.measured import MeasuredSpeed, speed_of

_MORE_THAN_ANY = 1 << 50
"""Bytes: stands for the memory of workers that say themselves how much KV they hold."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What the plan rests on."""

    facts: ModelFacts
    prefill: PrefillCurve
    decode: DecodeCurve
    room: KvRoom
    link: float
    wire_position: int
    text: str


def run(args: argparse.Namespace) -> int:
    """Raises InvalidArgument also for a target that cannot be met."""
    options.check(args)
    traffic, targets = options.traffic_of(args), options.targets_of(args)
    basis = _basis(args)
    margins = options.margins_of(args, basis.link)
    longest = round(traffic.prompts.p95 + traffic.outputs.p95)
    if longest > basis.facts.max_model_len:
        raise ContextLengthExceeded(
            f"requests of {longest} tokens (the 95th percentiles) are longer than the model's "
            f"{basis.facts.max_model_len}",
            field="input",
        )
    curves = basis.prefill, basis.decode
    fleet = plan_fleet(traffic, targets, margins, curves, basis.room, basis.wire_position)
    found = figures(fleet, traffic, margins, curves, basis.facts, args.gpu_price)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{basis.facts.name}: {_summary(args, traffic, margins)}", markup=False)
    console.print(basis.text, markup=False)
    show(console, found)
    if args.json:
        report.write(args.json, 0, [one.result for group in found.values() for one in group])
        print(f"written to {args.json}", file=sys.stderr)
    return 0


def _basis(args: argparse.Namespace) -> Basis:
    gpu, efficiency = options.gpu_of(args), options.efficiency_of(args)
    told = calibrate.asked(args)
    prefill_speed, decode_speed = speed_of(told, "prefill"), speed_of(told, "decode")
    if gpu is None and (prefill_speed is None or decode_speed is None):
        raise InvalidArgument(
            "is needed for a role that no running worker speaks for: --gpu, or --calibrate with "
            "prefill and decode workers",
            field="gpu",
        )
    facts, layout, positions = _model(args, gpu, told)
    _check_same(layout, told)
    prefill: PrefillCurve
    decode: DecodeCurve
    if prefill_speed is not None:
        prefill = MeasuredPrefill(prefill_speed)
    else:
        prefill = PrefillRoofline(facts, _roofed(gpu, facts), efficiency, args.step_tokens)
    room = KvRoom(positions, args.sequences)
    if decode_speed is not None:
        decode, room = MeasuredDecode(decode_speed), _room(told, args.sequences)
    else:
        decode = DecodeRoofline(facts, _roofed(gpu, facts), efficiency)
    return Basis(
        facts,
        prefill,
        decode,
        room,
        _link(decode_speed, gpu),
        next((t.description.layout.bytes_per_position for t in told if t.description.layout), 0)
        or facts.wire_position,
        _basis_text(args, gpu, prefill.source, decode.source),
    )


def _model(
    args: argparse.Namespace, gpu: Gpu | None, told: Sequence[MeasuredSpeed]
) -> tuple[ModelFacts, KvLayout, int]:
    """And the positions whose KV a worker on this GPU holds. Without one, numbers are of the type
    that workers say theirs are, as far as it is one of weights."""
    dtype = args.dtype
    for one in told:
        if gpu is None and dtype == "auto" and one.description.layout is not None:
            dtype = one.description.layout.dtype
    config = EngineConfig(
        model=args.model or str(resolve_model("")[0]),
        dtype=dtype if dtype in options.DTYPES else "auto",
        device="cuda",
        kv_memory_bytes=0,
        memory_share=args.memory_share,
        max_batch=args.sequences,
        max_step_tokens=args.step_tokens + args.sequences,
    )
    if "torch" not in sys.modules:
        configure_threads()
    try:
        from baton_loadtest.planner.model import read
    except ImportError as error:
        raise InvalidArgument("planning needs the engine: pip install 'baton[engine]'") from error
    found = read(config, int(gpu.memory) if gpu else _MORE_THAN_ANY)
    return found.facts, found.layout, found.memory.num_positions


def _roofed(gpu: Gpu | None, facts: ModelFacts) -> Gpu:
    if gpu is None:
        raise InvalidArgument("is needed for a roofline", field="gpu")
    if facts.dtype == "float32":
        raise InvalidArgument(
            "a GPU's figures are for numbers of 16 bits: --dtype bfloat16", field="dtype"
        )
    return gpu


def _check_same(layout: KvLayout, told: Sequence[MeasuredSpeed]) -> None:
    """Raises InvalidArgument where a worker has another model, as far as the shape of KV tells."""
    for one in told:
        theirs = one.description.layout
        for name in ("num_layers", "num_kv_heads", "key_size", "value_size"):
            if theirs is not None and getattr(theirs, name) != getattr(layout, name):
                raise InvalidArgument(
                    f"{one.address} has another model: {name} is {getattr(theirs, name)}, and "
                    f"{getattr(layout, name)} here",
                    field="calibrate",
                )


def _room(told: Sequence[MeasuredSpeed], sequences: int) -> KvRoom:
    """Of the smallest decode worker, which the others are planned to be like."""
    rooms = []
    for one in told:
        if one.role == "decode":
            has = one.description
            most = min(sequences, has.max_sequences or sequences)
            rooms.append(KvRoom(has.num_blocks * has.block_size, most))
    return min(rooms, key=lambda room: room.positions)


def _link(speed: WorkerSpeed | None, gpu: Gpu | None) -> float:
    if speed is not None and speed.link_bytes_per_s:
        return speed.link_bytes_per_s
    return gpu.link if gpu else 0.0


def _summary(args: argparse.Namespace, traffic: Traffic, margins: Margins) -> str:
    return (
        f"{traffic.rate:g} requests/s, {args.input[0]:g} tokens in (95th percentile "
        f"{args.input[1]:g}, {100 * traffic.shared_prefix:.0f} % cached), {args.output[0]:g} out "
        f"({args.output[1]:g}), workers at most {100 * margins.busy:.0f} % busy"
    )


def _basis_text(args: argparse.Namespace, gpu: Gpu | None, prefill: str, decode: str) -> str:
    text = f"prefill {prefill}, decode {decode}"
    if gpu is None or "roofline" not in (prefill, decode):
        return text
    return (
        f"{text}: {gpu.name} at {100 * args.compute_efficiency:.0f} % of {gpu.flops / 1e12:.0f} "
        f"TFLOP/s and {100 * args.bandwidth_efficiency:.0f} % of {gpu.bandwidth / 1e9:.0f} GB/s, "
        f"{args.step_overhead_ms:g} ms a step besides"
    )
