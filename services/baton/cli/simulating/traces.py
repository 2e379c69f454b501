"""Reads recorded traffic, Mooncake's JSON lines or Azure's CSV, and says which line is broken.

Mooncake: one object a line with timestamp (ms), input_length, output_length, hash_ids: one for each
512 tokens of the prompt. Azure: columns TIMESTAMP, ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from baton.core.errors import InvalidArgument

BLOCK = 512
"""Tokens that one of Mooncake's hash_ids stands for."""

_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. at_s: on the trace's own clock. blocks: ids of the prompt's 512 tokens each;
    none where the trace does not say what prompts share."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read(path: Path) -> list[Recorded]:
    """The whole file, in order of time. Raises InvalidArgument (field "trace"), with the first
    broken line's number."""
    found: list[Recorded] = []
    azure, at = False, 0
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for line in file:
                at += 1
                if at == 1 and line.strip().removeprefix("\ufeff").split(",")[:3] == _COLUMNS:
                    azure = True
                elif line.strip():
                    found.append(_azure(line) if azure else _mooncake(line))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="trace") from None
    except _Broken as what:
        raise InvalidArgument(f"{path}, line {at}: {what}", field="trace") from None
    if not found:
        raise InvalidArgument(f"{path} has no request in it", field="trace")
    return sorted(found, key=lambda request: request.at_s)


class _Broken(Exception):
    """The field, and what is wrong with it."""


def _mooncake(line: str) -> Recorded:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        raise _Broken("is no JSON, nor Azure's columns") from None
    if not isinstance(said, dict):
        raise _Broken("is no JSON object")
    at_ms = said.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < 1e15:
        raise _Broken("timestamp: must be milliseconds, 0 or more")
    blocks = said.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(each) is int for each in blocks):
        raise _Broken("hash_ids: must be a list of whole numbers")
    sizes = [_count(said.get(name), name) for name in ("input_length", "output_length")]
    return Recorded(at_ms / 1000, sizes[0], sizes[1], tuple(blocks))


def _azure(line: str) -> Recorded:
    row = next(csv.reader([line]))
    if len(row) < len(_COLUMNS):
        raise _Broken(f"{_COLUMNS[len(row)]}: is missing")
    try:
        # Seven digits of a second, of which datetime knows six.
        at_s = datetime.fromisoformat(row[0][:26] + "+00:00").timestamp()
    except ValueError:
        raise _Broken("TIMESTAMP: must be YYYY-MM-DD HH:MM:SS.FFFFFFF") from None
    sizes = [int(text) if text.isascii() and text.isdecimal() else None for text in row[1:3]]
    prompt, output = (_count(n, name) for n, name in zip(sizes, _COLUMNS[1:], strict=True))
    return Recorded(at_s, prompt, output)


def _count(found: object, name: str) -> int:
    if type(found) is not int or not 0 <= found <= 100_000_000:
        raise _Broken(f"{name}: must be a whole number from 0 to 100000000")
    return found
