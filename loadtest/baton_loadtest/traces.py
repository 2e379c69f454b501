"""Reads recorded traffic, Mooncake's JSON lines or Azure's CSV, and reports broken lines.

Mooncake: one object per line with timestamp (ms), input_length, output_length, and hash_ids, one
per 512 tokens of the prompt (the last may have fewer); equal ids mean equal tokens.
Azure: columns TIMESTAMP, ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from batonlm.core.errors import InvalidArgument

BLOCK = 512
"""Tokens per hash_id of Mooncake."""

MOST_TOKENS = 100_000_000
SAID = 3
"""How many broken lines are reported in full; the others are counted."""

Row = TypeVar("Row")

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request."""

    at_s: float
    """On the trace's own clock."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of 512 tokens; empty if the trace has none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace."""

    requests: tuple[Recorded, ...]
    broken: tuple[str, ...] = ()
    """Descriptions of the skipped lines."""


class _Broken(Exception):
    """A field, and what is wrong with it."""


def read(path: Path, *, skip_broken: bool = False) -> Trace:
    """Reads a whole file. Its first line determines its kind.

    Raises InvalidArgument (field "trace") for a file that is unreadable, of unknown kind or without
    requests, and for broken lines that are not to be skipped, with their numbers.
    """
    requests: list[Recorded] = []
    broken: list[str] = []
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            first = file.readline().strip()
            file.seek(0)
            if first.startswith("{"):
                found = _each(_lines(file), mooncake)
            elif first.removeprefix("\ufeff").split(",")[: len(_COLUMNS)] == list(_COLUMNS):
                found = _each(_rows(file), _azure)
            else:
                raise InvalidArgument(
                    f"{path}, line 1: neither an object of Mooncake's nor the columns "
                    f"{','.join(_COLUMNS)} of Azure's",
                    field="trace",
                )
            for number, request in found:
                if isinstance(request, Recorded):
                    requests.append(request)
                else:
                    broken.append(f"{path}, line {number}: {request}")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="trace") from None
    except csv.Error:
        raise InvalidArgument(f"{path} is no CSV file", field="trace") from None
    if broken and not skip_broken:
        more = f"; and {len(broken) - SAID} more" if len(broken) > SAID else ""
        raise InvalidArgument("; ".join(broken[:SAID]) + more, field="trace")
    if not requests:
        raise InvalidArgument(f"{path} has no request in it", field="trace")
    return Trace(tuple(requests), tuple(broken))


def _each(
    rows: Iterator[tuple[int, Row]], parse: Callable[[Row], Recorded]
) -> Iterator[tuple[int, Recorded | str]]:
    """Yields requests, or what is wrong with their lines."""
    for number, row in rows:
        try:
            yield number, parse(row)
        except _Broken as what:
            yield number, str(what)


def _lines(file: Iterator[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _rows(file: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    rows = csv.reader(file)
    next(rows)
    return ((rows.line_num, row) for row in rows if row)


def mooncake(line: str) -> Recorded:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise _Broken("is no JSON") from None
    if not isinstance(fields, dict):
        raise _Broken("is no JSON object")
    at_ms = fields.get("timestamp")
    # This comparison also rejects NaN.
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < 1e15:
        raise _Broken("timestamp: must be milliseconds, 0 or more")
    prompt_tokens = _count(fields, "input_length", least=1)
    output_tokens = _count(fields, "output_length", least=0)
    blocks = fields.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(each) is int for each in blocks):
        raise _Broken("hash_ids: must be a list of whole numbers")
    if len(blocks) != -(-prompt_tokens // BLOCK):
        raise _Broken(
            f"hash_ids: {len(blocks)} of them, where input_length {prompt_tokens} has "
            f"{-(-prompt_tokens // BLOCK)} blocks of {BLOCK}"
        )
    return Recorded(at_ms / 1000, prompt_tokens, output_tokens, tuple(blocks))


def _count(fields: dict[str, Any], name: str, least: int) -> int:
    found = fields.get(name)
    if type(found) is not int or not least <= found <= MOST_TOKENS:
        raise _Broken(f"{name}: must be a whole number from {least} to {MOST_TOKENS}")
    return found


def _azure(row: list[str]) -> Recorded:
    if len(row) < len(_COLUMNS):
        raise _Broken(f"{_COLUMNS[len(row)]}: is missing")
    try:
        # A timestamp has seven decimals, of which datetime supports six. Only differences are used,
        # so UTC stands for the trace's zone: it has no ambiguous hour.
        at_s = datetime.fromisoformat(row[0][:26] + "+00:00").timestamp()
    except ValueError:
        raise _Broken("TIMESTAMP: must be YYYY-MM-DD HH:MM:SS.FFFFFFF") from None
    counts = {}
    for name, text, least in zip(_COLUMNS[1:], row[1:3], (1, 0), strict=True):
        if not (text.isascii() and text.isdecimal() and len(text) <= 9):
            raise _Broken(f"{name}: must be a whole number from {least} to {MOST_TOKENS}")
        counts[name] = int(text)
    return Recorded(at_s, _count(counts, _COLUMNS[1], 1), _count(counts, _COLUMNS[2], 0))
