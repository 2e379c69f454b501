"""PromptLogprobs, how likely a prompt's own tokens are.

There is one entry for every token but the first, which nothing comes before. Numbers are packed: a
prompt has more tokens than a process can afford objects for.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.core.request.attempt import Logprobs

_BYTES = 4
"""Of one number."""

MAX_BYTES = 1 << 20
"""Of one prompt's entries: they travel in one message, and become texts at once."""

SCORED_POSITIONS = 256
"""A step scores the tokens of one prompt, and computes at most so many positions of it, or one
block: each takes a row of logits."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """num_top: alternatives with every entry. own: each token's natural log-probability, float32
    [N]. top_ids int32, top float32: the most likely tokens at each place, best first, and theirs,
    [N * num_top]. All of them little-endian."""

    num_top: int
    own: bytes
    top_ids: bytes
    top: bytes

    def __len__(self) -> int:
        return len(self.own) // _BYTES

    @property
    def fits(self) -> bool:
        """Whether each part is as long as the others say."""
        size = len(self) * self.num_top * _BYTES
        return not len(self.own) % _BYTES and len(self.top_ids) == len(self.top) == size

    def entries(self) -> Iterator[Logprobs]:
        """One a token, in order."""
        size = self.num_top
        top_ids, top = _ints(self.top_ids), _floats(self.top)
        for i, own in enumerate(_floats(self.own)):
            part = slice(i * size, (i + 1) * size)
            yield Logprobs(own, tuple(zip(top_ids[part], top[part], strict=True)))

    def alternatives(self) -> set[int]:
        """Tokens that are named, each once."""
        return set(_ints(self.top_ids))


def packed(
    num_top: int, own: Iterable[float], top_ids: Iterable[int], top: Iterable[float]
) -> PromptLogprobs:
    """From numbers in order."""
    return PromptLogprobs(
        num_top, _told(array("f", own)), _told(array("i", top_ids)), _told(array("f", top))
    )


def entries_bytes(num_tokens: int, num_top: int) -> int:
    """What the entries of so many tokens take."""
    return num_tokens * _BYTES * (1 + 2 * num_top)


class Gathered:
    """The entries of one input, chunk by chunk."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._parts: list[PromptLogprobs] = []
        self._size = 0

    def add(self, first_position: int, part: PromptLogprobs) -> None:
        """part: of the tokens behind first_position and the following ones. An input that is
        computed once more tells again what is known: that is passed over."""
        known = self._size - first_position
        if not 0 <= known < len(part):
            return
        first, first_top = known * _BYTES, known * _BYTES * self.num_top
        self._parts.append(
            PromptLogprobs(
                self.num_top, part.own[first:], part.top_ids[first_top:], part.top[first_top:]
            )
        )
        self._size += len(part) - known

    def whole(self) -> PromptLogprobs:
        return PromptLogprobs(
            self.num_top,
            b"".join(part.own for part in self._parts),
            b"".join(part.top_ids for part in self._parts),
            b"".join(part.top for part in self._parts),
        )


def _told(values: array[float] | array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _floats(data: bytes) -> array[float]:
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _ints(data: bytes) -> array[int]:
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
