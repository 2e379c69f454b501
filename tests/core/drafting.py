"""Doubles of drafters and of models that draft: they know what sequences will say, and are wrong
now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batonlm.core.scheduler.drafts import NOTHING, Draft, Prices, Wish
from batonlm.core.scheduler.model_drafts import Guess
from batonlm.core.scheduler.plan import Chunk
from batonlm.engine.kv.extents import spans


class Foretold:
    """Implements `Drafter`. wrong_every: about one draft in so many is another token; 0: none."""

    kinds = ("foretold",)
    computes = False
    seconds = 0.0
    behind_s = 0.0

    def __init__(self, wrong_every: int = 4, odds: float = 0.9) -> None:
        self._wrong_every = wrong_every
        self._odds = odds
        self._texts: list[list[int]] = []
        self.known: set[int] = set()
        """Sequences that were asked for and not forgotten."""

    def foretell(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._texts.append([*prompt, *output])

    def draft(self, wishes: Sequence[Wish], prices: Prices) -> list[Draft]:
        return [self._draft(wish) for wish in wishes]

    def peek(self, wishes: Sequence[Wish], prices: Prices) -> list[Draft]:
        return self.draft(wishes, prices)

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
        return Draft(drafts, [self._odds] * len(drafts), "foretold")

    def _wrong(self, position: int) -> bool:
        return self._wrong_every > 0 and position * 7919 % 101 % self._wrong_every == 0


class Guesser:
    """Implements `DraftModel`, over KV that is the token of each place: it reads what a sequence
    says out of its blocks, as a model does, and guesses what comes next in the text that begins so.
    """

    max_positions = 10_000

    def __init__(
        self,
        block_size: int,
        *,
        wrong_every: int = 0,
        seconds: Callable[[int], float] = lambda positions: 0.0,
    ) -> None:
        """seconds: of a call that computes so many positions."""
        self.calls: list[list[Chunk]] = []
        self.misread = 0
        """Guesses behind what is neither the start of a text nor of what was guessed wrongly."""
        self.seconds = seconds
        self._wrong_every = wrong_every
        self._block_size = block_size
        self._texts: list[list[int]] = []
        self._kv: dict[int, int] = {}
        """By place."""
        self._astray: set[tuple[int, ...]] = set()

    def foretell(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._texts.append([*prompt, *output])

    def start(self, sequence_id: int, computed: int) -> int:
        return computed

    def compute(self, chunks: Sequence[Chunk]) -> tuple[list[Guess], float]:
        self.calls.append([*chunks])
        found = []
        for chunk in chunks:
            runs = spans(chunk.extents, 0, chunk.end_position, self._block_size)
            places = [place for first, count in runs for place in range(first, first + count)]
            for place, token in zip(places[chunk.first_position :], chunk.token_ids, strict=True):
                self._kv[place] = token
            if chunk.samples:
                found.append(self._guess([self._kv.get(place, -1) for place in places]))
        return found, self.seconds(sum(len(chunk.token_ids) for chunk in chunks))

    def _guess(self, context: list[int]) -> Guess:
        size = len(context)
        text = next((t for t in self._texts if t[:size] == context and len(t) > size), None)
        wrong = self._wrong_every and size * 7919 % 101 % self._wrong_every == 0
        if text is not None and not wrong:
            return Guess(text[size], 0.9)
        if text is None:
            self.misread += tuple(context) not in self._astray
        guess = Guess(4 + (context[-1] * 7 + 1) % 500, 0.9)
        self._astray.add((*context, guess.token_id))
        return guess
