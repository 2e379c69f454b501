"""A tool's parameters as a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.core.request.lark import Lark
from baton.core.request.request import Tool


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """Of a validated tool."""
    schema: Mapping[str, Any] = json.loads(tool.parameters or "{}")
    return schema


def arguments(lark: Lark, tool: Tool) -> str:
    """An object with arguments of a tool. A tool that names no parameters has none."""
    schema = schema_of(tool)
    return lark.schema({"type": "object", **schema}) if schema else lark.literal("{}")


def call_objects(lark: Lark, tools: Sequence[Tool], key: str) -> str:
    """One call as an object with its name first, then its arguments under a key."""
    calls = []
    for tool in tools:
        head = lark.literal(f'{{"name": "{tool.name}", "{key}": ')
        calls.append(f'{head} {arguments(lark, tool)} "}}"')
    return one_of(lark, calls)


def one_of(lark: Lark, expressions: Iterable[str]) -> str:
    return lark.rule(" | ".join(expressions))


def several(first: str, other: str, parallel: bool) -> str:
    """other: with what separates it from the one before."""
    return f"{first} ({other})*" if parallel else first
