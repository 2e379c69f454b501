"""Drafts: tokens that a sequence will probably draw, and the port through which they are found.

In: the tokens of sequences. Out: the next ones, each with its odds. A wrong draft costs time and
changes nothing, see `speculation`. Here they are found where a sequence's own text repeats itself;
`model_drafts` has a small model compute them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Many
from math import inf
from typing import NamedTuple, Protocol

from batonlm.core.kvcache.block_pool import Extents

MOST_DRAFTS = 15
"""Of a sequence in a step: with the token before them they fill a tile of attention."""


LEAST_WORTH = 0.05
"""A draft of lesser odds is not worth looking at, however cheap."""

MARGIN = 1.2
"""How much more a draft must be worth than it costs, as far as that is known."""


class Wish(NamedTuple):
    """A sequence that drafts are wanted for."""

    sequence_id: int
    tokens: Many[int]
    """Prompt and output so far; from one call to the next the same with more behind them."""
    most: int
    """Drafts, at most."""
    extents: Extents = ()
    """Its blocks. If the drafter `computes`, they have room for as many drafts."""
    stay: int = 0
    """Another one when its blocks became others, of which nobody knows what they hold."""
    left: int = 1 << 30
    """Tokens that it can still get."""
    ends: Collection[int] = ()
    """Tokens that nothing follows."""


class Prices(NamedTuple):
    """What the step that drafts are for makes and takes, as far as that is known."""

    rows: int = 1
    """Tokens without drafts."""
    step_s: float = 0.0
    """Seconds without drafts; 0: not known."""
    draft_s: float = 0.0
    """Seconds of each draft in it."""
    within_s: float = inf
    """Seconds that finding drafts may take."""
    room: int = 1 << 30
    """How many drafts it can have."""


class Draft(NamedTuple):
    """What a sequence will probably draw next."""

    tokens: Many[int] = ()
    odds: Many[float] = ()
    """For each token how likely it is drawn if those before it are."""
    kind: str = ""
    """Where they come from, one of the drafter's `kinds`."""


NOTHING = Draft()


