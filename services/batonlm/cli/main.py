"""The `baton` command: finds the subcommand and runs it.

Subcommands import their dependencies when they run, so that `baton --help` and `baton chat` never
load torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Collection, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NoReturn

from batonlm.core.errors import BatonError

COMMANDS = {
    "up": ("batonlm.cli.up", "run all five stages on this machine"),
    "down": ("batonlm.cli.down", "stop what `baton up` started"),
    "status": ("batonlm.cli.status", "list what `baton up` runs on this machine"),
    "top": ("batonlm.cli.top", "watch what a running Baton does"),
    "chat": ("batonlm.cli.chat", "ask a running Baton something"),
    "doctor": ("batonlm.cli.doctor", "check this machine and say what to do"),
    "keys": ("batonlm.cli.keys", "make, list and remove API keys"),
    "route": ("batonlm.cli.route", "say which models a name stands for, by weights"),
    "explain": (
        "batonlm.cli.explain",
        "where one request's time went, on which workers, and why there",
    ),
    "replay": (
        "batonlm.cli.replay",
        "make a request's tokens again, here or elsewhere",
    ),
    "fetch": ("batonlm.cli.fetch", "put a model into a cache folder, once a node"),
    "push": ("batonlm.cli.push", "put a model or an adapter into an object store"),
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


class Parser(argparse.ArgumentParser):
    """Reports an unknown argument with the usage of the command that it was given to, and the most
    similar known one. argparse leaves this to the outermost parser, which knows neither."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        found, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown argument {unknown[0]}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with 2."""
        self.print_usage(sys.stderr)
        complain(self.prog, message)
        sys.exit(2)


def complain(command: str, message: str) -> None:
    """Prints `command: message` on stderr; on a terminal in lines that end between words."""
    text = f"{command}: {message}"
    if sys.stderr.isatty():
        width = max(20, shutil.get_terminal_size().columns - 1)
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def build_parser(wanted: Collection[str]) -> Parser:
    """Builds the parser with the names of all commands, and the arguments of the wanted ones only:
    the others need not be imported."""
    parser = Parser(
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
    try:
        try:
            return _run(argv)
        finally:
            # Output that is still buffered would fail after this function, with a traceback.
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Nothing is left for the flush at exit to fail on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str]) -> int:
    parser = build_parser(argv[:1])
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    try:
        return int(import_module(commands()[args.command][0]).run(args))
    except BatonError as error:
        where = f" ({error.field})" if error.field else ""
        complain(f"baton {args.command}", f"{error.message}{where}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
