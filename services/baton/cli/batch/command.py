"""`baton batch`: reads flags, wires input, server and output, and says how it ended."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cli import access
from baton.core.errors import BatonError, InvalidArgument

if TYPE_CHECKING:
    from baton.cli.batch.asking import Outcome
    from baton.cli.batch.journal import Journal
    from baton.cli.batch.lines import Task
    from baton.cli.batch.shown import Shown

DEFAULT_ADDRESS = "127.0.0.1:8000"
CONCURRENCY = 48
STOPPED = 130


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch",
        description="Answers the lines of IN.jsonl (OpenAI's batch format) into OUT.jsonl, behind "
        "everybody else. The same command again goes on where an interrupted one ended.",
    )
    parser.add_argument("input", metavar="IN.jsonl", type=Path)
    parser.add_argument("output", metavar="OUT.jsonl", type=Path)
    parser.add_argument(
        "--errors", metavar="FILE", type=Path, help="where errors go (default: OUT.jsonl too)"
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help=f"default: where `baton up` runs, else {DEFAULT_ADDRESS}",
    )
    access.add_arguments(parser)
    parser.add_argument(
        "--concurrency", type=int, default=CONCURRENCY, metavar="N",
        help="requests at a time, at most (default %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """0 when every line has an answer, 1 when some have errors, 130 when it was stopped. Raises
    BatonError."""
    from baton.cli.batch import lines
    from baton.cli.batch.journal import Journal
    from baton.cli.batch.shown import Shown

    if args.concurrency < 1:
        raise InvalidArgument("must be at least 1", field="concurrency")
    where = access.access_of(args, DEFAULT_ADDRESS, "http")
    files = [path.resolve() for path in (args.input, args.output, args.errors) if path is not None]
    if len(set(files)) < len(files):
        raise InvalidArgument("input, output and errors must be different files", field="OUT")
    total = lines.count(args.input)
    with Journal(args.output, args.errors) as journal:
        shown = Shown(total, len(journal.answered))
        stopped = False
        try:
            stopped = not asyncio.run(_answer(args, where, journal, shown))
        except BatonError:
            print(_unfinished(args, journal, total), file=sys.stderr)
            raise
        finally:
            took = shown.close()
        if stopped:
            print(f"Stopped. {_unfinished(args, journal, total)}", file=sys.stderr)
            return STOPPED
        bad = f", {journal.num_bad} of them with errors" if journal.num_bad else ""
        print(f"{total} lines have their result{bad}. {took}", file=sys.stderr)
        return 1 if journal.num_bad else 0


async def _answer(
    args: argparse.Namespace, where: access.Access, journal: Journal, shown: Shown
) -> bool:
    """Whether it ran to its end. What ends it otherwise is a signal."""
    from baton.cli.batch.asking import BatchClient, Limits
    from baton.cli.http_client import HttpClient

    client = HttpClient(where)

    def done(outcome: Outcome) -> None:
        task = outcome.task
        good = journal.write(task.number, task.custom_id, outcome.response, outcome.error)
        shown.line(good=good, tokens=_tokens(outcome))

    asking = BatchClient(client, Limits(concurrency=args.concurrency), done)
    running = asyncio.create_task(asking.run(_unanswered(args.input, journal, shown)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        return False
    finally:
        await client.close()
    return True


def _unanswered(path: Path, journal: Journal, shown: Shown) -> Iterator[Task]:
    """Lines that can be asked. Those that cannot get their error on the way."""
    from baton.cli.batch import lines

    for line in lines.read(path):
        if journal.has(line.number, line.custom_id):
            continue
        if isinstance(line, lines.Task):
            yield line
        else:
            error = {"code": line.code, "message": line.message}
            journal.write(line.number, line.custom_id, None, error)
            shown.line(good=False, tokens=0)


def _tokens(outcome: Outcome) -> int:
    match outcome.response:
        case {"body": {"usage": {"completion_tokens": int(tokens)}}}:
            return tokens
    return 0


def _unfinished(args: argparse.Namespace, journal: Journal, total: int) -> str:
    return (
        f"{len(journal.answered)} of {total} lines have their result. The same command answers "
        f"the rest: baton batch {shlex.quote(str(args.input))} {shlex.quote(str(args.output))} …"
    )
