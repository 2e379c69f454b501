"""The `baton` command: finds the subcommand and runs it.

Subcommands import what they need when they run, so that `baton --help` and `baton chat` never load
torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec

from baton.core.errors import BatonError

COMMANDS = {
    "up": "baton.cli.up",
    "down": "baton.cli.down",
    "top": "baton.cli.top.command",
    "chat": "baton.cli.chat",
    "doctor": "baton.cli.doctor",
    "keys": "baton.cli.keys",
    "explain": "baton.cli.explaining.command",
    "replay": "baton.cli.explaining.replay_command",
    "fetch": "baton.cli.fetch",
    "batch": "baton.cli.batch.command",
}
"""Each with the module that has it."""

# Whatever measures, breaks, simulates or plans is a package of its own, which nothing here imports.
MEASURING = {
    "plan": "baton_loadtest.planner.plan",
    "simulate": "baton_loadtest.simulator.command",
    "loadtest": "baton_loadtest.load.command",
    "bench": "baton_loadtest.bench.command",
    "chaos": "baton_loadtest.chaos.command",
}
"""The commands of that package, there where it is installed."""


def commands() -> dict[str, str]:
    """Those that this installation has, each with the module that has it."""
    return COMMANDS | (MEASURING if find_spec("baton_loadtest") else {})


def build_parser(wanted: Collection[str]) -> argparse.ArgumentParser:
    """Of these commands: a command that is not wanted need not be imported."""
    parser = argparse.ArgumentParser(
        prog="baton", description="A disaggregated LLM server: every stage in its own pool."
    )
    parser.add_argument("--version", action="version", version=metadata.version("baton"))
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in wanted:
        import_module(commands()[name]).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    known = commands()
    args = build_parser(argv[:1] if argv and argv[0] in known else known).parse_args(argv)
    try:
        return int(import_module(commands()[args.command]).run(args))
    except BatonError as error:
        where = f" ({error.field})" if error.field else ""
        print(f"baton {args.command}: {error.message}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
