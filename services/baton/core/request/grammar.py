"""A grammar that an answer has to follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b


class GrammarKind(Enum):
    """What the text of a Grammar is written in."""

    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3
    GBNF = 4


@dataclass(frozen=True, slots=True)
class Grammar:
    """text: a JSON schema, a regular expression that must match the whole answer, llguidance's
    dialect of Lark, or llama.cpp's GBNF. Every other way to ask for structure becomes one of these
    at the edge. The whole answer follows it, unless something else ends the answer before.
    """

    kind: GrammarKind
    text: str

    @property
    def digest(self) -> bytes:
        """16 bytes that name it: equal for equal grammars only."""
        return blake2b(f"{self.kind.name}\0{self.text}".encode(), digest_size=16).digest()
