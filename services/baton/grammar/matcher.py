"""TokenMatcher, one choice's way through a compiled grammar; knows no scheduler and no runner."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from baton.grammar.compiler import report


class TokenMatcher:
    """Implements core's `Matcher`: what it is told of output makes its state, nothing else."""

    def __init__(self, matcher: LLMatcher) -> None:
        """matcher: its own, at the start of the grammar."""
        self._matcher = matcher
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
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() or not any(mask):
            return self._give_up("cannot be followed further with this model's tokens")
        return mask

    def _give_up(self, why: str) -> bytes:
        detail = report(self._matcher)
        self._stuck = f"{why}: {detail}" if detail else why
        return bytes(1)


class Compiled:
    """Implements core's `CompiledGrammar`. Its matchers share what they find out about the
    grammar's lexemes."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> TokenMatcher:
        return TokenMatcher(self._matcher.deep_copy())
