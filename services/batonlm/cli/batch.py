"""`baton batch`: sends the requests of a file in OpenAI's batch format and writes the results."""

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

from batonlm.cli import access
from batonlm.cli.http_client import ConnectionLost, HttpAnswer, HttpClient, Unreachable
from batonlm.core.errors import BatonError, InvalidArgument, Unauthenticated, Unavailable

FIRST = 4.0
LEAST = 1.0
SHRINK = 0.5


class RequestWindow:
    """Limits how many requests of a batch run at a time, up to `most`.

    The window grows by one for every window of answers, and is halved when the server refuses
    (additive increase, multiplicative decrease). So a batch uses less of a server while more urgent
    clients use it, and more when they leave.
    """

    def __init__(self, most: int) -> None:
        self.out = 0
        self.not_before = 0.0
        """Reading of the caller's clock until which the server accepts no request."""
        self._most = float(most)
        self._limit = min(FIRST, self._most)
        self._turn = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def has_room(self, now: float) -> bool:
        return self.out < self.limit and now >= self.not_before

    def enter(self) -> int:
        """Counts a request that is sent. Returns its turn, for `refused`."""
        self.out += 1
        return self._turn

    def left(self, *, answered: bool) -> None:
        """Counts a request that ended. A failure does not change the window."""
        self.out -= 1
        if answered:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def refused(self, turn: int, again_at: float) -> None:
        """Counts a request that the server refused until again_at. Requests sent before the last
        reduction do not reduce it again: they were refused for the same reason."""
        self.out -= 1
        self.not_before = max(self.not_before, again_at)
        if turn == self._turn:
            self._limit = max(LEAST, self._limit * SHRINK)
            self._turn += 1


ROUTES = ("/v1/chat/completions", "/v1/completions")
LOWEST = 2**31 - 1
"""The priority of every request of a batch: the lowest (smaller numbers are more urgent)."""

MAX_LINE = 16 << 20
"""In bytes; a router accepts no body that large."""

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """A valid line."""

    number: int
    """Of the line, from 1."""
    custom_id: str
    route: str
    body: bytes
    """The HTTP body to send."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line."""

    number: int
    custom_id: str | None
    """None if the line has none."""
    code: str
    """OpenAI's error code."""
    message: str


class _Bad(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def count_lines(path: Path) -> int:
    """Reads the whole file and returns the number of lines to answer. Raises InvalidArgument."""
    with _open(path) as file:
        return sum(1 for _ in _raw(file))


def read_lines(path: Path) -> Iterator[Task | BadLine]:
    """Yields all lines in order, without empty ones. Raises InvalidArgument for the file; an
    invalid line is yielded and does not stop others. Reads one line at a time, because a batch may
    be larger than memory."""
    seen: set[str] = set()
    with _open(path) as file:
        for number, line in _raw(file):
            yield _understood(number, line, seen)


def _open(path: Path) -> IO[bytes]:
    try:
        # The file is read twice, so it cannot be a pipe.
        if not path.is_file():
            raise InvalidArgument(f"{path} is no file", field="IN")
        return path.open("rb")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="IN") from None


