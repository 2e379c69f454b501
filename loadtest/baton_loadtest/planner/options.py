"""The options of `baton plan fleet`, and the values that they make; reads no model, no worker."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidArgument
from baton.core.scheduler.policy import SchedulerPolicy
from baton.engine.config import MIB, EngineConfig
from baton_loadtest.planner.asked import Margins, Targets, Traffic
from baton_loadtest.planner.curves import Efficiency
from baton_loadtest.planner.gpus import GB, KNOWN, Gpu, known
from baton_loadtest.planner.lengths import Lengths

GIB = 1024 * MIB
_ENGINE = EngineConfig("any")
_LENGTHS = ("MEAN", "P95")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(kinds: Any) -> None:
    parser: argparse.ArgumentParser = kinds.add_parser(
        "fleet", help="how many prefill and decode workers traffic takes, and what a token costs"
    )
    add = parser.add_argument
    add("--model", default="", help="folder or hub id (default: the bundled model)")
    add(
        "--dtype", choices=DTYPES, default="auto",
        help="of weights and KV (auto: the model's own; without a GPU, that of the workers)",
    )  # fmt: skip
    gpu = parser.add_argument_group("GPU, one a worker (not needed where both roles are measured)")
    add = gpu.add_argument
    add("--gpu", default="", metavar="NAME", help=", ".join(one.name for one in KNOWN))
    add("--gpu-memory-gib", type=float, metavar="G", help="in place of the data sheet's")
    add("--gpu-bandwidth", type=float, metavar="GB/S", help="of its memory")
    add("--gpu-tflops", type=float, metavar="T", help="dense bfloat16")
    add("--gpu-price", type=float, metavar="P", help="for an hour, in any currency")
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
        "--memory-share", type=float, default=_ENGINE.memory_share, metavar="S",
        help="of the device's memory that it may take (default %(default)s)",
    )  # fmt: skip
    add(
        "--step-tokens", type=int, default=_ENGINE.max_step_tokens, metavar="N",
        help="most prompt tokens of a step (default %(default)s)",
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


def add_calibrate(group: Any) -> None:
    """group: of a parser's arguments."""
    group.add_argument(
        "--calibrate", nargs="+", default=[], metavar="HOST:PORT",
        help="running prefill and decode workers, whose own measurements count",
    )  # fmt: skip
    for name in ("tls-cert", "tls-key", "tls-ca"):
        group.add_argument(
            f"--{name}", default=os.environ.get(f"BATON_{name.upper().replace('-', '_')}", ""),
            metavar="FILE", help="to ask workers that use TLS; the certificate is a doctor's",
        )  # fmt: skip


def traffic_of(args: argparse.Namespace) -> Traffic:
    (mean, p95), (out_mean, out_p95) = args.input, args.output
    prompts, outputs = Lengths(mean, p95, "input"), Lengths(out_mean, out_p95, "output")
    return Traffic(args.rate, prompts, outputs, args.shared_prefix)


def targets_of(args: argparse.Namespace) -> Targets:
    return Targets(args.first_token_ms / 1000, args.between_tokens_ms / 1000)


def gpu_of(args: argparse.Namespace) -> Gpu | None:
    """None: nothing was said of one. Raises InvalidArgument for one that is not whole."""
    told = {
        "memory": (args.gpu_memory_gib, GIB, "gpu_memory_gib"),
        "bandwidth": (args.gpu_bandwidth, GB, "gpu_bandwidth"),
        "flops": (args.gpu_tflops, 1e12, "gpu_tflops"),
    }
    for value, _, field in told.values():
        if value is not None:
            _positive(value, field)
    values = {name: value * unit for name, (value, unit, _) in told.items() if value is not None}
    if args.gpu:
        return replace(known(args.gpu), **values)
    if not values:
        return None
    for name, (_, _, field) in told.items():
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
    """link: bytes a second that are known of, where the user says none."""
    if args.link is not None:
        link = _positive(args.link, "link") * GB
    return Margins(args.busy, link)


def check(args: argparse.Namespace) -> None:
    """What nothing else looks at. Raises InvalidArgument."""
    if args.gpu_price is not None:
        _positive(args.gpu_price, "gpu_price")
    for field in ("step_tokens", "sequences"):
        if getattr(args, field) < 1:
            raise InvalidArgument("must be at least 1", field=field)


def _positive(value: float, field: str) -> float:
    if not (isfinite(value) and value > 0):
        raise InvalidArgument("must be more than 0", field=field)
    return value
