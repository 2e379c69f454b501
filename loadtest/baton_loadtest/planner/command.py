"""`baton plan fleet`: reads the model, asks running workers if given, plans, and shows figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console

from baton_loadtest import report
from baton_loadtest.planner.curves import (
    GB,
    KNOWN,
    DecodeCurve,
    DecodeRoofline,
    Efficiency,
    Gpu,
    MeasuredDecode,
    MeasuredPrefill,
    ModelFacts,
    PrefillCurve,
    PrefillRoofline,
    duration,
    known,
)
from baton_loadtest.planner.fleet import (
    Fleet,
    KvRoom,
    Lengths,
    Margins,
    Targets,
    Traffic,
    plan_fleet,
)
from baton_loadtest.planner.measured import MeasuredSpeed, add_calibrate, asked, speed_of
from baton_loadtest.report import Result, number
from batonlm.cli.layout import resolve_model
from batonlm.core.errors import ContextLengthExceeded, InvalidArgument, install
from batonlm.core.request.model import KvLayout
from batonlm.core.routing.load import WorkerSpeed
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.engine.config import MIB, EngineConfig, configure_threads
from batonlm.engine.memory import MemoryPlan
from batonlm.worker.hardware import GPU_SHARE, sizes

GIB = 1024 * MIB
_ENGINE = EngineConfig("any")
_LENGTHS = ("MEAN", "P95")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_fleet_parser(kinds: Any) -> None:
    parser: argparse.ArgumentParser = kinds.add_parser(
        "fleet", help="how many prefill and decode workers traffic takes, and what a token costs"
    )
    add = parser.add_argument
    add("--model", default="", help="folder or hub id (default: the bundled model)")
    add(
        "--dtype", choices=DTYPES, default="auto",
        help="of weights and KV (auto: the model's own; without a GPU, that of the workers)",
    )  # fmt: skip
    gpu = parser.add_argument_group("GPU (not needed where both roles are measured)")
    add = gpu.add_argument
    add("--gpu", default="", metavar="NAME", help=", ".join(one.name for one in KNOWN))
    add("--gpu-memory-gib", type=float, metavar="G", help="in place of the data sheet's")
    add("--gpu-bandwidth", type=float, metavar="GB/S", help="of its memory")
    add("--gpu-tflops", type=float, metavar="T", help="dense bfloat16")
    add("--gpu-price", type=float, metavar="P", help="for an hour, in any currency")
    add(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="GPUs that share each layer of a worker's model (default %(default)s)",
    )  # fmt: skip
    add(
        "--pipeline-parallel", type=int, default=1, metavar="N",
        help="stages of layers, of as many GPUs each; they add memory, and no speed to a step "
        "(default %(default)s)",
    )  # fmt: skip
    traffic = parser.add_argument_group("traffic")
    add = traffic.add_argument
    add("--rate", type=float, required=True, metavar="R", help="requests a second")
    add("--input", type=float, nargs=2, required=True, metavar=_LENGTHS, help="prompt tokens")
    add("--output", type=float, nargs=2, required=True, metavar=_LENGTHS, help="tokens of answers")
    add(
        "--shared-prefix", type=float, default=0.0, metavar="S",
        help="share of a prompt that workers have cached (default %(default)s)",
    )  # fmt: skip
    targets = parser.add_argument_group("targets")
    add = targets.add_argument
    add(
        "--first-token-ms", type=float, required=True, metavar="MS",
        help="for 95 of 100 requests, without the network and the tokenizer",
    )  # fmt: skip
    add("--between-tokens-ms", type=float, required=True, metavar="MS", help="a step of decode")
    worker = parser.add_argument_group("a worker's settings")
    add = worker.add_argument
    add(
        "--memory-share", type=float, default=GPU_SHARE, metavar="S",
        help="of the device's memory that it may take (default %(default)s)",
    )  # fmt: skip
    add(
        "--step-tokens", type=int, metavar="N",
        help="most prompt tokens of a step of prefill (default: as the worker, by its GPU and the "
        "model)",
    )  # fmt: skip
    add(
        "--sequences", type=int, default=SchedulerPolicy().max_sequences, metavar="N",
        help="that decode runs at once, at most (default %(default)s)",
    )  # fmt: skip
    margins = parser.add_argument_group("what is assumed, where nothing is measured")
    add = margins.add_argument
    add(
        "--compute-efficiency", type=float, default=0.5, metavar="S",
        help="share of the data sheet's FLOP/s that is reached (default %(default)s)",
    )  # fmt: skip
    add(
        "--bandwidth-efficiency", type=float, default=0.7, metavar="S",
        help="share of its bandwidth (default %(default)s)",
    )  # fmt: skip
    add(
        "--step-overhead-ms", type=float, default=1.0, metavar="MS",
        help="of every step besides (default %(default)s)",
    )  # fmt: skip
    add(
        "--sum-us", type=float, default=20.0, metavar="US",
        help="of each of a layer's two sums over tensor-parallel GPUs (default %(default)s)",
    )  # fmt: skip
    add(
        "--link", type=float, metavar="GB/S",
        help="that KV travels by, into or out of a worker (default: what the GPU's host link could "
        "carry, which a network seldom does)",
    )  # fmt: skip
    add(
        "--busy", type=float, default=0.7, metavar="S",
        help="share of workers and links to plan with; the rest is for bursts (default "
        "%(default)s)",
    )  # fmt: skip
    measured = parser.add_argument_group("in place of rooflines")
    add_calibrate(measured)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")


def traffic_of(args: argparse.Namespace) -> Traffic:
    (mean, p95), (out_mean, out_p95) = args.input, args.output
    prompts, outputs = Lengths(mean, p95, "input"), Lengths(out_mean, out_p95, "output")
    return Traffic(args.rate, prompts, outputs, args.shared_prefix)


def targets_of(args: argparse.Namespace) -> Targets:
    return Targets(args.first_token_ms / 1000, args.between_tokens_ms / 1000)


def worker_gpu(args: argparse.Namespace) -> Gpu | None:
    """The GPUs of one worker as if they were one; None if no GPU is given.

    Tensor-parallel GPUs compute, read and move KV side by side. Stages do so one after the other:
    a step takes as long as in one of them with all layers.
    """
    one = gpu_of(args)
    if one is None or gpus_of(args) == 1:
        return one
    tensor = args.tensor_parallel
    return Gpu(
        f"{gpus_of(args)} {one.name}",
        one.memory * gpus_of(args),
        one.bandwidth * tensor,
        one.flops * tensor,
        one.link * tensor,
    )


def gpus_of(args: argparse.Namespace) -> int:
    """GPUs of one worker."""
    return int(args.tensor_parallel * args.pipeline_parallel)


def gpu_of(args: argparse.Namespace) -> Gpu | None:
    """Returns None if no GPU is given. Raises InvalidArgument for an incomplete one."""
    given = {
        "memory": (args.gpu_memory_gib, GIB, "gpu_memory_gib"),
        "bandwidth": (args.gpu_bandwidth, GB, "gpu_bandwidth"),
        "flops": (args.gpu_tflops, 1e12, "gpu_tflops"),
    }
    for value, _, field in given.values():
        if value is not None:
            _positive(value, field)
    values = {name: value * unit for name, (value, unit, _) in given.items() if value is not None}
    if args.gpu:
        return replace(known(args.gpu), **values)
    if not values:
        return None
    for name, (_, _, field) in given.items():
        if name not in values:
            raise InvalidArgument("is needed for a GPU without a name", field=field)
    return Gpu("described", **values)


def efficiency_of(args: argparse.Namespace) -> Efficiency:
    for field in ("compute_efficiency", "bandwidth_efficiency"):
        if not 0.0 < getattr(args, field) <= 1.0:
            raise InvalidArgument("must be above 0, at most 1", field=field)
    if not (isfinite(args.step_overhead_ms) and args.step_overhead_ms >= 0):
        raise InvalidArgument("must be 0 or more", field="step_overhead_ms")
    return Efficiency(
        args.compute_efficiency, args.bandwidth_efficiency, args.step_overhead_ms / 1000
    )


def margins_of(args: argparse.Namespace, link: float) -> Margins:
    """link: known bytes per second, used if the user gives none."""
    if args.link is not None:
        link = _positive(args.link, "link") * GB
    return Margins(args.busy, link)


def check(args: argparse.Namespace) -> None:
    """Checks what is validated nowhere else. Raises InvalidArgument."""
    if args.gpu_price is not None:
        _positive(args.gpu_price, "gpu_price")
    if not (isfinite(args.sum_us) and args.sum_us >= 0):
        raise InvalidArgument("must be 0 or more", field="sum_us")
    for field in ("step_tokens", "sequences", "tensor_parallel", "pipeline_parallel"):
        value = getattr(args, field)
        if value is not None and value < 1:
            raise InvalidArgument("must be at least 1", field=field)


def _positive(value: float, field: str) -> float:
    if not (isfinite(value) and value > 0):
        raise InvalidArgument("must be more than 0", field=field)
    return value


_KIB = 1024


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the plan."""

    group: str
    """Together with the name it identifies the figure."""
    name: str
    value: float
    unit: str = ""
    note: str = ""

    @property
    def result(self) -> Result:
        return Result(f"{self.group}: {self.name}", self.value, self.unit)