class Drafter(Protocol):
    """Where drafts come from. Engine thread only. Doubles: in `tests.core.drafting`, real:
    `NgramDrafter`, `model_drafts.ModelDrafter` and `model_drafts.Drafters`."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its kinds of drafts in metrics."""

    @property
    def computes(self) -> bool:
        """Whether it computes in the blocks of sequences."""

    @property
    def seconds(self) -> float:
        """What the last call of `draft` took of the device, 0 where it did not compute."""

    @property
    def behind_s(self) -> float:
        """The part of it for sequences that were behind, which is worth something later, too."""

    def draft(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        """One for each wish, all of one step. A drafter learns from the tokens that it is shown
        what its drafts are worth; it need not be asked at each step."""

    def peek(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        """About what `draft` would find, without computing anything: odds count, and tokens may be
        missing."""

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended, or there are no drafts for it any more. Unknown ones are no
        error."""


def worths(odds: Many[float]) -> list[float]:
    """How likely each draft is right with all before it."""
    worth = 1.0
    found = []
    for each in odds:
        worth *= each
        found.append(worth)
    return found


class Odds:
    """How often drafts were right, by a class of theirs."""

    __slots__ = ("_hits", "_tries")

    def __init__(self, classes: int) -> None:
        self._hits = [0.0] * classes
        self._tries = [0.0] * classes

    def learn(self, index: int, hit: bool, keep: float) -> None:
        """keep: the weight that evidence keeps with each newer one."""
        self._hits[index] = keep * self._hits[index] + hit
        self._tries[index] = keep * self._tries[index] + 1.0

    def guess(self, index: int, prior: float, weight: float) -> float:
        """prior: what counts while nothing was seen, as much as `weight` observations."""
        return (self._hits[index] + weight * prior) / (self._tries[index] + weight)


SHORTEST = 3
"""Tokens at the end of a sequence that have to stand somewhere else, too."""
_LONGEST = 12
"""Longer repetitions are not told apart."""
_CANDIDATES = 4
"""Earlier places that are compared."""
_LENGTHS = _LONGEST - SHORTEST + 1
_SLOTS = 1 << 10, 1 << 17
"""Of a table of places, at least and at most."""


class NgramIndex:
    """Where the end of one sequence's tokens stood before.

    A table of fixed size leads from a hash of SHORTEST tokens to their newest place, each place to
    the one before it. While what follows a place goes on to repeat itself, that place is kept, so
    that a token takes constant time. 4 bytes a position, and the table.
    """

    __slots__ = ("_heads", "_mask", "_previous", "length", "place")

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: about as many as there will be."""
        least, most = _SLOTS
        slots = min(most, max(least, 1 << num_tokens.bit_length()))
        self._mask = slots - 1
        self._heads = array("i", [-1]) * slots
        self._previous = array("i")
        self.place = 0
        """The position that probably repeats itself next; 0: none."""
        self.length = 0
        """How many tokens before it stand at the end, too, as far as that was looked at."""

    @property
    def size(self) -> int:
        """Positions that are known."""
        return len(self._previous)

    def extend(self, tokens: Many[int], end: int) -> None:
        """Takes up the positions below `end`."""
        heads, previous, mask = self._heads, self._previous, self._mask
        for position in range(len(previous), end):
            token = tokens[position]
            if self.place:
                if tokens[self.place] == token:
                    self.place += 1
                    self.length += 1
                else:
                    self.place = self.length = 0
            if position < SHORTEST - 1:
                previous.append(-1)
                continue
            slot = _slot(tokens[position - 2], tokens[position - 1], token) & mask
            previous.append(heads[slot])
            heads[slot] = position

    def find(self, tokens: Many[int]) -> int:
        """The position whose tokens probably come next, or 0; all tokens are known. Of several the
        one with the longest repetition before it, the newest of these."""
        last = len(self._previous) - 1
        if self.place or last < SHORTEST:
            return self.place
        candidate = self._previous[last]
        for _ in range(_CANDIDATES):
            if candidate < 0:
                break
            length = 0
            while length <= min(candidate, _LONGEST - 1) and (
                tokens[candidate - length] == tokens[last - length]
            ):
                length += 1
            if length >= SHORTEST and length > self.length:
                self.place, self.length = candidate + 1, length
            candidate = self._previous[candidate]
        return self.place


def _slot(first: int, second: int, third: int) -> int:
    return ((first * 0x9E3779B1) ^ (second * 0x85EBCA6B) ^ (third * 0xC2B2AE35)) >> 7


_KEEP_OWN = 0.9
"""What is known of a sequence is of its newest ten or so repetitions of a length."""
_KEEP_ALL = 0.995
_PRIOR = 0.5
_WEIGHT = 4.0

MOST_TAKEN_UP = 8192
"""Positions in a call: a long prompt is taken up in several, so that none of them waits long."""


class _Known(NamedTuple):
    places: NgramIndex
    odds: Odds


class NgramDrafter:
    """A Drafter by look-up: what stood behind the same tokens before, in prompt and output.

    What its drafts are worth it learns from all tokens that it is shown, whether they were drafted
    or not, so that it costs nothing to find out that a text has begun to repeat itself.
    """

    kind = "ngram"
    kinds = (kind,)
    computes = False
    seconds = 0.0
    behind_s = 0.0

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._odds = Odds(_LENGTHS)
        """Of all sequences, by the repetition's length, as those of each."""

    def draft(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        left = MOST_TAKEN_UP
        found = []
        for wish in wishes:
            tokens = wish.tokens
            known = self._known.get(wish.sequence_id)
            if known is None:
                known = _Known(NgramIndex(len(tokens)), Odds(_LENGTHS))
                self._known[wish.sequence_id] = known
            index = known.places
            new = len(tokens) - index.size
            if new > left:
                index.extend(tokens, index.size + left)
                left = 0
                found.append(NOTHING)
                continue
            left -= new
            self._take_up(known, tokens, new)
            place = index.find(tokens)
            found.append(self._behind(known, tokens, place, wish.most) if place else NOTHING)
        return found

    def peek(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        return self.draft(wishes, prices)

    def forget(self, sequence_id: int) -> None:
        self._known.pop(sequence_id, None)

    def _take_up(self, known: _Known, tokens: Many[int], new: int) -> None:
        index, odds = known
        size = len(tokens)
        if new > 2 * MOST_DRAFTS:
            # Of a prompt, or of what was drawn while nobody asked, nothing was foretold.
            index.extend(tokens, size)
            return
        for end in range(size - new + 1, size + 1):
            length = index.length if index.place else 0
            index.extend(tokens, end)
            if length:
                hit = index.place > 0
                odds.learn(_class_of(length), hit, _KEEP_OWN)
                self._odds.learn(_class_of(length), hit, _KEEP_ALL)
            if end < size:
                index.find(tokens)

    def _behind(self, known: _Known, tokens: Many[int], place: int, most: int) -> Draft:
        """What follows a place; behind the end it goes on with itself."""
        size, length = len(tokens), known.places.length
        drafts: list[int] = []
        odds = []
        for i in range(min(most, MOST_DRAFTS)):
            at = place + i
            drafts.append(tokens[at] if at < size else drafts[at - size])
            index = _class_of(length + i)
            of_all = self._odds.guess(index, _PRIOR, _WEIGHT)
            odds.append(known.odds.guess(index, of_all, _WEIGHT))
        return Draft(drafts, odds, self.kind)


def _class_of(length: int) -> int:
    return min(length, _LONGEST) - SHORTEST
