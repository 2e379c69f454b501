"""PromptLogprobs: the log-probabilities of a prompt's own tokens.

Every token except the first has an entry. Entries are packed arrays, because one object per token
would take too much memory for long prompts.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from batonlm.core.request.attempt import Logprobs
from batonlm.core.request.request import TextLogprob, TokenLogprobs

_BYTES = 4
"""Bytes per number."""

MAX_BYTES = 1 << 20
"""Most bytes of one prompt's entries. They travel in one message and become texts at once."""

SCORED_POSITIONS = 256
"""Most prompt positions whose tokens one step scores, or one block if that is more. A step scores
one prompt. The bound limits memory: each scored position takes a row of logits."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The entries of N tokens. All numbers are little-endian."""

    num_top: int
    """Number of alternatives per entry."""
    own: bytes
    """The natural log-probability of each token, float32 [N]."""
    top_ids: bytes
    """The most likely tokens at each place, best first, int32 [N * num_top]."""
    top: bytes
    """The log-probabilities of `top_ids`, float32 [N * num_top]."""

    def __len__(self) -> int:
        return len(self.own) // _BYTES

    @property
    def fits(self) -> bool:
        """Whether the lengths of the three parts are consistent."""
        size = len(self) * self.num_top * _BYTES
        return not len(self.own) % _BYTES and len(self.top_ids) == len(self.top) == size

    def entries(self) -> Iterator[Logprobs]:
        """Yields one entry per token, in order."""
        size = self.num_top
        top_ids, top = _ints(self.top_ids), _floats(self.top)
        for i, own in enumerate(_floats(self.own)):
            part = slice(i * size, (i + 1) * size)
            yield Logprobs(own, tuple(zip(top_ids[part], top[part], strict=True)))

    def worded(
        self, prompt: Sequence[int], spelled: Callable[[int], bytes]
    ) -> Iterator[TokenLogprobs]:
        """Yields one entry per token of the prompt; the number of the first one has no meaning,
        because no token precedes it. spelled: the bytes of a token."""

        def word(token_id: int, logprob: float) -> TextLogprob:
            return TextLogprob(token_id, spelled(token_id), logprob)

        yield TokenLogprobs(word(prompt[0], 0.0))
        for token_id, entry in zip(prompt[1:], self.entries(), strict=True):
            top = tuple(word(other, value) for other, value in entry.top)
            yield TokenLogprobs(word(token_id, entry.logprob), top)

    def alternatives(self) -> set[int]:
        """Returns the ids of all alternatives, each once."""
        return set(_ints(self.top_ids))


def packed(
    num_top: int, own: Iterable[float], top_ids: Iterable[int], top: Iterable[float]
) -> PromptLogprobs:
    """Packs numbers that are in order."""
    return PromptLogprobs(
        num_top,
        _to_bytes(array("f", own)),
        _to_bytes(array("i", top_ids)),
        _to_bytes(array("f", top)),
    )


def entries_bytes(num_tokens: int, num_top: int) -> int:
    """Returns the bytes that entries for this many tokens take."""
    return num_tokens * _BYTES * (1 + 2 * num_top)


class Gathered:
    """Collects the entries of one input, chunk by chunk."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._parts: list[PromptLogprobs] = []
        self._size = 0

    def add(self, first_position: int, part: PromptLogprobs) -> None:
        """Adds the entries of the tokens after first_position. Entries that are known already are
        skipped; they arrive again when an input is recomputed."""
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


def _to_bytes(values: array[float] | array[int]) -> bytes:
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
