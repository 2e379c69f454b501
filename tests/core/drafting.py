"""A double of drafters: it knows what sequences will say, and is wrong now and then."""

from __future__ import annotations

from collections.abc import Sequence

from batonlm.core.scheduler.drafts import NOTHING, Draft, Wish


class Foretold:
    """Implements `Drafter`. wrong_every: about one draft in so many is another token; 0: none."""

    kind = "foretold"

    def __init__(self, wrong_every: int = 4, odds: float = 0.9) -> None:
        self._wrong_every = wrong_every
        self._odds = odds
        self._texts: list[list[int]] = []
        self.known: set[int] = set()
        """Sequences that were asked for and not forgotten."""

    def foretell(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._texts.append([*prompt, *output])

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        return [self._draft(wish) for wish in wishes]

    def forget(self, sequence_id: int) -> None:
        self.known.discard(sequence_id)

    def _draft(self, wish: Wish) -> Draft:
        self.known.add(wish.sequence_id)
        size, tokens = len(wish.tokens), [*wish.tokens]
        fitting = [text for text in self._texts if text[:size] == tokens and len(text) > size]
        if not fitting:
            return NOTHING
        # Choices of a prompt go apart: which one this is is not known.
        text = fitting[wish.sequence_id % len(fitting)]
        drafts = [
            4 + (token * 7 + 1) % 500 if self._wrong(size + i) else token
            for i, token in enumerate(text[size : size + wish.most])
        ]
        return Draft(drafts, [self._odds] * len(drafts))

    def _wrong(self, position: int) -> bool:
        return self._wrong_every > 0 and position * 7919 % 101 % self._wrong_every == 0
