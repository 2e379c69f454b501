"""Finds stop strings in a text that comes in pieces. Knows nothing of tokens.

The first stop string to be *completed* wins; of several completed by the same character, the
longest. This depends on the text alone, never on how it was cut into pieces.

All stop strings are searched at once (Aho and Corasick, "Efficient string matching", 1975): the
automaton's state after a character is the longest end of the text that begins a stop string. Its
length is exactly what must be held back, since all before it can be part of no match any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from baton.core.errors import InvalidArgument

MAX_STOP_STRINGS = 64
MAX_CHARACTERS = 8192


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string was completed after `end` characters of the piece that was fed."""

    stop_string: str
    end: int


class StopAutomaton:
    """The compiled stop strings; immutable, shared by all texts with the same ones.

    Node 0 is the empty string. `next`: the children of a node by character. `fallback`: the node
    of the longest proper suffix. `depth`: the node's length. `found`: the longest stop string that
    ends there, or "".
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.depth = [0]
        self.found = [""]
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._link()
        self.first_characters = frozenset(self.next[0])

    def _insert(self, stop_string: str) -> None:
        node = 0
        for character in stop_string:
            child = self.next[node].get(character)
            if child is None:
                child = self.next[node][character] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[node] + 1)
                self.found.append("")
            node = child
        self.found[node] = stop_string

    def _link(self) -> None:
        """Sets fallbacks in order of depth: a node's fallback is always less deep."""
        waiting = deque(self.next[0].values())
        while waiting:
            node = waiting.popleft()
            self.found[node] = self.found[node] or self.found[self.fallback[node]]
            for character, child in self.next[node].items():
                self.fallback[child] = self.step(self.fallback[node], character)
                waiting.append(child)

    def step(self, node: int, character: str) -> int:
        while node and character not in self.next[node]:
            node = self.fallback[node]
        return self.next[node].get(character, 0)


@lru_cache(maxsize=256)
def compile_stops(stop_strings: tuple[str, ...]) -> StopAutomaton:
    """Raises InvalidArgument (field `stop_strings`)."""
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise InvalidArgument(f"must be at most {MAX_STOP_STRINGS}", field="stop_strings")
    if not all(stop_strings):
        raise InvalidArgument("must not be empty", field="stop_strings")
    if sum(map(len, stop_strings)) > MAX_CHARACTERS:
        raise InvalidArgument(
            f"must have at most {MAX_CHARACTERS} characters together", field="stop_strings"
        )
    return StopAutomaton(stop_strings)


class StopMatcher:
    """The search in one text."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0

    @property
    def held(self) -> int:
        """How many characters at the end of the text may belong to a stop string."""
        return self._automaton.depth[self._node]

    def feed(self, piece: str, *, armed: bool = True) -> Match | None:
        """Searches the next piece. Nothing may be fed after a match.

        armed: False lets stop strings that end in this piece pass.
        """
        automaton = self._automaton
        if not self._node and automaton.first_characters.isdisjoint(piece):
            return None
        for index, character in enumerate(piece):
            self._node = automaton.step(self._node, character)
            if armed and automaton.found[self._node]:
                return Match(automaton.found[self._node], index + 1)
        return None