Figures = dict[str, list[Figure]]


def figures(
    fleet: Fleet,
    traffic: Traffic,
    margins: Margins,
    curves: tuple[PrefillCurve, DecodeCurve],
    facts: ModelFacts,
    price_per_hour: float | None,
    gpus: int = 1,
) -> Figures:
    """Returns the figures by group, in reading order. price_per_hour: of a worker; gpus: of one."""
    found = [
        *_model_figures(facts),
        *_prefill(fleet, traffic, curves[0]),
        *_decode(fleet, curves[1]),
        *_both(fleet, traffic, margins, price_per_hour, gpus),
    ]
    groups: Figures = {}
    for figure in found:
        groups.setdefault(figure.group, []).append(figure)
    return groups


def show(console: Console, found: Figures) -> None:
    width = max(len(figure.name) for group in found.values() for figure in group)
    for group, of_it in found.items():
        console.print(f"\n{group}", style="bold")
        for figure in of_it:
            value = f"{number(figure.value):>10} {figure.unit:<10}"
            console.print(f"  {figure.name:<{width}} {value} {figure.note}".rstrip(), markup=False)


def _model_figures(facts: ModelFacts) -> list[Figure]:
    group = "model"
    active = facts.active + facts.head
    return [
        Figure(group, "weights", facts.weights / GB, "GB", facts.dtype),
        Figure(group, "parameters at work", active / GB, "10^9", "for each token"),
        Figure(group, "KV of a token", facts.kv_position / _KIB, "KiB"),
    ]


