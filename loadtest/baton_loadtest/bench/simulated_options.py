"""The flags of benchmarks that run in the simulator; imports no benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton_loadtest.bench import flags


def add(kinds: Any) -> None:
    _simulator(kinds)
    _scaling(kinds)
    _reality(kinds)
    _split(kinds)


def _simulator(kinds: Any) -> None:
    simulator = flags.kind(
        kinds,
        "simulator",
        "what simulating a fleet takes",
        "About 3 minutes. Speeds are made up: it is the simulator that is measured.",
        plot=False,
    )
    simulator.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="Mooncake's conversation trace"
    )
    simulator.add_argument("--workers", type=int, default=8, metavar="N", help="default 8")
    simulator.add_argument(
        "--copies", type=int, default=1, metavar="N", help="of the trace side by side (default 1)"
    )
    simulator.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="of the trace (default: all)"
    )
    simulator.add_argument(
        "--block-size", type=int, default=64, metavar="N", help="positions (default 64)"
    )


def _scaling(kinds: Any) -> None:
    scaling = flags.kind(
        kinds,
        "scaling",
        "what becomes of bursts where fleets grow by leading signals, and by how busy they are",
        "About 3 minutes. Fleets are simulated, and workers' speeds made up.",
    )
    add = scaling.add_argument
    add("--seconds", type=float, default=900.0, metavar="S", help="of traffic (default 900)")
    add("--rate", type=float, default=2.0, metavar="R", help="requests a second (default 2)")
    add("--burst-rate", type=float, default=10.0, metavar="R", help="in a burst (default 10)")
    add("--burst-s", type=float, default=120.0, metavar="S", help="that one lasts (default 120)")
    add("--period-s", type=float, default=300.0, metavar="S", help="between two (default 300)")
    add("--startup-s", type=float, default=30.0, metavar="S", help="of a worker (default 30)")
    add(
        "--hold-s", type=float, default=300.0, metavar="S",
        help="that a pool stays as large as it had to be (default 300, as an HPA)",
    )  # fmt: skip
    add("--most", type=int, default=8, metavar="N", help="workers of each pool (default 8)")


def _reality(kinds: Any) -> None:
    reality = flags.kind(
        kinds,
        "reality",
        "what the simulator foretells against what a Baton on this machine does",
        "About half an hour.",
        plot=False,
    )
    reality.add_argument(
        "--shape",
        default="8m",
        help="tiny, 8m, 25m, 100m, 500m: random weights; or a model's folder",
    )
    reality.add_argument("--rounds", type=int, default=5, metavar="N", help="real runs of each")
    reality.add_argument("--seconds", type=float, default=40.0, metavar="S", help="of each run")
    reality.add_argument("--warm-s", type=float, default=20.0, metavar="S", help="before, twice")
    reality.add_argument(
        "--busy", type=float, default=0.5, metavar="F",
        help="share of its time that the busiest worker is to work (default 0.5)",
    )  # fmt: skip
    reality.add_argument("--only", default="", metavar="NAME", help="workloads with this in it")


def _split(kinds: Any) -> None:
    split = flags.kind(
        kinds,
        "split",
        "what `baton plan split` says of three workloads against both set-ups, really run",
        "About half an hour.",
        plot=False,
    )
    split.add_argument(
        "--shape", default="",
        help="a model that engines compute: tiny, 8m, 25m, 100m, 500m or a folder; without one "
        "they only take their time",
    )  # fmt: skip
    split.add_argument(
        "--error", type=float, default=15.0, metavar="PERCENT", help="as `baton plan split` has it"
    )
    split.add_argument("--only", default="", metavar="NAME", help="workloads with this in it")
