"""The `baton` command: finds the subcommand and runs it.

Subcommands import what they need when they run, so that `baton --help` and `baton chat` never load
torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from baton.core.errors import BatonError

COMMANDS = {
    "up": "up",
    "down": "down",
    "top": "top.command",
    "chat": "chat",
    "doctor": "doctor",
    "keys": "keys",
    "plan": "plan",
    "explain": "explaining.command",
    "replay": "explaining.replay_command",
    "fetch": "fetch",
    "simulate": "simulating.command",
    "batch": "batch.command",
    "loadtest": "loadtest.command",
    "bench": "bench.command",
    "chaos": "chaos.command",
}
"""Each with the module that has it."""


def build_parser() -> argparse.ArgumentParser:
    """Of all commands."""
    parser = argparse.ArgumentParser(
        prog="baton", description="A disaggregated LLM server: every stage in its own pool."
    )
    parser.add_argument("--version", action="version", version=metadata.version("baton"))
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS.values():
        import_module(f"baton.cli.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return int(import_module(f"baton.cli.{COMMANDS[args.command]}").run(args))
    except BatonError as error:
        where = f" ({error.field})" if error.field else ""
        print(f"baton {args.command}: {error.message}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
