"""Measures again what docs/benchmarks has, and writes the tables.

    python scripts/figures.py              # all of it
    python scripts/figures.py relay cost   # some of it
    python scripts/figures.py --list

Each figure is one command of `baton`, or a script of this folder, whose --json (and --plot) goes to
docs/benchmarks. What needs
something of yours that no variable names is left out, and said.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "docs/benchmarks"


@dataclass(frozen=True, slots=True)
class Figure:
    """command: of `baton`, or a script of this folder. plot: draws one, too. takes: variables that
    it needs, put in for {NAME}. may: flags that it has when their variable is set."""

    command: str
    plot: bool = False
    takes: tuple[str, ...] = ()
    may: tuple[tuple[str, str], ...] = ()

    def words(self, name: str, given: dict[str, str]) -> list[str]:
        """Of the command, without `baton`, or without Python."""
        values = {key: given[key] for key in self.takes}
        words = [word.format(**values) for word in shlex.split(self.command)]
        for flag, variable in self.may:
            if given.get(variable):
                words += [flag, given[variable]]
        words += ["--json", f"{FOLDER}/{name}.json"]
        return [*words, "--plot", f"{FOLDER}/{name}.svg"] if self.plot else words

    @property
    def is_script(self) -> bool:
        return self.command.startswith("scripts/")

    def shown(self, words: Sequence[str]) -> str:
        """A command line, as a reader would give it."""
        return f"{'python' if self.is_script else 'baton'} {shlex.join(words)}"


_LLAMA = (("--llama", "LLAMA"),)

FIGURES = {
    "relay": Figure("bench relay --rounds 5"),
    "engine": Figure("bench engine --peers --rounds 3 --seconds 400", plot=True, may=_LLAMA),
    "engine-500m": Figure(
        "bench engine --shape 500m --requests 32 --peers --rounds 1 --seconds 400",
        plot=True,
        may=_LLAMA,
    ),
    "engine-quantised": Figure("bench engine --rounds 2 --seconds 200", plot=True, may=_LLAMA),
    "precisions": Figure("scripts/precisions.py"),
    "weights": Figure("bench weights"),
    "offline": Figure("bench offline"),
    "cost": Figure("bench cost", plot=True),
    "compiled": Figure("bench compiled"),
    "batching": Figure("bench batching", plot=True),
    "stalls": Figure("bench stalls", plot=True),
    "kv": Figure("bench kv", plot=True),
    "ranks": Figure("bench ranks --rounds 5 --shape 8m"),
    "cold": Figure("bench cold --rounds 2"),
    "drain": Figure("bench drain --prompt-tokens 800 --output-tokens 250"),
    "rebalance": Figure("bench rebalance"),
    "fabric": Figure("bench fabric --trace {TRACE}", takes=("TRACE",)),
    "overload": Figure("bench overload"),
    "fairness": Figure("bench fairness"),
    "readers": Figure("bench readers"),
    "router": Figure("bench router", may=(("--smg", "SMG"),)),
    "routing": Figure("bench routing"),
    "batch": Figure("bench batch"),
    "encode": Figure("bench encode --seconds 45"),
    "adapters": Figure("bench adapters"),
    "states": Figure("bench states --shape tiny-hybrid --prompts 512 --threads 1", plot=True),
    "speculation": Figure(
        "bench speculation --threads 1 --cpu-time --shape {LARGER} --own "
        "--draft-model services/batonlm/models/baton-tiny --rounds 3 --output-tokens 96",
        takes=("LARGER",),
    ),
    "speculation-known": Figure(
        "bench speculation --threads 1 --cpu-time --texts 'other text' --batches 32 "
        "--prompt-tokens 192 --output-tokens 128"
    ),
    "tokens": Figure("bench tokens", plot=True),
    "grammar": Figure("bench grammar", plot=True),
    "loadtest": Figure("bench loadtest"),
    "tracing": Figure("bench tracing"),
    "simulator": Figure("bench simulator --trace {TRACE}", takes=("TRACE",)),
    "simulator-1000": Figure(
        "bench simulator --trace {TRACE} --workers 1000 --copies 10 --seconds 600 --block-size 512",
        takes=("TRACE",),
    ),
    "reality": Figure("bench reality"),
    "split": Figure("bench split"),
    "scaling": Figure("bench scaling", plot=True),
    "planner": Figure(
        "bench planner --trace {CONVERSATION} --hours 24 --rate 0.6 --most 12",
        takes=("CONVERSATION",),
    ),
    "chaos-kills": Figure("chaos run --schedule kills --seed 2 --streams 1000"),
    "chaos-routers": Figure(
        "chaos run --schedule routers --streams 1150 --down 2 --concurrency 10"
    ),
    "chaos-partitions": Figure("chaos run --schedule partitions"),
    "chaos-rolling": Figure("chaos run --schedule rolling"),
    "chaos-slow-links": Figure("chaos run --schedule slow-links"),
    "chaos-tiers": Figure("chaos run --schedule tiers"),
    "chaos-hang": Figure("chaos hang --seconds 1 5 60"),
    "chaos-kv-corruptions": Figure("chaos kv corruptions"),
    "chaos-kv-clean": Figure("chaos kv clean"),
    "chaos-kv-freeze-kill": Figure("chaos kv freeze-kill"),
    "chaos-kv-late-write": Figure("chaos kv late-write"),
    "chaos-kv-cancel-storm": Figure("chaos kv cancel-storm"),
    "chaos-kv-head-of-line": Figure("chaos kv head-of-line"),
}

ELSEWHERE = {
    "cluster-scale": "python scripts/scale_on_cluster.py",
    "cluster-sizes": "python scripts/sizes_on_cluster.py",
}
"""Figures that take more than this machine, a cluster: what measures them is run by hand."""


def chosen(names: Sequence[str]) -> dict[str, Figure]:
    """Those named, all without a name. Raises SystemExit for unknown ones."""
    unknown = sorted(set(names) - FIGURES.keys())
    if unknown:
        sys.exit(f"no figure is called {', '.join(unknown)}; --list shows them")
    return {name: FIGURES[name] for name in names} if names else FIGURES


def run(figures: dict[str, Figure], given: dict[str, str]) -> list[str]:
    """One after the other. Returns what went wrong, a sentence each."""
    wrong = []
    for name, figure in figures.items():
        if missing := [variable for variable in figure.takes if not given.get(variable)]:
            wrong.append(f"{name} was left out: set {', '.join(missing)}")
            continue
        words = figure.words(name, given)
        given_to = [] if figure.is_script else ["-m", "batonlm.cli.main"]
        print(figure.shown(words), file=sys.stderr, flush=True)
        code = subprocess.run([sys.executable, *given_to, *words], cwd=ROOT, check=False).returncode
        if code:
            wrong.append(f"{name} ended with {code}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="show what there is, and measure none")
    args = parser.parse_args()
    figures = chosen(args.names)
    if args.list:
        for name, figure in figures.items():
            print(f"{name:<22} {figure.shown(shlex.split(figure.command))}")
        return
    wrong = run(figures, dict(os.environ))
    tables = subprocess.run([sys.executable, "scripts/tables.py"], cwd=ROOT, check=False)
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(1 if wrong or tables.returncode else 0)


if __name__ == "__main__":
    main()
