"""The flags of the benchmarks of what shows Baton: load generator, tracing."""

from __future__ import annotations

from typing import Any

from baton_loadtest.bench import flags


def add(kinds: Any) -> None:
    """Adds a parser for each."""
    _loadtest(kinds)
    _tracing(kinds)


def _loadtest(kinds: Any) -> None:
    loadtest = flags.kind(
        kinds,
        "loadtest",
        "what `baton loadtest` says of a server against what that server recorded",
        "About a minute.",
        plot=False,
    )
    loadtest.add_argument(
        "--rates", type=flags.numbers, default=(200, 2000), metavar="N,N", help="requests a second"
    )
    loadtest.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each rate")
    loadtest.add_argument("--output-tokens", type=int, default=8, metavar="N")


def _tracing(kinds: Any) -> None:
    tracing = flags.kind(
        kinds,
        "tracing",
        "what tracing and metrics cost, in processor time of all five processes",
        "About a quarter of an hour.",
        plot=False,
    )
    tracing.add_argument(
        "--model", default="", help="folder or hub id (default: the bundled model)"
    )
    tracing.add_argument("--transport", choices=("nixl", "loopback"), default="nixl")
    tracing.add_argument("--pairs", type=int, default=10, metavar="N", help="interleaved, 2 to 31")
    tracing.add_argument("--requests", type=int, default=64, metavar="N", help="of each side")
    tracing.add_argument("--concurrency", type=int, default=4, metavar="N", help="of each side")
    tracing.add_argument("--words", type=int, default=64, metavar="N", help="of a prompt")
    tracing.add_argument("--output-tokens", type=int, default=64, metavar="N")
