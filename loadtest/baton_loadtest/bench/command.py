"""`baton bench`: finds the benchmark, shows its figures, writes and plots them.

A benchmark is a module of this package with `OPTIONS`, `PLOTS` (whether it has charts) and
`measure(args)`, which returns a Report. A module is imported only when its benchmark is named.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from baton_loadtest import report
from baton_loadtest.bench import options

BENCHMARKS = {
    "relay": "five processes against the same engine in one process",
    "engine": "the engine against what one would run instead (3 minutes; with --peers 9, and with "
    "--shape 500m 40)",
    "offline": "a model in one process (`batonlm.LLM`) against `baton up` with its client, and "
    "transformers (3 minutes)",
    "cost": "what a step, a prompt, the scheduler and the blocks cost (4 minutes)",
    "compiled": "the scheduler and the KV cache with compiled modules against the same sources "
    "interpreted (a minute)",
    "batching": "continuous against static batching, one engine (3 minutes)",
    "speculation": "what drafts gain where a text repeats itself, and cost where not (9 minutes)",
    "stalls": "what arriving long prompts do to sequences that run (4 minutes)",
    "kv": "what a hand-over costs, and what of it is hidden (3 minutes)",
    "ranks": "a model on several ranks of this machine, and what their machinery costs a step "
    "(2 minutes)",
    "weights": "what weights that stay quantised take and cost, by the type of computing "
    "(4 minutes)",
    "drain": "how long streams pause when their decode worker leaves, with KV moved and without "
    "(6 minutes)",
    "rebalance": "what moving running sequences does when decode grows from 2 to 4 workers "
    "(3 minutes)",
    "fabric": "what collecting prefixes from other workers' caches saves, in conversations of "
    "Mooncake's trace (6 minutes)",
    "readers": "what readers that stall and senders that crawl cost everybody else (4 minutes)",
    "overload": "what becomes of goodput, refusals and memory at up to ten times capacity "
    "(5 minutes)",
    "fairness": "what one tenant's floods and attacks do to another, with two routers (6 minutes)",
    "batch": "what interactive streams notice of a batch beside them (3 minutes)",
    "encode": "what a large job of vectors does to chats beside it (3 minutes)",
    "routing": "one routing decision over many workers, and the prefix index's memory (a minute)",
    "router": "what the router adds to the first token's time, and its CPU time per token "
    "(2 minutes)",
    "tokens": "tokenizer and detokenizer workers against the same library in one process "
    "(2 minutes)",
    "cascade": "what asking a small model first keeps of a large one's answers (5 minutes)",
    "states": "what a kept copy of a state saves the next turn of a conversation (3 minutes)",
    "adapters": "what LoRA adapters cost decode, by how many a batch mixes (2 minutes)",
    "grammar": "what following a grammar costs: compiling it, each mask, and whole steps, on the "
    "bundled model and one of a large vocabulary (3 minutes)",
    "cold": "reading, checking and loading weights, from disk and from memory (2 minutes)",
    "loadtest": "what `baton loadtest` reports of a server against what that server recorded "
    "(a minute)",
    "tracing": "what tracing and metrics cost, in processor time of all five processes "
    "(a quarter of an hour)",
    "simulator": "what simulating a fleet takes, with made-up speeds (3 minutes)",
    "scaling": "what becomes of bursts where simulated fleets grow by leading signals, and by how "
    "busy they are (3 minutes)",
    "planner": "a day of traffic on simulated fleets that the planner, an HPA or nobody sizes "
    "(5 minutes)",
    "reality": "what the simulator predicts against what a Baton on this machine does "
    "(half an hour)",
    "split": "what `baton plan split` says of three workloads against both set-ups, really run "
    "(half an hour)",
}
"""What each benchmark measures, and its duration on two otherwise idle cores."""


class _BenchParser(argparse.ArgumentParser):
    """The parser of one benchmark, which loads that module's options when it is used."""

    bench = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.bench:
            module = import_module(f"baton_loadtest.bench.{self.bench}")
            plot = (options.PLOT,) if module.PLOTS else ()
            options.add(self, (*options.COMMON, *plot, *module.OPTIONS))
            self.set_defaults(**({} if plot else {"plot": None}))
            self.bench = ""
        return super().parse_known_args(args, namespace)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench")
    kinds = parser.add_subparsers(
        dest="bench", metavar="BENCH", required=True, parser_class=_BenchParser
    )
    for name, what in BENCHMARKS.items():
        kinds.add_parser(name, help=what, description=f"Measures {what}.").bench = name


def run(args: argparse.Namespace) -> int:
    """A missed goal is printed, and is no failure."""
    if args.plot:
        report.check_plots()
    found: report.Report = import_module(f"baton_loadtest.bench.{args.bench}").measure(args)
    print(report.table(found.results))
    if args.json:
        report.write(args.json, args.seed, found.results)
        print(f"written to {args.json}", file=sys.stderr)
    if args.plot:
        report.draw(args.plot, found.charts)
        print(f"drawn in {args.plot}", file=sys.stderr)
    return 0
