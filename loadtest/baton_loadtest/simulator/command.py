"""`baton simulate`: simulates a fleet with traffic from a file and shows the figures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_loadtest import SPEED, TRACE

if TYPE_CHECKING:
    from baton_loadtest.simulator.requests import Record


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        description="Runs recorded traffic through a simulated fleet: Baton's own schedulers and "
        "routing policy, with steps that take as long as a file of measured speeds says.",
    )
    parser.add_argument(
        "--trace", type=Path, default=TRACE, metavar="FILE",
        help="Mooncake's JSON lines or Azure's CSV (default: two minutes of bundled traffic)",
    )  # fmt: skip
    parser.add_argument(
        "--speed", type=Path, default=SPEED, metavar="FILE.json",
        help="what the workers can do, see docs/simulator.md (default: the bundled model on a "
        "core)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", type=int, default=0, metavar="N",
        help="prefill workers; 0 (default): decode workers prefill what they decode",
    )  # fmt: skip
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="F", help="times the trace's (default 1)"
    )
    parser.add_argument(
        "--lengths", type=float, default=1.0, metavar="F",
        help="times the trace's tokens, a multiple of 0.125 (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--copies", type=int, default=1, metavar="N",
        help="of the trace side by side, which share nothing (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="of traffic (default: all)"
    )
    parser.add_argument(
        "--local-prefill-tokens", type=int, default=-1, metavar="N",
        help="as the router's option (default -1: by speed)",
    )  # fmt: skip
    parser.add_argument(
        "--routers", type=int, default=1, metavar="N", help="that share the traffic (default 1)"
    )
    parser.add_argument(
        "--max-queue-s", type=float, default=10.0, metavar="S",
        help="as the router's option (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--target", type=float, nargs=2, metavar=("TTFT_S", "TOKEN_S"),
        help="also tell how many requests a second get their first token, and the others on "
        "average, within so many seconds",
    )  # fmt: skip
    parser.add_argument(
        "--drafts-right", type=float, metavar="P",
        help="decode workers draft tokens, of which a part P is right (default: as in the file of "
        "speeds, or none)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--requests", type=Path, metavar="FILE", help="write each request's fate here, a line each"
    )


def run(args: argparse.Namespace) -> int:
    """Raises InvalidArgument."""
    from baton_loadtest import report, traces
    from baton_loadtest.report import Result
    from baton_loadtest.simulator.calibration import read_speeds
    from baton_loadtest.simulator.settings import FleetFacts, RouterFacts
    from baton_loadtest.simulator.simulation import Simulation
    from baton_loadtest.simulator.summary import Target, figures, goodput, summary
    from baton_loadtest.simulator.traffic import Scale, traced_requests
    from batonlm.core.routing.routing import RoutingPolicy

    scale = Scale(args.rate, args.lengths, args.copies, args.seconds)
    known = read_speeds(args.speed)
    decode = known.decode
    if args.drafts_right is not None:
        decode = replace(decode, drafts_right=args.drafts_right)
    facts = FleetFacts(
        known.prefill,
        decode,
        args.prefill,
        args.decode,
        known.kv_bytes,
        known.max_model_len,
        RouterFacts(
            RoutingPolicy(args.local_prefill_tokens), args.routers, max_queue_s=args.max_queue_s
        ),
    )
    traffic = traced_requests(traces.read(args.trace).requests, scale)
    began = time.process_time()
    shown = _progress(len(traffic)) if sys.stderr.isatty() else lambda now, done: None
    outcome = Simulation(facts).run(traffic, progress=shown)
    took_s = time.process_time() - began
    found = figures(summary(facts, outcome))
    if args.target:
        rate = goodput(outcome.records, Target(*args.target), outcome.end)
        found.append(Result("requests within the target", rate, "/s"))
    found.append(Result("CPU time of the simulation", took_s, "s"))
    print(report.table(found))
    if args.json:
        report.write(args.json, 0, found)
        print(f"written to {args.json}", file=sys.stderr)
    if args.requests:
        args.requests.parent.mkdir(parents=True, exist_ok=True)
        with args.requests.open("w", encoding="utf-8") as file:
            for record in outcome.records:
                file.write(json.dumps(_line(record)) + "\n")
    return 0


def _progress(total: int) -> Any:
    def show(now: float, done: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} requests, {now:.0f} s", end=end, file=sys.stderr, flush=True)

    return show


def _line(record: Record) -> dict[str, Any]:
    """Times are seconds from the start; gaps: [middle of the class in seconds, count]."""
    from baton_loadtest.simulator.requests import middle

    return {
        "number": record.number,
        "arrived_at_s": record.request.arrival,
        "input_tokens": record.request.input_tokens,
        "output_tokens": record.tokens,
        "placed_at_s": record.placed,
        "first_token_at_s": record.first_token,
        "ended_at_s": record.ended,
        "prefill": record.prefill,
        "decode": record.decode,
        "cached_tokens": record.cached_tokens,
        "moved_tokens": record.moved_tokens,
        "attempts": record.attempts,
        "refused": record.refused,
        "gaps": [[middle(which), count] for which, count in sorted(record.gaps.items())],
    }