def _raw(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yields numbers and lines that are not empty; None for a line that is too long."""
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
        fields = _object(line)
        given = fields.get("custom_id")
        if not isinstance(given, str) or not given:
            raise _Bad("missing_custom_id", "custom_id must be a string that is not empty.")
        custom_id = given
        if custom_id in seen:
            raise _Bad("duplicate_custom_id", "An earlier line has the same custom_id.")
        seen.add(custom_id)
        if fields.get("method") != "POST":
            raise _Bad("invalid_method", "method must be POST.")
        route = fields.get("url")
        if route not in ROUTES:
            raise _Bad("invalid_url", f"url must be {' or '.join(ROUTES)}.")
        return Task(number, custom_id, route, _body(fields.get("body")))
    except _Bad as bad:
        return BadLine(number, custom_id, bad.code, bad.message)


def _object(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise _Bad("line_too_long", f"A line must not have more than {MAX_LINE >> 20} MiB.")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise _Bad("invalid_json_line", "This line is no JSON.") from None
    if not isinstance(fields, dict):
        raise _Bad("invalid_json_line", "This line is no JSON object.")
    return fields


def _body(body: object) -> bytes:
    if not isinstance(body, dict):
        raise _Bad("invalid_body", "body must be a JSON object.")
    if body.get("stream"):
        raise _Bad("invalid_body", "body.stream must not be set in a batch.")
    return json.dumps({**body, "priority": LOWEST}).encode()


PREFIX = "batch_req_"
BLOCK = 1 << 16


class _Result(msgspec.Struct):
    """The fields of a result that are read back."""

    id: str
    custom_id: str | None
    response: _Status | None = None


class _Status(msgspec.Struct):
    status_code: int


_decoder = msgspec.json.Decoder(_Result)


class Journal:
    """The output of a batch, which is also its journal. A context manager.

    A result is one line, written at once when it is complete, and never changed. So if the process
    dies, at most the last line is torn: the next run cuts it off and sends that request again.
    Which input lines have their results is read from the results: `id` has the line's number. The
    files are locked, so that only one process writes them.
    """

    def __init__(self, output: Path, errors: Path | None = None) -> None:
        """Reads existing results. Errors go to `errors`, if given. Raises InvalidArgument for files
        that cannot be written, that another process writes, or that contain something else."""
        self.answered: dict[int, str | None] = {}
        """The custom_id by number of each line with a result."""
        self.num_bad = 0
        """How many of these results are errors."""
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
        """Closes the files, after all results are on disk."""
        for file in self._files:
            with file, suppress(OSError):
                os.fsync(file.fileno())

    def has(self, number: int, custom_id: str | None) -> bool:
        """Returns whether a line has a result. Raises InvalidArgument if it is another line's."""
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
        """Writes the result of a line. Returns whether it is a success. Raises InvalidArgument if
        it cannot be written, as on a full disk; no part of it remains then."""
        result = {
            "id": f"{PREFIX}{number}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        good = error is None and response is not None and response["status_code"] < 400
        file = self._output if good else self._errors
        size = os.fstat(file.fileno()).st_size
        # Unbuffered, so that nothing is lost with the process. A full disk takes only a part.
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
    """Removes what follows the last complete line."""
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


SAY_S = 10.0


class Shown:
    """Shows the progress on stderr: a bar on a terminal, otherwise a line now and then.

    total: lines of the batch; before: lines that had their result at the start.
    """

    def __init__(self, total: int, before: int) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._began = self._shown_at = time.monotonic()
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
        """Counts a line that has its result."""
        self._done += 1
        self._bad += not good
        self._tokens += tokens
        bad = f"{self._bad} with errors" if self._bad else ""
        self._bars.update(self._bar, advance=1, bad=bad, rate=self._rate())
        now = time.monotonic()
        if not self._console.is_terminal and now - self._shown_at >= SAY_S:
            self._shown_at = now
            left_s = (self._total - self._done) * self._elapsed_s() / (self._done - self._before)
            self._console.print(
                f"{self._done} of {self._total} lines, {self._rate()}, about {left_s:.0f} s left"
            )

    def close(self) -> str:
        """Removes the bar. Returns the speed, in words."""
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
    """Limits of a batch."""

    concurrency: int = 48
    """Maximum number of requests at a time."""
    attempts: int = 6
    """Maximum number of failed attempts at a line."""
    request_s: float = 660.0
    """Time limit of one attempt."""
    line_s: float = 86400.0
    """Time from a line's first attempt to its last."""
    away_s: float = 60.0
    """How long to wait for a server that cannot be reached."""


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """One line's result in OpenAI's form: either response or error is not None."""

    task: Task
    response: dict[str, Any] | None
    error: dict[str, Any] | None


class BatchClient:
    """Sends the requests of a batch over HTTP until each has its result.

    done: called with each result at once, in any order. draw: returns a random number from 0 to 1.

    - 2xx, and 4xx that a retry would not change: the line's result.
    - 429: retried when the server says so, any number of times within `line_s`.
    - 5xx, 408, a lost connection: retried up to `attempts` times.
    - The server cannot be reached: after `away_s` the batch ends, and the line has no result.
    - 401: the batch ends, and the line has no result.
    """

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
        self.away_since: float | None = -math.inf
        """None while the server can be reached. There is no waiting for one never reached."""

    async def run(self, tasks: Iterator[Task]) -> None:
        """Sends all requests. Raises Unavailable if the server cannot be reached, Unauthenticated
        if it does not accept the key, and BatonErrors that `done` raises."""
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
        answer: HttpAnswer | str | None = None
        failed = 0
        while failed < self._limits.attempts:
            answer = await self._try(task)
            if answer is None:
                await self._wait_for_server()
            elif isinstance(answer, HttpAnswer) and answer.status == REFUSED:
                self.num_refused += 1
                if self._window.not_before >= ends_at:
                    return LineOutcome(task, None, {"code": "batch_expired", "message": EXPIRED})
            elif isinstance(answer, HttpAnswer) and answer.status not in FAILURES:
                break
            else:
                failed += 1
                if failed < self._limits.attempts:
                    await asyncio.sleep(self._pause_s(failed, answer))
        if isinstance(answer, HttpAnswer):
            return LineOutcome(task, _response(answer), None)
        assert answer is not None
        return LineOutcome(task, None, {"code": "connection_lost", "message": answer})

    async def _try(self, task: Task) -> HttpAnswer | str | None:
        """Returns the answer, or why there is none, or None if the server cannot be reached."""
        turn = await self._enter()
        again_at: float | None = None
        answered = False
        try:
            answer = await self._client.post(task.route, task.body, self._limits.request_s)
            self.away_since = None
            answered = answer.status not in FAILURES
            if answer.status == UNKNOWN_KEY:
                raise Unauthenticated("is not accepted there", field="api_key")
            if answer.status == REFUSED:
                again_at = time.monotonic() + _retry_after_s(answer, DEFAULT_RETRY_S)
            return answer
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
        if self.away_since is None:
            self.away_since = now
        if now - self.away_since > self._limits.away_s:
            raise Unavailable(f"nothing listens on {self._client.address}")
        await asyncio.sleep(KNOCK_S)

    def _pause_s(self, failed: int, answer: HttpAnswer | str) -> float:
        """Returns a pause that grows, with a random part, so that lines do not retry together."""
        wanted_s = _retry_after_s(answer, 0.0) if isinstance(answer, HttpAnswer) else 0.0
        drawn_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**failed) * (0.5 + self._draw() / 2)
        return max(wanted_s, drawn_s)


def _retry_after_s(answer: HttpAnswer, default_s: float) -> float:
    """Returns the server's hint, in milliseconds if given; at least 0."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = answer.headers.get(name, "")
        if text.isascii() and text.isdigit():
            return float(text) * unit_s
    return default_s


def _response(answer: HttpAnswer) -> dict[str, Any]:
    try:
        body = json.loads(answer.body)
    except ValueError:
        # The answer of a proxy: Baton sends JSON.
        body = {"error": {"message": answer.body[:1024].decode(errors="replace")}}
    return {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": body,
    }


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
    """Returns 0 if every line has an answer, 1 if some have errors, 130 if it was stopped. Raises
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
    """Returns whether all lines were processed; False after a signal."""
    from batonlm.cli.http_client import HttpClient

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
    """Yields valid lines without a result. Invalid lines get their error here."""

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
