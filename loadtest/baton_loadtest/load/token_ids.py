"""Token ids of prompts, the same for the same key and seed.

Real ids say nothing about speed, but equal prefixes do: so whatever has one key has equal tokens,
and the shorter of two pieces of one key is the beginning of the longer.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from baton.core.errors import InvalidArgument

Ids: TypeAlias = "array[int]"

CACHED, LONGEST = 2048, 4096
"""Pieces that are kept, for many prompts begin with them; and of how many tokens at most."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens in a row. key: says which."""

    key: str
    tokens: int


class TokenIds:
    """Ids from `first` to `last`, both included: a model has to know all of them, and none of them
    should be a special token."""

    def __init__(self, seed: int, first: int, last: int) -> None:
        """Raises InvalidArgument (field "token_ids")."""
        if not 0 <= first < last < 2**31:
            raise InvalidArgument("must be FIRST-LAST, two different ids", field="token_ids")
        self._seed, self._first, self._span = seed, first, last - first + 1
        self._cached = lru_cache(CACHED)(self._ids)

    def prompt(self, pieces: Iterable[Piece]) -> Ids:
        found = array("q")
        for piece in pieces:
            found += (self._cached if piece.tokens <= LONGEST else self._ids)(piece)
        return found

    def _ids(self, piece: Piece) -> Ids:
        drawn = random.Random(f"{self._seed} {piece.key}").randbytes(4 * piece.tokens)
        words = array("I", drawn)
        if sys.byteorder == "big":
            words.byteswap()
        first, span = self._first, self._span
        return array("q", [first + word % span for word in words])
