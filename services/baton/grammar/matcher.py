"""TokenMatcher, one choice's way through a compiled grammar.

The matchers of a grammar share an automaton, which grows with whatever one of them meets first, by
up to 20 MB, and stays as long as the grammar. llguidance tells nobody how large it is, and asking
the allocator before each mask costs more than the mask where a heap has many holes. But new states
cost time: a mask that took long is computed once more, and by as much as that is quicker, states
were made. What is allocated in that time is an estimate on the safe side (0.1 to 0.6 KB a
microsecond were measured, beyond some that masks make too quickly to be seen). Where many masks
have been looked at, only some are, for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import thread_time

from llguidance import LLMatcher

from baton.grammar.compiler import report

SEEN_S = 50e-6
LOOKED_AT = 64
THEN_ONE_OF = 8
GROWN_BYTES_PER_S = 1e9
MAX_GROWN_BYTES = 24 << 20
"""An automaton has at most `LIMITS.max_lexer_states` states."""


class TokenMatcher:
    """Implements core's `Matcher`: what it is told of output makes its state, nothing else."""

    def __init__(self, matcher: LLMatcher, grammar: Compiled) -> None:
        """matcher: its own, at the start of the grammar."""
        self._matcher = matcher
        self._grammar = grammar
        self._num_taken = 0
        self._stuck = ""

    @property
    def stuck(self) -> str:
        return self._stuck

    def allowed(self, tokens: Sequence[int], first: int) -> bytes:
        new = list(tokens[first + self._num_taken :])
        self._num_taken += len(new)
        if new and not self._matcher.consume_tokens(new):
            return self._give_up("cannot be followed behind what the answer holds so far")
        mask, spent_s = self._timed_mask()
        if spent_s > SEEN_S and (weight := self._grammar.weight_of_look()):
            mask, again_s = self._timed_mask()
            self._grammar.grew(weight * (spent_s - again_s))
        if self._matcher.is_error() or not any(mask):
            return self._give_up("cannot be followed further with this model's tokens")
        return mask

    def _timed_mask(self) -> tuple[bytes, float]:
        began = thread_time()
        mask = self._matcher.compute_bitmask()
        return mask, thread_time() - began

    def _give_up(self, why: str) -> bytes:
        detail = report(self._matcher)
        self._stuck = f"{why}: {detail}" if detail else why
        return bytes(1)


class Compiled:
    """Implements core's `CompiledGrammar`. Its matchers share what they find out about the
    grammar's lexemes. num_bytes: of it when it was compiled."""

    def __init__(self, matcher: LLMatcher, num_bytes: int = 0) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._grown_bytes = 0
        self._num_long = 0

    @property
    def num_bytes(self) -> int:
        """Of it and what its matchers have found out; nearly, for nobody can ask."""
        return self._num_bytes + self._grown_bytes

    def weight_of_look(self) -> int:
        """Of a mask that took long: how many such it stands for; 0 where it is not looked at."""
        self._num_long += 1
        if self._grown_bytes >= MAX_GROWN_BYTES:
            return 0
        if self._num_long <= LOOKED_AT:
            return 1
        return 0 if self._num_long % THEN_ONE_OF else THEN_ONE_OF

    def grew(self, spent_s: float) -> None:
        """CPU time was spent on finding out more."""
        grown = self._grown_bytes + int(max(0.0, spent_s) * GROWN_BYTES_PER_S)
        self._grown_bytes = min(grown, MAX_GROWN_BYTES)

    def matcher(self) -> TokenMatcher:
        return TokenMatcher(self._matcher.deep_copy(), self)
