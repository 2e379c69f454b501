"""`baton batch`: reads flags, wires input, server and output, and says how it ended."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import math
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.progress import Task as BarTask
from rich.text import Text

from baton.cli import access
from baton.cli.http_client import ConnectionLost, HttpAnswer, HttpClient, Unreachable
from baton.core.errors import BatonError, InvalidArgument, Unauthenticated, Unavailable

# RequestWindow, how many requests of a batch may be out at a time.
#
# It opens by one for every windowful of answers, and closes by half when the server refuses: who
# shares the server with somebody more urgent has less of it, and has it back when they leave
# (additive increase, multiplicative decrease).


FIRST = 4.0
LEAST = 1.0
SHRINK = 0.5


class RequestWindow:
    """most: never more than that."""

    def __init__(self, most: int) -> None:
        self.out = 0
        self.not_before = 0.0
        """Reading of the caller's clock until which the server wants to be asked nothing."""
        self._most = float(most)
        self._limit = min(FIRST, self._most)
        self._turn = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def has_room(self, now: float) -> bool:
        return self.out < self.limit and now >= self.not_before

    def enter(self) -> int:
        """A request leaves for the server. Returns its turn, for `refused`."""
        self.out += 1
        return self._turn

    def left(self, *, answered: bool) -> None:
        """One is back; a failure says nothing about room."""
        self.out -= 1
        if answered:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def refused(self, turn: int, again_at: float) -> None:
        """One is back; the server has no room before a time. Those that left before the last cut
        do not cut again: they were refused for the same reason."""
        self.out -= 1
        self.not_before = max(self.not_before, again_at)
        if turn == self._turn:
            self._limit = max(LEAST, self._limit * SHRINK)
            self._turn += 1


# Reads the lines of a batch in OpenAI's input format.
#
# One line at a time: a batch may be larger than memory. What is wrong with a line is its own error,
# and stops no other line.


ROUTES = ("/v1/chat/completions", "/v1/completions")
LOWEST = 2**31 - 1
"""The priority of every request of a batch: smaller numbers are more urgent, and all others are."""

MAX_LINE = 16 << 20
"""Bytes; more than a router takes as a body."""

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """A line that can be asked. number: of the line, from 1. body: as it is sent."""

    number: int
    custom_id: str
    route: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot. custom_id: None when it has none. code: in OpenAI's words."""

    number: int
    custom_id: str | None
    code: str
    message: str


class _Bad(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def count_lines(path: Path) -> int:
    """How many lines are to be answered; reads the whole file. Raises InvalidArgument."""
    with _open(path) as file:
        return sum(1 for _ in _raw(file))


def read_lines(path: Path) -> Iterator[Task | BadLine]:
    """All lines in order; empty ones are passed over. Raises InvalidArgument."""
    seen: set[str] = set()
    with _open(path) as file:
        for number, line in _raw(file):
            yield _understood(number, line, seen)


def _open(path: Path) -> IO[bytes]:
    try:
        # Read twice, so a pipe is none.
        if not path.is_file():
            raise InvalidArgument(f"{path} is no file", field="IN")
        return path.open("rb")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="IN") from None