def _prefill(fleet: Fleet, traffic: Traffic, curve: PrefillCurve) -> list[Figure]:
    group, pool = "prefill", fleet.prefill
    mean, long = round(traffic.prompts.mean), round(traffic.prompts.p95)
    bound = ""
    if isinstance(curve, PrefillRoofline):
        bound = f", {curve.bound(traffic.cached(mean), mean)}-bound"
    return [
        Figure(group, "a prompt", 1000 * pool.mean_s, "ms", f"{curve.source}, mean{bound}"),
        Figure(group, "a long prompt", 1000 * pool.long_s, "ms", f"{long} tokens, alone"),
        Figure(group, "of a worker", pool.tokens_per_s, "tokens/s", "computed, always busy"),
        Figure(group, "workers", pool.workers, "", f"decided by {pool.decided_by}"),
        Figure(group, "busy", 100 * pool.load / pool.workers, "%", "of the time"),
        Figure(
            group, "first token", 1000 * pool.first_token_s, "ms",
            f"95 of 100 requests; {duration(pool.wait_s)} of it waiting",
        ),
    ]  # fmt: skip


def _decode(fleet: Fleet, curve: DecodeCurve) -> list[Figure]:
    group, pool = "decode", fleet.decode
    bound = ""
    if isinstance(curve, DecodeRoofline):
        bound = f", {curve.bound(pool.batch, pool.context)}-bound"
    return [
        Figure(group, "sequences that fit", pool.fits, "", f"of {pool.grown:.0f} tokens"),
        Figure(group, "sequences in time", pool.in_time, "", "for the target between tokens"),
        Figure(group, "batch", pool.batch, "", f"bounded by {pool.limited_by}"),
        Figure(group, "a full step", 1000 * pool.full_step_s, "ms", f"{curve.source}{bound}"),
        Figure(group, "of a worker", pool.tokens_per_s, "tokens/s", "at that batch"),
        Figure(group, "workers", pool.workers, "", f"decided by {pool.decided_by}"),
        Figure(group, "running", pool.running, "sequences", "of a worker, on average"),
        Figure(group, "between tokens", 1000 * pool.step_s, "ms", "on average"),
    ]


