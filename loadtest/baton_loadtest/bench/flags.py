"""Flags that several benchmarks have, and how their values are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kind(
    kinds: Any, name: str, what: str, takes: str = "", *, plot: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, help=what, description=f"Measures {what}. {takes}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw an SVG here")
    else:
        parser.set_defaults(plot=None)
    return parser


def model(parser: argparse.ArgumentParser, threads: int) -> None:
    parser.add_argument(
        "--shape",
        default="100m",
        help="tiny, 100m, 500m: random weights, built once; or a model's folder or hub id",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=threads,
        metavar="N",
        help=f"of the engine, which is pinned to as many cores (default: {threads})",
    )


def device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def factors(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def names(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(allowed):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(allowed)}")
        return found

    return read
