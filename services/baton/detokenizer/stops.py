"""Finds stop strings in a text that comes in pieces. Knows nothing of tokens.

The first stop string to be *completed* wins; of several completed by the same character, the
longest. This depends on the text alone, never on how it was cut into pieces.

For each stop string the longest end of the text that begins it is known (Knuth, Morris and Pratt,
"Fast pattern matching in strings", 1977). The longest of these is exactly what must be held back:
all text before it can be part of no match any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidArgument

MAX_STOP_STRINGS = 64
MAX_CHARACTERS = 8192


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string was completed after `end` characters of the piece that was fed."""

    stop_string: str
    end: int


class StopMatcher:
    """The search in one text. Making one raises InvalidArgument (field `stop_strings`)."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if len(stop_strings) > MAX_STOP_STRINGS:
            raise InvalidArgument(f"must be at most {MAX_STOP_STRINGS}", field="stop_strings")
        if not all(stop_strings):
            raise InvalidArgument("must not be empty", field="stop_strings")
        if sum(map(len, stop_strings)) > MAX_CHARACTERS:
            raise InvalidArgument(
                f"must have at most {MAX_CHARACTERS} characters together", field="stop_strings"
            )
        self._patterns = [(stop_string, _borders(stop_string)) for stop_string in stop_strings]
        self._begun = [0] * len(stop_strings)
        """How many characters of each stop string the text ends with."""
        self._first_characters = frozenset(stop_string[0] for stop_string in stop_strings)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may belong to a stop string."""
        return max(self._begun)

    def feed(self, piece: str, *, armed: bool = True) -> Match | None:
        """Searches the next piece. Nothing may be fed after a match.

        armed: False lets stop strings that end in this piece pass.
        """
        if not any(self._begun) and self._first_characters.isdisjoint(piece):
            return None
        for index, character in enumerate(piece):
            found = self._step(character)
            if found and armed:
                return Match(found, index + 1)
        return None

    def _step(self, character: str) -> str:
        """The longest stop string that this character completes, or ""."""
        found = ""
        for which, (stop_string, borders) in enumerate(self._patterns):
            begun = self._begun[which]
            while begun and stop_string[begun] != character:
                begun = borders[begun]
            if stop_string[begun] == character:
                begun += 1
            if begun == len(stop_string):
                found = max(found, stop_string, key=len)
                begun = borders[begun]
            self._begun[which] = begun
        return found


def _borders(text: str) -> list[int]:
    """For each length of a beginning of the text: its longest proper beginning that ends it too."""
    borders = [0, 0]
    for character in text[1:]:
        border = borders[-1]
        while border and text[border] != character:
            border = borders[border]
        borders.append(border + (text[border] == character))
    return borders
