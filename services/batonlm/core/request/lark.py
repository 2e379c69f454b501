"""Builds a grammar in llguidance's dialect of Lark, rule by rule.

A marker that is one token of the vocabulary is required as that token, by its id: the same text in
several tokens means something else to the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batonlm.core.request.request import Grammar, GrammarKind, Tool

ANYTHING = "/(?s:.*)/"

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spacing of Python's json module, which models were trained on; a fixed spacing also rules out
endless white space."""


class Lark:
    """Collects rules and terminals of one grammar."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """tokens: ids of the markers that are tokens."""
        self._tokens = tokens
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def is_token(self, marker: str) -> bool:
        return marker in self._tokens

    def marker(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>" if text in self._tokens else self.literal(text)

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Adds a terminal and returns its name. Regular expressions can be combined in a terminal
        only."""
        name = f"TERMINAL{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Matches JSON of a schema. References in it are relative to this schema."""
        return self.rule("%json " + json.dumps({**schema, "x-guidance": _SPACING}))

    def through(self, marker: str) -> str:
        """Matches any text up to and including a marker."""
        if self.is_token(marker):
            return self.rule(f"{ANYTHING} {self.marker(marker)}")
        return self.rule(f"{ANYTHING} {self.literal(marker)}", "[lazy]")

    def without(self, marker: str) -> str:
        """Matches any text without the marker."""
        if self.is_token(marker):
            return self.rule(ANYTHING)
        found = f"{ANYTHING} {self.literal(marker)} {ANYTHING}"
        return self.terminal(f"{ANYTHING} & ~({found})")

    def arguments(self, tool: Tool) -> str:
        """Matches an object with the arguments of a tool; an empty object for a tool without
        parameters."""
        schema = schema_of(tool)
        return self.schema({"type": "object", **schema}) if schema else self.literal("{}")

    def call_objects(self, tools: Sequence[Tool], key: str) -> str:
        """Matches one call as an object with its name first, then its arguments under the given
        key."""
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
    """Returns the parameter schema of a validated tool."""
    schema: Mapping[str, Any] = json.loads(tool.parameters or "{}")
    return schema


def several(first: str, other: str, parallel: bool) -> str:
    """Matches `first` alone, or with any number of `other` after it when parallel. other: includes
    the separator in front of it."""
    return f"{first} ({other})*" if parallel else first