def _raw(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Numbers and lines that are not empty; None for one that is too long."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE and not line.endswith(b"\n"):
            while (more := file.readline(READ_BYTES)) and not more.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


def _understood(number: int, line: bytes | None, seen: set[str]) -> Task | BadLine:
    custom_id: str | None = None
    try:
        said = _object(line)
        given = said.get("custom_id")
        if not isinstance(given, str) or not given:
            raise _Bad("missing_custom_id", "custom_id must be a string that is not empty.")
        custom_id = given
        if custom_id in seen:
            raise _Bad("duplicate_custom_id", "An earlier line has the same custom_id.")
        seen.add(custom_id)
        if said.get("method") != "POST":
            raise _Bad("invalid_method", "method must be POST.")
        route = said.get("url")
        if route not in ROUTES:
            raise _Bad("invalid_url", f"url must be {' or '.join(ROUTES)}.")
        return Task(number, custom_id, route, _body(said.get("body")))
    except _Bad as bad:
        return BadLine(number, custom_id, bad.code, bad.message)


def _object(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise _Bad("line_too_long", f"A line must not have more than {MAX_LINE >> 20} MiB.")
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        raise _Bad("invalid_json_line", "This line is no JSON.") from None
    if not isinstance(said, dict):
        raise _Bad("invalid_json_line", "This line is no JSON object.")
    return said


def _body(body: object) -> bytes:
    if not isinstance(body, dict):
        raise _Bad("invalid_body", "body must be a JSON object.")
    if body.get("stream"):
        raise _Bad("invalid_body", "body.stream must not be set in a batch.")
    return json.dumps({**body, "priority": LOWEST}).encode()


# The output of a batch, which is also its journal.
#
# A result is one line, written in one go once it is whole, and never changed. Whatever ends the
# process, at most the last line is torn: it is cut off when the batch goes on, and what it answered
# is asked again. Which lines of the input have their result is read from the results themselves:
# the number is in `id`. One process at a time has the files: they are locked.


PREFIX = "batch_req_"
BLOCK = 1 << 16


class _Result(msgspec.Struct):
    """What is read back of a line; the rest is passed over."""

    id: str
    custom_id: str | None
    response: _Status | None = None


class _Status(msgspec.Struct):
    status_code: int


_decoder = msgspec.json.Decoder(_Result)


class Journal:
    """answered: custom_id by number of the line. num_bad: how many of these are errors. errors:
    where these go instead, if anywhere. A context manager.
    """

    def __init__(self, output: Path, errors: Path | None = None) -> None:
        """Takes up what is there. Raises InvalidArgument for files that cannot be written, that
        another process writes, or that hold something else."""
        self.answered: dict[int, str | None] = {}
        self.num_bad = 0
        self._files: list[IO[bytes]] = []
        try:
            self._output = self._open(output, "OUT")
            self._errors = self._output if errors is None else self._open(errors, "errors")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """What was written is on disk then."""
        for file in self._files:
            with file, suppress(OSError):
                os.fsync(file.fileno())

    def has(self, number: int, custom_id: str | None) -> bool:
        """Whether a line has its result. Raises InvalidArgument when that is another line's."""
        if number not in self.answered:
            return False
        if self.answered[number] != custom_id:
            raise InvalidArgument(
                f"was made from another input: line {number} had another custom_id", field="OUT"
            )
        return True

    def write(
        self,
        number: int,
        custom_id: str | None,
        response: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> bool:
        """Adds the one result of a line. Returns whether it is a good one. Raises InvalidArgument
        when it cannot be written, as on a full disk; then nothing of it is there."""
        result = {
            "id": f"{PREFIX}{number}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        good = error is None and response is not None and response["status_code"] < 400
        file = self._output if good else self._errors
        size = os.fstat(file.fileno()).st_size
        # Unbuffered, so that nothing is lost with the process; a full disk takes a part.
        left = memoryview(json.dumps(result).encode() + b"\n")
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            file.truncate(size)
            raise InvalidArgument(
                f"cannot be written: {error.strerror}", field="OUT" if good else "errors"
            ) from None
        self.answered[number] = custom_id
        self.num_bad += not good
        return good

    def _open(self, path: Path, field: str) -> IO[bytes]:
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", field=field) from None
        self._files.append(file)
        if not path.is_file():
            raise InvalidArgument(f"{path} is no file", field=field)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidArgument(
                f"{path} is being written by another batch", field=field
            ) from None
        _cut(file)
        self._take_up(path, field)
        return file

    def _take_up(self, path: Path, field: str) -> None:
        with path.open("rb") as lines:
            for place, line in enumerate(lines, 1):
                try:
                    result = _decoder.decode(line)
                    number = int(result.id.removeprefix(PREFIX))
                except (msgspec.DecodeError, ValueError):
                    raise InvalidArgument(
                        f"line {place} of {path} is no result of a batch", field=field
                    ) from None
                status = 0 if result.response is None else result.response.status_code
                self.answered[number] = result.custom_id
                self.num_bad += not 0 < status < 400


def _cut(file: IO[bytes]) -> None:
    """Takes away what comes after the last end of a line."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        file.truncate(end)


# Shows on stderr how far a batch is: a bar on a terminal, a line now and then elsewhere.


SAY_S = 10.0


class Shown:
    """total: lines of the batch; before: those that had their result when it began."""

    def __init__(self, total: int, before: int) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._began = self._said = time.monotonic()
        self._total, self._before = total, before
        self._done, self._bad, self._tokens = before, 0, 0
        self._bars = Bars(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("lines"),
            _Rate(),
            TextColumn("{task.fields[bad]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._bars.add_task("", total=total, completed=before, bad="", rate="")
        self._bars.start()

    def line(self, *, good: bool, tokens: int) -> None:
        """One more has its result."""
        self._done += 1
        self._bad += not good
        self._tokens += tokens
        bad = f"{self._bad} with errors" if self._bad else ""
        self._bars.update(self._bar, advance=1, bad=bad, rate=self._rate())
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said >= SAY_S:
            self._said = now
            left_s = (self._total - self._done) * self._elapsed_s() / (self._done - self._before)
            self._console.print(
                f"{self._done} of {self._total} lines, {self._rate()}, about {left_s:.0f} s left"
            )

    def close(self) -> str:
        """Takes the bar away. Returns how fast it went, in words."""
        self._bars.stop()
        return f"{self._elapsed_s():.1f} s: {self._rate()}"

    def _rate(self) -> str:
        elapsed_s = max(1e-9, self._elapsed_s())
        lines = (self._done - self._before) / elapsed_s
        return f"{lines:.1f} lines/s, {self._tokens / elapsed_s:.0f} tokens/s"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began


class _Rate(ProgressColumn):
    def render(self, task: BarTask) -> Text:
        return Text(str(task.fields["rate"]))


# Asks the lines of a batch over HTTP until each has its result.
#
# answered            2xx, and refusals that would come again (4xx): the line's result
# refused             429: asked again when the server says so, however often, within the window
#                     of time that a line has
# failed              5xx, 408, a connection that was lost: asked again a few times
# unreachable         nobody listens any more: waited for; then the batch ends, and the line has no
#                     result
# unknown key         401: the batch ends, and the line has no result


FAILURES = frozenset({408, 500, 502, 503, 504})
UNKNOWN_KEY = 401
REFUSED = 429
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
DEFAULT_RETRY_S = 1.0
KNOCK_S = 0.5
LOOK_S = 1.0
EXPIRED = "The server had no room for this line in all the time that it had."


@dataclass(frozen=True, slots=True)
class Limits:
    """concurrency: requests at a time, at most. attempts: of a line, those that failed included.
    request_s: time of one attempt. line_s: from a line's first attempt to its last. away_s: how
    long a server that nobody reaches is waited for.
    """

    concurrency: int = 48
    attempts: int = 6
    request_s: float = 660.0
    line_s: float = 86400.0
    away_s: float = 60.0


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """One line's result, in OpenAI's form: one of the two is not None."""

    task: Task
    response: dict[str, Any] | None
    error: dict[str, Any] | None


class BatchClient:
    """done: told every result at once, in any order. draw: a random number from 0 to 1."""

    def __init__(
        self,
        client: HttpClient,
        limits: Limits,
        done: Callable[[LineOutcome], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.num_refused = 0
        self._client = client
        self._limits = limits
        self._done = done
        self._draw = draw
        self._window = RequestWindow(limits.concurrency)
        self._freed = asyncio.Event()
        self._away_since: float | None = -math.inf
        """None while the server is there. One that was never there is not waited for."""

    async def run(self, tasks: Iterator[Task]) -> None:
        """All of them. Raises Unavailable when the server stays away, Unauthenticated when it does
        not know the key, and a BatonError that `done` raises."""
        places = asyncio.Semaphore(self._limits.concurrency)

        async def one(task: Task) -> None:
            try:
                self._done(await self._outcome(task))
            finally:
                places.release()

        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    await places.acquire()
                    group.create_task(one(task))
        except* BatonError as found:
            raise found.exceptions[0] from None

    async def _outcome(self, task: Task) -> LineOutcome:
        ends_at = time.monotonic() + self._limits.line_s
        said: HttpAnswer | str | None = None
        failed = 0
        while failed < self._limits.attempts:
            said = await self._try(task)
            if said is None:
                await self._wait_for_server()
            elif isinstance(said, HttpAnswer) and said.status == REFUSED:
                self.num_refused += 1
                if self._window.not_before >= ends_at:
                    return LineOutcome(task, None, {"code": "batch_expired", "message": EXPIRED})
            elif isinstance(said, HttpAnswer) and said.status not in FAILURES:
                break
            else:
                failed += 1
                if failed < self._limits.attempts:
                    await asyncio.sleep(self._pause_s(failed, said))
        if isinstance(said, HttpAnswer):
            return LineOutcome(task, _response(said), None)
        assert said is not None
        return LineOutcome(task, None, {"code": "connection_lost", "message": said})

    async def _try(self, task: Task) -> HttpAnswer | str | None:
        """The answer; or why there is none; or None when the server cannot be reached."""
        turn = await self._enter()
        again_at: float | None = None
        answered = False
        try:
            said = await self._client.post(task.route, task.body, self._limits.request_s)
            self._away_since = None
            answered = said.status not in FAILURES
            if said.status == UNKNOWN_KEY:
                raise Unauthenticated("is not accepted there", field="api_key")
            if said.status == REFUSED:
                again_at = time.monotonic() + _retry_after_s(said, DEFAULT_RETRY_S)
            return said
        except Unreachable:
            return None
        except ConnectionLost:
            return "The connection was lost."
        except TimeoutError:
            return f"There was no answer within {self._limits.request_s:g} s."
        finally:
            if again_at is not None:
                self._window.refused(turn, again_at)
            else:
                self._window.left(answered=answered)
            self._freed.set()

    async def _enter(self) -> int:
        while not self._window.has_room(now := time.monotonic()):
            self._freed.clear()
            pause_s = max(LOOK_S, self._window.not_before - now)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), pause_s)
        return self._window.enter()

    async def _wait_for_server(self) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since > self._limits.away_s:
            raise Unavailable(f"nothing listens on {self._client.address}")
        await asyncio.sleep(KNOCK_S)

    def _pause_s(self, failed: int, said: HttpAnswer | str) -> float:
        """Grows, and no two lines come back at once."""
        told_s = _retry_after_s(said, 0.0) if isinstance(said, HttpAnswer) else 0.0
        drawn_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**failed) * (0.5 + self._draw() / 2)
        return max(told_s, drawn_s)


def _retry_after_s(said: HttpAnswer, default_s: float) -> float:
    """As the server says, in milliseconds where it does; never less than nothing."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = said.headers.get(name, "")
        if text.isascii() and text.isdigit():
            return float(text) * unit_s
    return default_s


def _response(said: HttpAnswer) -> dict[str, Any]:
    try:
        body = json.loads(said.body)
    except ValueError:
        # Of something in between: Baton says JSON.
        body = {"error": {"message": said.body[:1024].decode(errors="replace")}}
    return {
        "status_code": said.status,
        "request_id": said.headers.get("x-request-id", ""),
        "body": body,
    }


# `baton batch`: reads flags, wires input, server and output, and says how it ended.


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

    if args.concurrency < 1:
        raise InvalidArgument("must be at least 1", field="concurrency")
    where = access.access_of(args, DEFAULT_ADDRESS, "http")
    files = [path.resolve() for path in (args.input, args.output, args.errors) if path is not None]
    if len(set(files)) < len(files):
        raise InvalidArgument("input, output and errors must be different files", field="OUT")
    total = count_lines(args.input)
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
    from baton.cli.http_client import HttpClient

    client = HttpClient(where)

    def done(outcome: LineOutcome) -> None:
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

    for line in read_lines(path):
        if journal.has(line.number, line.custom_id):
            continue
        if isinstance(line, Task):
            yield line
        else:
            error = {"code": line.code, "message": line.message}
            journal.write(line.number, line.custom_id, None, error)
            shown.line(good=False, tokens=0)


def _tokens(outcome: LineOutcome) -> int:
    match outcome.response:
        case {"body": {"usage": {"completion_tokens": int(tokens)}}}:
            return tokens
    return 0


def _unfinished(args: argparse.Namespace, journal: Journal, total: int) -> str:
    return (
        f"{len(journal.answered)} of {total} lines have their result. The same command answers "
        f"the rest: baton batch {shlex.quote(str(args.input))} {shlex.quote(str(args.output))} …"
    )
