"""Declaration of a benchmark's options: one line each, in the tuple OPTIONS of its module."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Option = tuple[str, dict[str, Any]]


def option(flag: str, default: Any, help: str = "", **more: Any) -> Option:
    """Returns one option, whose type and placeholder follow from its default.

    A tuple is given as comma-separated values. An option whose default is False is a flag.
    """
    settings: dict[str, Any] = {"default": default, "help": help or None}
    if default is False:
        settings["action"] = "store_true"
    elif isinstance(default, tuple):
        settings |= {"type": values(type(default[0])), "metavar": "X,X"}
    elif not {"choices", "action"} & more.keys():
        names = {int: "N", float: "S" if flag.endswith(("-s", "seconds")) else "X"}
        settings |= {"type": type(default), "metavar": names.get(type(default), "TEXT")}
    return flag, settings | more


def values(kind: Callable[[str], Any], allowed: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """Returns a parser of comma-separated values. allowed: the valid ones; empty: any."""

    def read(text: str) -> tuple[Any, ...]:
        found = tuple(text.split(","))
        if allowed and not set(found) <= set(allowed):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(allowed)}")
        return tuple(map(kind, found))

    return read


MODEL = option("--model", "", "folder or hub id (default: the bundled model)")
TRANSPORT = option("--transport", "nixl", choices=("nixl", "loopback"))
DEVICE = option("--device", "cpu", choices=("cpu", "cuda"))
SHAPES = (
    "tiny, 8m, 25m, 100m, 500m, qwen3-0.6b, llama-3.2-1b, tiny-hybrid, hybrid-25m: random weights, "
    "built once; or a model's folder or hub id"
)


def engine(threads: int, shape: str = "100m") -> tuple[Option, ...]:
    """Returns the options for an engine's model and threads."""
    return (
        option("--shape", shape, SHAPES),
        option("--threads", threads, "of the engine, which is pinned to as many cores"),
    )


COMMON = (
    option("--json", None, "write the figures here", type=Path, metavar="FILE"),
    option("--seed", 0),
)
PLOT = option("--plot", None, "draw an SVG here", type=Path, metavar="FILE")


def add(parser: argparse.ArgumentParser, options: tuple[Option, ...]) -> None:
    """Adds options to a parser; a later one replaces an earlier one of the same name."""
    for flag, settings in dict(options).items():
        parser.add_argument(flag, **settings)
