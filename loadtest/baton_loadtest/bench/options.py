"""The flags of every benchmark, and how long each takes; imports no benchmark.

Times are estimates for the 100m shape on two otherwise idle cores.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from baton.worker.options import WorkerOptions
from baton_loadtest.bench import flags, seeing_options, simulated_options

_RING = {field.name: field.default for field in fields(WorkerOptions)}
"""What a worker has if it is not told otherwise."""


def add(kinds: Any) -> None:
    """Adds a parser for every benchmark."""
    _relay(kinds)
    _engine(kinds)
    _cost(kinds)
    _batching(kinds)
    _stalls(kinds)
    _kv(kinds)
    _drain(kinds)
    _readers(kinds)
    _overload(kinds)
    _fairness(kinds)
    _batch(kinds)
    _routing(kinds)
    _router(kinds)
    _tokens(kinds)
    _grammar(kinds)
    _cold(kinds)
    seeing_options.add(kinds)
    simulated_options.add(kinds)


def _relay(kinds: Any) -> None:
    relay = flags.kind(
        kinds, "relay", "five processes against the same engine in one process", plot=False
    )
    relay.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    relay.add_argument("--requests", type=int, default=64, metavar="N")
    relay.add_argument("--concurrency", type=int, default=16, metavar="N")
    relay.add_argument("--prompt-tokens", type=int, default=256, metavar="N")
    relay.add_argument("--output-tokens", type=int, default=64, metavar="N")
    relay.add_argument("--transport", choices=("nixl", "loopback"), default="nixl")
    relay.add_argument("--rounds", type=int, default=3, metavar="N", help="pairs, interleaved")


def _engine(kinds: Any) -> None:
    engine = flags.kind(
        kinds,
        "engine",
        "the engine against what one would run instead",
        "About 3 minutes; with --peers about 9, most of it theirs. 500m takes 40 minutes.",
    )
    flags.model(engine, threads=2)
    engine.add_argument(
        "--peers", action="store_true", help="transformers and llama.cpp take part as well"
    )
    engine.add_argument(
        "--llama-python",
        default="",
        metavar="PATH",
        help="an interpreter that has llama_cpp and gguf (default: this one, if it has llama_cpp)",
    )
    engine.add_argument(
        "--quantize",
        choices=("none", "int8"),
        default="int8",
        help="int8: Baton in int8 takes part as well (default); none: it does not",
    )
    engine.add_argument("--requests", type=int, default=32, metavar="N")
    engine.add_argument("--rounds", type=int, default=2, metavar="N", help="at most, interleaved")
    engine.add_argument(
        "--seconds",
        type=float,
        default=50.0,
        metavar="S",
        help="a contender begins no further round, nor static batch, that would not end in S",
    )
    engine.set_defaults(seed=42)


def _cost(kinds: Any) -> None:
    cost = flags.kind(
        kinds,
        "cost",
        "what a step, a prompt, the scheduler and the blocks cost",
        "About 4 minutes.",
    )
    flags.model(cost, threads=1)
    flags.device(cost)
    cost.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True)
    cost.add_argument(
        "--contexts",
        type=flags.numbers,
        default=(128, 512, 2048, 8192),
        metavar="N,N",
        help="positions",
    )
    cost.add_argument("--batches", type=flags.numbers, default=(1, 4, 16, 64), metavar="N,N")
    cost.add_argument(
        "--prompts", type=flags.numbers, default=(128, 512, 2048, 8192), metavar="N,N"
    )
    cost.add_argument("--chunks", type=flags.numbers, default=(512, 2048), metavar="N,N")
    cost.add_argument(
        "--kv-gb", type=float, default=8.0, metavar="GB", help="larger batches are left out"
    )
    cost.add_argument("--sequences", type=int, default=256, metavar="N", help="of the scheduler")
    cost.add_argument(
        "--lengths",
        type=Path,
        metavar="CSV",
        help="real requests' lengths, columns ContextTokens and GeneratedTokens (default: drawn)",
    )


def _batching(kinds: Any) -> None:
    batching = flags.kind(
        kinds, "batching", "continuous against static batching, one engine", "About 3 minutes."
    )
    flags.model(batching, threads=1)
    flags.device(batching)
    batching.add_argument("--requests", type=int, default=32, metavar="N")
    batching.add_argument("--batch", type=int, default=8, metavar="N", help="sequences at once")
    batching.set_defaults(seed=42)


def _stalls(kinds: Any) -> None:
    stalls = flags.kind(
        kinds,
        "stalls",
        "what arriving long prompts do to sequences that run",
        "About 4 minutes.",
    )
    flags.model(stalls, threads=1)
    flags.device(stalls)
    stalls.add_argument("--running", type=int, default=16, metavar="N", help="sequences that run")
    stalls.add_argument("--output-tokens", type=int, default=160, metavar="N", help="of each")
    stalls.add_argument("--prompt-tokens", type=int, default=4096, metavar="N")
    stalls.add_argument("--arrivals", type=int, default=3, metavar="N", help="long prompts")
    stalls.add_argument("--chunks", type=flags.numbers, default=(256, 512), metavar="N,N")


def _kv(kinds: Any) -> None:
    kv = flags.kind(
        kinds, "kv", "what a hand-over costs, and what of it is hidden", "About 3 minutes."
    )
    flags.model(kv, threads=1)
    kv.add_argument(
        "--sizes",
        type=flags.numbers,
        default=(1, 2, 4, 8, 16, 32, 64),
        metavar="N,N",
        help="megabytes",
    )
    kv.add_argument(
        "--transports",
        type=flags.names("nixl", "loopback"),
        default=("nixl", "loopback"),
        metavar="T,T",
        help="nixl, loopback; the first one also for digests and for hiding",
    )
    kv.add_argument("--prompt-tokens", type=int, default=4096, metavar="N")
    kv.add_argument("--chunks", type=flags.numbers, default=(512, 256), metavar="N,N")
    kv.add_argument("--rounds", type=int, default=3, metavar="N", help="prompts of each chunk size")
    kv.add_argument("--slots", type=int, default=_RING["slots"], metavar="N", help="of a ring")
    kv.add_argument("--slot-mib", type=int, default=_RING["slot_mib"], metavar="MIB")


def _drain(kinds: Any) -> None:
    drain = flags.kind(
        kinds,
        "drain",
        "how long streams pause when their decode worker leaves, with KV moved and without",
        "About 6 minutes.",
    )
    flags.model(drain, threads=1)
    drain.add_argument("--transport", choices=("nixl", "loopback"), default="nixl")
    drain.add_argument("--running", type=int, default=16, metavar="N", help="streams")
    drain.add_argument("--prompt-tokens", type=int, default=1500, metavar="N")
    drain.add_argument("--output-tokens", type=int, default=400, metavar="N", help="of each")


def _readers(kinds: Any) -> None:
    readers = flags.kind(
        kinds,
        "readers",
        "what readers that stall and senders that crawl cost everybody else",
        "About 4 minutes.",
        plot=False,
    )
    readers.add_argument("--stalled", type=int, default=200, metavar="N", help="readers")
    readers.add_argument("--slow", type=int, default=500, metavar="N", help="senders")
    readers.add_argument("--streams", type=int, default=16, metavar="N", help="neighbours")
    readers.add_argument("--output-tokens", type=int, default=400, metavar="N", help="of each")
    readers.add_argument("--step-ms", type=float, default=20.0, metavar="MS")
    readers.add_argument(
        "--limit-s",
        type=float,
        default=30.0,
        metavar="S",
        help="the router's limit for a reader without progress (default: its own default)",
    )
    readers.add_argument("--rounds", type=int, default=5, metavar="N", help="pairs, in turns")


def _overload(kinds: Any) -> None:
    overload = flags.kind(
        kinds,
        "overload",
        "what becomes of goodput, refusals and memory at up to ten times capacity",
        "About 5 minutes.",
        plot=False,
    )
    _served(overload)
    overload.add_argument(
        "--factors",
        type=flags.factors,
        default=(0.5, 1.0, 2.0, 5.0, 10.0),
        metavar="F,F",
        help="of capacity",
    )


def _fairness(kinds: Any) -> None:
    fairness = flags.kind(
        kinds,
        "fairness",
        "what one tenant's floods and attacks do to another, with two routers",
        "About 6 minutes.",
        plot=False,
    )
    _served(fairness)
    fairness.set_defaults(seconds=40.0)


def _batch(kinds: Any) -> None:
    batch = flags.kind(
        kinds,
        "batch",
        "what interactive streams notice of a batch beside them",
        "About 3 minutes.",
        plot=False,
    )
    batch.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    batch.add_argument("--target-ms", type=float, default=50.0, metavar="MS", help="inter_token_ms")
    batch.add_argument("--streams", type=int, default=4, metavar="N", help="interactive, at a time")
    batch.add_argument("--requests", type=int, default=24, metavar="N", help="of each turn")
    batch.add_argument("--prompt-tokens", type=int, default=64, metavar="N")
    batch.add_argument("--output-tokens", type=int, default=96, metavar="N")
    batch.add_argument("--rounds", type=int, default=3, metavar="N", help="pairs, in turns")


def _served(parser: argparse.ArgumentParser) -> None:
    """What the benchmarks with arriving requests have in common."""
    parser.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--transport", choices=("nixl", "loopback"), default="nixl")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each load")
    parser.add_argument(
        "--queue-s", type=float, default=0.5, metavar="S", help="the routers' max_queue_s"
    )
    parser.add_argument(
        "--first-s", type=float, default=2.0, metavar="S", help="objective: to the first token"
    )
    parser.add_argument(
        "--between-s",
        type=float,
        default=0.25,
        metavar="S",
        help="objective: between tokens, on average of a request",
    )


def _routing(kinds: Any) -> None:
    routing = flags.kind(
        kinds,
        "routing",
        "one routing decision over many workers, and the prefix index's memory",
        "About a minute.",
        plot=False,
    )
    routing.add_argument(
        "--workers", type=int, default=1000, metavar="N", help="half prefill, half decode"
    )
    routing.add_argument("--tokens", type=int, default=100_000, metavar="N", help="of a prompt")
    routing.add_argument("--decisions", type=int, default=2000, metavar="N")


def _router(kinds: Any) -> None:
    router = flags.kind(
        kinds,
        "router",
        "what the router adds to the first token's time, and its CPU time per token",
        "About 2 minutes.",
        plot=False,
    )
    router.add_argument(
        "--requests", type=int, default=300, metavar="N", help="whose first token is timed"
    )
    router.add_argument("--streams", type=int, default=5000, metavar="N", help="at once, at most")
    router.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="that streams are measured for"
    )


def _tokens(kinds: Any) -> None:
    tokens = flags.kind(
        kinds,
        "tokens",
        "tokenizer and detokenizer workers against the same library in one process",
        "About 2 minutes.",
    )
    tokens.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    tokens.add_argument(
        "--sizes",
        type=flags.numbers,
        default=tuple(4**n for n in range(4, 11)),
        metavar="N,N",
        help="bytes of text in a request",
    )
    tokens.add_argument(
        "--streams", type=flags.numbers, default=(1, 4, 16, 64, 256), metavar="N,N", help="at once"
    )
    tokens.add_argument(
        "--seconds", type=float, default=1.5, metavar="S", help="that each point is measured for"
    )


def _grammar(kinds: Any) -> None:
    grammar = flags.kind(
        kinds,
        "grammar",
        "what following a grammar costs: compiling it, each mask, and whole steps",
        "About 3 minutes, on the bundled model and one of a large vocabulary.",
    )
    flags.model(grammar, threads=2)
    grammar.set_defaults(shape="wide")
    grammar.add_argument("--batch", type=int, default=16, metavar="N", help="answers at once")
    grammar.add_argument("--tokens", type=int, default=120, metavar="N", help="of an answer")


def _cold(kinds: Any) -> None:
    cold = flags.kind(
        kinds,
        "cold",
        "reading, checking and loading weights, from disk and from memory",
        "About 2 minutes, and as much to build the model the first time.",
        plot=False,
    )
    flags.model(cold, threads=2)
    cold.set_defaults(shape="500m")
    cold.add_argument("--rounds", type=int, default=3, metavar="N", help="interleaved")
