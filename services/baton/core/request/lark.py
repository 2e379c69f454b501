"""Writes a grammar in llguidance's dialect of Lark, rule by rule.

A marker that is one token of the model's vocabulary is asked for as that token, by its id: spelled
out in letters it would be something else to the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.core.request.request import Grammar, GrammarKind, Tool

ANYTHING = "/(?s:.*)/"

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python's json writes it, which models have learned; and white space never goes on for ever."""


class Lark:
    """tokens: ids of markers that are tokens."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def is_token(self, marker: str) -> bool:
        return marker in self._tokens

    def marker(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>" if text in self._tokens else self.literal(text)

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """The name of a new terminal, in which regular expressions may be combined."""
        name = f"TERMINAL{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON of a schema. References in it are relative to this schema."""
        return self.rule("%json " + json.dumps({**schema, "x-guidance": _SPACING}))

    def through(self, marker: str) -> str:
        """Anything up to a marker and the marker itself."""
        if self.is_token(marker):
            return self.rule(f"{ANYTHING} {self.marker(marker)}")
        return self.rule(f"{ANYTHING} {self.literal(marker)}", "[lazy]")

    def without(self, marker: str) -> str:
        """Anything in which the marker does not come."""
        if self.is_token(marker):
            return self.rule(ANYTHING)
        found = f"{ANYTHING} {self.literal(marker)} {ANYTHING}"
        return self.terminal(f"{ANYTHING} & ~({found})")

    def arguments(self, tool: Tool) -> str:
        """An object with arguments of a tool. A tool that names no parameters has none."""
        schema = schema_of(tool)
        return self.schema({"type": "object", **schema}) if schema else self.literal("{}")

    def call_objects(self, tools: Sequence[Tool], key: str) -> str:
        """One call as an object with its name first, then its arguments under a key."""
        calls = []
        for tool in tools:
            head = self.literal(f'{{"name": "{tool.name}", "{key}": ')
            calls.append(f'{head} {self.arguments(tool)} "}}"')
        return self.one_of(calls)

    def one_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def grammar(self, start: str) -> Grammar:
        return Grammar(GrammarKind.LARK, "\n".join([f"start: {start}", *self._rules, ""]))


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """Of a validated tool."""
    schema: Mapping[str, Any] = json.loads(tool.parameters or "{}")
    return schema


def several(first: str, other: str, parallel: bool) -> str:
    """other: with what separates it from the one before."""
    return f"{first} ({other})*" if parallel else first
