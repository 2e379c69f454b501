"""Reads the lines of a batch in OpenAI's input format.

One line at a time: a batch may be larger than memory. What is wrong with a line is its own error,
and stops no other line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from baton.core.errors import InvalidArgument

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


def count(path: Path) -> int:
    """How many lines are to be answered; reads the whole file. Raises InvalidArgument."""
    with _open(path) as file:
        return sum(1 for _ in _raw(file))


def read(path: Path) -> Iterator[Task | BadLine]:
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
