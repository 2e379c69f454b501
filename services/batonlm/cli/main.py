"""The `baton` command: finds the subcommand and runs it.

Subcommands import their dependencies when they run, so that `baton --help` and `baton chat` never
load torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec

from batonlm.core.errors import BatonError

COMMANDS = {
    "up": ("batonlm.cli.up", "run all five stages on this machine"),
    "down": ("batonlm.cli.down", "stop what `baton up` started"),
    "top": ("batonlm.cli.top", "watch what a running Baton does"),
    "chat": ("batonlm.cli.chat", "ask a running Baton something"),
    "doctor": ("batonlm.cli.doctor", "check this machine and say what to do"),
    "keys": ("batonlm.cli.keys", "make, list and remove API keys"),
    "explain": (
        "batonlm.cli.explain",
        "where one request's time went, on which workers, and why there",
    ),
    "replay": (
        "batonlm.cli.replay",
        "make a request's tokens again, here or elsewhere",
    ),
    "fetch": ("batonlm.cli.fetch", "put a model into a cache folder, once a node"),
    "batch": ("batonlm.cli.batch", "answer a file of requests while there is idle capacity"),
}
"""Each command with its module and its help text."""

# Commands of a separate package that measures and simulates; nothing here imports it.
MEASURING = {
    "plan": ("baton_loadtest.planner.plan", "say what a model would take"),
    "simulate": ("baton_loadtest.simulator.command", "what a fleet would do with recorded traffic"),
    "loadtest": (
        "baton_loadtest.load.command",
        "send requests when they are due, and say what became of them",
    ),
    "bench": ("baton_loadtest.bench.command", "measure, and compare within one run"),
    "chaos": ("baton_loadtest.chaos.command", "break things on purpose, and count"),
}
"""Commands that exist only if that package is installed."""


def commands() -> dict[str, tuple[str, str]]:
    """Returns the commands of this installation."""
    return COMMANDS | (MEASURING if find_spec("baton_loadtest") else {})


def build_parser(wanted: Collection[str]) -> argparse.ArgumentParser:
    """Builds the parser with the names of all commands, and the arguments of the wanted ones only:
    the others need not be imported."""
    parser = argparse.ArgumentParser(
        prog="baton", description="A disaggregated LLM server: every stage in its own pool."
    )
    parser.add_argument("--version", action="version", version=metadata.version("batonlm"))
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, purpose) in commands().items():
        if name in wanted:
            import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=purpose)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser(argv[:1]).parse_args(argv)
    try:
        return int(import_module(commands()[args.command][0]).run(args))
    except BatonError as error:
        where = f" ({error.field})" if error.field else ""
        print(f"baton {args.command}: {error.message}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