def _both(
    fleet: Fleet, traffic: Traffic, margins: Margins, price_per_hour: float | None, gpus: int
) -> list[Figure]:
    group, prefill, decode = "both", fleet.prefill, fleet.decode
    found = [
        Figure(
            group, "decode for each prefill", fleet.decode_per_prefill, "workers",
            "when all are equally busy",
        ),
        Figure(group, "KV of a request", prefill.moved_bytes / 1e6, "MB", "mean, without cached"),
        Figure(group, "KV out of prefill", prefill.sent_rate / GB, "GB/s", "a worker, on average"),
        Figure(
            group, "while it computes", prefill.moving_rate / GB, "GB/s", "for a link to keep up",
        ),
        Figure(group, "KV into decode", decode.received_rate / GB, "GB/s", "a worker, on average"),
    ]  # fmt: skip
    if fleet.handover_s is not None:
        link = f"a long prompt's, after its first token, at {margins.link / GB:.3g} GB/s"
        found.append(Figure(group, "rest of a hand-over", 1000 * fleet.handover_s, "ms", link))
    if price_per_hour is not None:
        every, output = fleet.cost_per_million(traffic, price_per_hour)
        hour = f"{fleet.workers * gpus} GPUs for {fleet.workers * price_per_hour:.2f} an hour"
        found += [
            Figure(group, "a million tokens", every, "", f"prompts' and answers'; {hour}"),
            Figure(group, "a million of answers", output, "", "with all charged to them"),
        ]
    return found


_MORE_THAN_ANY = 1 << 50
"""Bytes: the memory of workers that report themselves how much KV they hold."""


@dataclass(frozen=True, slots=True)
class Basis:
    """The inputs of the plan."""

    facts: ModelFacts
    prefill: PrefillCurve
    decode: DecodeCurve
    room: KvRoom
    link: float
    wire_position: int
    text: str


def run(args: argparse.Namespace) -> int:
    """Raises InvalidArgument, also for a target that cannot be met."""
    check(args)
    traffic, targets = traffic_of(args), targets_of(args)
    basis = _basis(args)
    margins = margins_of(args, basis.link)
    if basis.room.state and traffic.shared_prefix:
        raise InvalidArgument(
            f"the layers of {basis.facts.name} keep a state, so no prefix of it is cached",
            field="shared_prefix",
        )
    longest = round(traffic.prompts.p95 + traffic.outputs.p95)
    if longest > basis.facts.max_model_len:
        raise ContextLengthExceeded(
            f"requests of {longest} tokens (the 95th percentiles) are longer than the model's "
            f"{basis.facts.max_model_len}",
            field="input",
        )
    curves = basis.prefill, basis.decode
    fleet = plan_fleet(traffic, targets, margins, curves, basis.room, basis.wire_position)
    gpus = gpus_of(args)
    price = None if args.gpu_price is None else args.gpu_price * gpus
    found = figures(fleet, traffic, margins, curves, basis.facts, price, gpus)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{basis.facts.name}: {_summary(args, traffic, margins)}", markup=False)
    console.print(basis.text, markup=False)
    show(console, found)
    if args.json:
        report.write(args.json, 0, [one.result for group in found.values() for one in group])
        print(f"written to {args.json}", file=sys.stderr)
    return 0


