"""Builds a grammar in llguidance's dialect of Lark, rule by rule.

A marker that is one token of the vocabulary is required as that token, by its id: the same text in
several tokens means something else to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batonlm.core.request.request import Grammar, GrammarKind, Tool

ANYTHING = "/(?s:.*)/"

JSON_SPACING = {"whitespace_pattern": r"\x20?|\n[\x20\t]{0,32}"}
"""The white space between tokens of JSON in an answer: none, a space, or a new line with
indentation. It is bounded, because a model could otherwise write white space for ever."""

CALL_SPACING: Mapping[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""That where an answer can be nothing but calls: the spacing of Python's json module, which models
were trained on."""


class Lark:
    """Collects rules and terminals of one grammar."""

    def __init__(
        self, tokens: Mapping[str, int], spacing: Mapping[str, object] = CALL_SPACING
    ) -> None:
        """tokens: ids of the markers that are tokens. spacing: of all JSON: where it differs
        between two rules of which either may match, one of them may match too little."""
        self._tokens = tokens
        self._spacing = spacing
        longest_first = sorted(tokens, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._reserved = 0

    def literal(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def is_token(self, marker: str) -> bool:
        return marker in self._tokens

    def text(self, text: str) -> str:
        """Matches a text, with the markers in it as tokens where they are tokens."""
        parts: list[str] = []
        at = 0
        for found in self._marker.finditer(text):
            if found.start() > at:
                parts.append(self.literal(text[at : found.start()]))
            parts.append(f"<[{self._tokens[found.group()]}]>")
            at = found.end()
        if at < len(text) or not parts:
            parts.append(self.literal(text[at:]))
        return " ".join(parts)

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def reserve(self) -> str:
        """Returns the name of a rule that `define` adds later."""
        self._reserved += 1
        return f"later{self._reserved}"

    def define(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def terminal(self, body: str) -> str:
        """Adds a terminal and returns its name. Regular expressions can be combined in a terminal
        only."""
        name = f"TERMINAL{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Matches JSON of a schema. References in it are relative to this schema."""
        return self.rule("%json " + json.dumps({**schema, "x-guidance": self._spacing}))

    def through(self, marker: str) -> str:
        """Matches any text up to and including a marker."""
        if self.is_token(marker):
            return self.rule(f"{ANYTHING} {self.text(marker)}")
        return self.rule(f"{ANYTHING} {self.literal(marker)}", "[lazy]")

    def without(self, markers: Iterable[str], also: str = "", end: str = "") -> str:
        """Matches any text that spells none of the markers, and then `end`. also: what else holds
        for the text, as an expression of a terminal."""
        spelled = " | ".join(map(self.literal, markers))
        body = f"{ANYTHING} & ~({ANYTHING} ({spelled}) {ANYTHING})"
        body = f"{body} & {also}" if also else body
        # One terminal with its end: the text alone would take the beginning of the end, too.
        token = self._marker.search(end)
        letters = end if token is None else end[: token.start()]
        name = self.terminal(f"({body}) {self.literal(letters)}" if letters else body)
        return name if token is None else f"{name} {self.text(end[token.start() :])}"

    def arguments(self, tool: Tool) -> str:
        """Matches an object with the arguments of a tool; an empty object for a tool without
        parameters."""
        schema = schema_of(tool)
        return self.schema({"type": "object", **schema}) if schema else self.literal("{}")

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