def _basis(args: argparse.Namespace) -> Basis:
    gpu, efficiency = worker_gpu(args), efficiency_of(args)
    measured = asked(args)
    prefill_speed, decode_speed = speed_of(measured, "prefill"), speed_of(measured, "decode")
    if gpu is None and (prefill_speed is None or decode_speed is None):
        raise InvalidArgument(
            "is needed for a role that no running worker speaks for: --gpu, or --calibrate with "
            "prefill and decode workers",
            field="gpu",
        )
    facts, layout, memory = _model(args, gpu, measured)
    _check_same(layout, measured)
    if args.tensor_parallel > 1:
        efficiency = replace(
            efficiency,
            step_s=efficiency.step_s + 2 * facts.layers * args.sum_us / 1e6,
        )
    prefill: PrefillCurve
    decode: DecodeCurve
    if prefill_speed is not None:
        prefill = MeasuredPrefill(prefill_speed)
    else:
        roofed = _roofed(gpu, facts)
        gpus = gpus_of(args)
        by_device = sizes("prefill", int(roofed.memory) // gpus, memory.weights_bytes // gpus)
        tokens = args.step_tokens or by_device.step_tokens
        prefill = PrefillRoofline(facts, roofed, efficiency, tokens)
    state = layout.state_blocks(memory.block_size) * memory.block_size
    room = KvRoom(memory.num_positions, args.sequences, state)
    if decode_speed is not None:
        decode, room = MeasuredDecode(decode_speed), _room(measured, args.sequences)
    else:
        decode = DecodeRoofline(facts, _roofed(gpu, facts), efficiency)
    return Basis(
        facts,
        prefill,
        decode,
        room,
        _link(decode_speed, gpu),
        next((t.description.layout.bytes_per_position for t in measured if t.description.layout), 0)
        or facts.wire_position,
        _basis_text(args, gpu, prefill.source, decode.source),
    )


def _model(
    args: argparse.Namespace, gpu: Gpu | None, measured: Sequence[MeasuredSpeed]
) -> tuple[ModelFacts, KvLayout, MemoryPlan]:
    """Also returns how a decode worker on this GPU uses its memory. Without a GPU, the dtype is the
    one that workers report, if it is one of weights."""
    dtype = args.dtype
    for one in measured:
        if gpu is None and dtype == "auto" and one.description.layout is not None:
            dtype = one.description.layout.dtype
    config = EngineConfig(
        model=args.model or str(resolve_model("")[0]),
        dtype=dtype if dtype in DTYPES else "auto",
        device="cuda",
        kv_memory_bytes=0,
        memory_share=args.memory_share,
        max_batch=args.sequences,
        max_step_tokens=_ENGINE.max_step_tokens + args.sequences,
    )
    if "torch" not in sys.modules:
        configure_threads()
    try:
        from baton_loadtest.planner.model import read
    except ImportError as error:
        raise InvalidArgument(f"planning needs the engine: {install('engine')}") from error
    found = read(config, int(gpu.memory) if gpu else _MORE_THAN_ANY)
    _check_split(found.layout, found.facts, args)
    return found.facts, found.layout, found.memory


def _check_split(layout: KvLayout, facts: ModelFacts, args: argparse.Namespace) -> None:
    """Raises InvalidArgument, naming the option, where workers would refuse the degree, or keep
    heads of KV more than once, which no figure here counts."""
    tensor, stages = args.tensor_parallel, args.pipeline_parallel
    if layout.num_kv_heads % tensor:
        raise InvalidArgument(
            f"{facts.name} has {layout.num_kv_heads} heads of keys and values, no multiple of "
            f"{tensor}: plan with fewer GPUs and more stages",
            field="tensor_parallel",
        )
    if stages > facts.layers:
        raise InvalidArgument(f"{facts.name} has {facts.layers} layers", field="pipeline_parallel")


def _roofed(gpu: Gpu | None, facts: ModelFacts) -> Gpu:
    if gpu is None:
        raise InvalidArgument("is needed for a roofline", field="gpu")
    if facts.dtype == "float32":
        raise InvalidArgument(
            "a GPU's figures are for numbers of 16 bits: --dtype bfloat16", field="dtype"
        )
    return gpu


def _check_same(layout: KvLayout, measured: Sequence[MeasuredSpeed]) -> None:
    """Raises InvalidArgument if a worker has another model, judging by the shape of its KV."""
    for one in measured:
        theirs = one.description.layout
        for name in ("num_layers", "num_kv_heads", "key_size", "value_size", "state_positions"):
            if theirs is not None and getattr(theirs, name) != getattr(layout, name):
                raise InvalidArgument(
                    f"{one.address} has another model: {name} is {getattr(theirs, name)}, and "
                    f"{getattr(layout, name)} here",
                    field="calibrate",
                )


def _room(measured: Sequence[MeasuredSpeed], sequences: int) -> KvRoom:
    """Returns the room of the smallest decode worker, which is assumed for all."""
    rooms = []
    for one in measured:
        if one.role == "decode":
            has = one.description
            most = min(sequences, has.max_sequences or sequences)
            rooms.append(KvRoom(has.num_blocks * has.block_size, most, has.state_room))
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
