"""Drafts that a small model computes, and the choice between these and look-up.

The model keeps its KV in the blocks of the sequences that it drafts for: each block of the pool has
room for it beside the large model's. So it has no table, no memory and no eviction of its own. Its
KV is nowhere kept or handed over: what is missing, because a sequence came from elsewhere or got
other blocks, is computed again from the tokens, a bounded part of it in a step.

Drafting goes by rounds: each computes the next position of all sequences that still want a draft,
which takes about as long for many as for one. A round is computed where the tokens that it will
probably save are worth more than the time that it takes, so a step has as many as pay, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.drafts import (
    LEAST_WORTH,
    MARGIN,
    MOST_DRAFTS,
    NOTHING,
    Draft,
    Drafter,
    NgramDrafter,
    Odds,
    Prices,
    Wish,
    worths,
)
from batonlm.core.scheduler.plan import Chunk, SampleRow
from batonlm.core.scheduler.step_cost import WARM_UP


class Guess(NamedTuple):
    """The token that a model takes for the likeliest one behind a chunk."""

    token_id: int
    probability: float


class DraftModel(Protocol):
    """A model that drafts, over the blocks of the pool or memory of its own. Engine thread only.
    Double: `tests.core.drafting.Guesser`, real: `batonlm.engine.drafting.TorchDraftModel` and
    `batonlm.engine.heads.model.HeadModel`."""

    max_positions: int
    """Of a sequence."""

    def start(self, sequence_id: int, computed: int) -> int | None:
        """The position from which on a sequence is to be computed, if those before `computed` were;
        None: it cannot be now."""

    def compute(self, chunks: Many[Chunk]) -> tuple[list[Guess], float]:
        """Computes chunks, each behind what was computed before it, in its blocks. Returns a guess
        for each that has a sample, in order, and the seconds that it took; it waits for the device.
        """


_WANTED = (SampleRow(0, 0, 0, SamplingParams(temperature=0.0)),)
"""Has a chunk's last logits computed; nothing is drawn."""

_CLASSES = 10
"""Of a guess's odds, by its probability."""
_ANY = _CLASSES
"""The class of all guesses."""
_KEEP_OWN = 0.9
_KEEP_ALL = 0.99
_PRIOR = 0.6
"""Of a model of which nothing was seen."""
_WEIGHT = 4.0

_BASE_ROWS = 8
"""A round takes about as long beside its rows as for so many of them."""
_NEWEST = 0.2
"""Weight of the newest round."""

_FIRST_ROUNDS = 4
"""Rounds of a step while it is not known what they take, or when they are tried again."""
_FIRST_POSITIONS = 256
"""Positions that are computed for sequences that are behind, before it is known what they take."""
_TILE = MOST_DRAFTS + 1
"""Positions of a tile of attention. What is written into one may clear what lies ahead in it."""
_NEAR = _TILE
"""A sequence with fewer positions that are missing is not behind."""
_SHARE = 0.5
"""Of a step's time that computing these may take."""
_AGAIN_AFTER = 64
"""Calls in which no round pays; then a few are computed, because guesses may be better now."""
_TRIED = 8
"""Of every so many sequences one is tried again."""


@dataclass(slots=True)
class _Drafted:
    """What is known of a sequence."""

    stay: int
    """Of its `Wish`, when its KV was computed."""
    odds: Odds
    computed: int = 0
    """Leading positions that have the draft model's KV of its tokens."""
    size: int = 0
    """How many tokens it had when guesses were made."""
    guesses: list[int] = field(default_factory=list)
    """Not compared with its tokens yet. All but the last one have KV."""
    classes: list[int] = field(default_factory=list)
    """Of the guesses."""
    able: bool = True
    """Whether the model can compute it."""


class _Row(NamedTuple):
    """A sequence that drafts are computed for."""

    number: int
    """Of its wish."""
    wish: Wish
    known: _Drafted
    hope: float
    """How likely its next guess is right if those before it are."""


@dataclass(slots=True)
class _Balance:
    """What a step makes and takes with the drafts so far."""

    prices: Prices
    gain: float = 0.0
    """Tokens that they will probably save."""
    drafts: int = 0
    drafting_s: float = 0.0
    behind_s: float = 0.0
    """What computing positions of sequences that were behind took, which gains something later."""

    @property
    def room(self) -> int:
        """For so many more drafts."""
        return max(0, self.prices.room - self.drafts)

    def has_time(self, seconds: float) -> bool:
        """Whether finding drafts may take so much longer."""
        return self.behind_s + self.drafting_s + seconds <= self.prices.within_s

    def pays(self, worth: float, count: int, seconds: float) -> bool:
        """Whether so many more drafts, worth so many tokens and found in so many seconds, are
        better than what the step makes in that time; yes while that is not known."""
        prices = self.prices
        if not self.has_time(seconds):
            return False
        if not prices.step_s:
            return True
        whole_s = prices.step_s + self.drafting_s + self.drafts * prices.draft_s
        price_s = seconds + count * prices.draft_s
        return worth * whole_s > MARGIN * price_s * (prices.rows + self.gain)


class _RoundCost:
    """What a round takes, in seconds.

    A round of any size tells about all, because where many rounds do not pay only small ones are
    tried: so their ratio is taken as given, and how long they take is learned.
    """

    def __init__(self) -> None:
        self.position_s = 0.0
        """Of a position of a sequence that is behind; 0: not known."""
        self._scale_s = 0.0
        self._warming = WARM_UP

    def of(self, rows: int) -> float:
        """Of a round with so many sequences; 0: not known."""
        return self._scale_s * (_BASE_ROWS + rows)

    def observe(self, rows: int, behind: int, seconds: float) -> None:
        """A round took so long. behind: positions that it computed for sequences that were
        behind."""
        if self._warming:
            self._warming -= 1
        elif behind:
            each = max(0.0, seconds - self.of(rows)) / behind
            self.position_s += (each - self.position_s) * (_NEWEST if self.position_s else 1.0)
        elif rows:
            scale = seconds / (_BASE_ROWS + rows)
            self._scale_s += (scale - self._scale_s) * (_NEWEST if self._scale_s else 1.0)


class ModelDrafter:
    """A Drafter by a model. It learns how often guesses of a probability are right."""

    computes = True

    def __init__(self, model: DraftModel, kind: str = "draft") -> None:
        """kind: its name in metrics."""
        self.kind = kind
        self.kinds = (kind,)
        self.seconds = 0.0
        self.behind_s = 0.0
        self._model = model
        self._known: dict[int, _Drafted] = {}
        self._odds = Odds(_CLASSES + 1)
        """Of all sequences, as those of each."""
        self._cost = _RoundCost()
        self._refused = 0
        """Calls since the last guess in which no round paid."""

    def draft(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        self.seconds = self.behind_s = 0.0
        found = [NOTHING] * len(wishes)
        rows = []
        for index, wish in enumerate(wishes):
            known = self._take_up(wish)
            rows.append(_Row(index, wish, known, self._hope(known)))
        rows, most = self._that_pay(rows, prices)
        balance = _Balance(prices)
        ready, chunks, behind = self._catch_up(rows, prices)
        live = [(row, 1.0) for row in ready]
        odds: dict[int, list[float]] = {row.number: [] for row in ready}
        for number in range(most):
            if number:
                live = self._that_go_on(live, balance, tried=most < MOST_DRAFTS)
                chunks = [_next_chunk(row) for row, _ in live]
            if not chunks:
                break
            guesses, seconds = self._model.compute(chunks)
            self.seconds += seconds
            if behind:
                self.behind_s = max(0.0, seconds - self._cost.of(len(live)))
                balance.behind_s = self.behind_s
            self._cost.observe(len(live), behind, seconds)
            balance.drafting_s = self.seconds - balance.behind_s
            balance.drafts += len(live)
            behind = 0
            for i, ((row, worth), guess) in enumerate(zip(live, guesses, strict=True)):
                known, index = row.known, _class_of(guess.probability)
                known.guesses.append(guess.token_id)
                known.classes.append(index)
                each = self._guess(known, index, guess.probability)
                odds[row.number].append(each)
                live[i] = row, worth * each
                balance.gain += worth * each
        if ready:
            self._refused = 0
        for row in ready:
            found[row.number] = Draft(tuple(row.known.guesses), odds[row.number], self.kind)
        return found

    def peek(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        found = [NOTHING] * len(wishes)
        rows = []
        for index, wish in enumerate(wishes):
            known = self._known.get(wish.sequence_id) or _new(wish)
            rows.append(_Row(index, wish, known, self._hope(known)))
        for row in self._that_pay(rows, prices)[0]:
            found[row.number] = Draft(odds=[row.hope] * row.wish.most, kind=self.kind)
        return found

    def forget(self, sequence_id: int) -> None:
        self._known.pop(sequence_id, None)

    def hope(self, wish: Wish) -> float:
        """How likely the next guess for a sequence is right."""
        return self._hope(self._known.get(wish.sequence_id) or _new(wish))

    def _take_up(self, wish: Wish) -> _Drafted:
        """Compares guesses with what was drawn."""
        tokens, known = wish.tokens, self._known.get(wish.sequence_id)
        if known is None:
            known = self._known[wish.sequence_id] = _new(wish)
        right = 0
        for i, (guess, index) in enumerate(zip(known.guesses, known.classes, strict=True)):
            if known.size + i >= len(tokens):
                break
            hit = tokens[known.size + i] == guess
            for each in (index, _ANY):
                known.odds.learn(each, hit, _KEEP_OWN)
                self._odds.learn(each, hit, _KEEP_ALL)
            if not hit:
                break
            right += 1
        if known.guesses:
            written = known.size + min(right, len(known.guesses) - 1)
            known.computed = min(written, len(tokens) - 1)
            known.guesses, known.classes = [], []
        if known.stay != wish.stay:
            known.stay, known.computed = wish.stay, 0
        known.size = len(tokens)
        start = self._model.start(wish.sequence_id, known.computed)
        # What a step computed for a token that was dropped is ahead of its tokens.
        known.able = start is not None and start < len(tokens)
        if start is not None:
            known.computed = start
        return known

    def _that_pay(self, rows: list[_Row], prices: Prices) -> tuple[list[_Row], int]:
        """For which a round pays, and how many rounds there may be."""
        balance = _Balance(prices)
        able = [row for row in rows if self._is_able(row)]
        rows = [row for row in able if self._goes_on(row, 1.0, balance)]
        if len(rows) > prices.room:
            rows = sorted(rows, key=lambda row: (_missing(row) > _NEAR, -row.hope))[: prices.room]
        seconds = self._cost.of(len(rows))
        if rows and not (seconds and prices.step_s) and balance.has_time(0.0):
            return rows, _FIRST_ROUNDS
        if rows and balance.pays(sum(row.hope for row in rows), len(rows), seconds):
            return rows, MOST_DRAFTS
        self._refused += bool(able)
        if able and self._refused > _AGAIN_AFTER and balance.has_time(self._cost.of(1)):
            return sorted(able, key=_missing)[: -(-len(able) // _TRIED)], _FIRST_ROUNDS
        return [], 0

    def _that_go_on(
        self, live: list[tuple[_Row, float]], balance: _Balance, *, tried: bool
    ) -> list[tuple[_Row, float]]:
        """Those of a round that compute the next one, with what their drafts are worth. tried:
        whatever it takes."""
        if tried:
            has_time = balance.has_time(self._cost.of(len(live)))
            return [one for one in live if has_time and self._is_able(one[0])][: balance.room]
        live = [one for one in live if self._goes_on(*one, balance)]
        if len(live) > balance.room:
            live = sorted(live, key=lambda one: -one[1])[: balance.room]
        worth = sum(worth * row.hope for row, worth in live)
        seconds = self._cost.of(len(live))
        return live if live and balance.pays(worth, len(live), seconds) else []

    def _is_able(self, row: _Row) -> bool:
        """Whether one more draft can be computed and used."""
        wish, guesses = row.wish, row.known.guesses
        if not row.known.able or (guesses and guesses[-1] in wish.ends):
            return False
        inputs = len(wish.tokens) + len(guesses)
        return len(guesses) < wish.most and inputs <= self._model.max_positions

    def _goes_on(self, row: _Row, worth: float, balance: _Balance) -> bool:
        """Whether one more draft, behind some that are worth so much, is worth being verified."""
        worth *= row.hope
        return self._is_able(row) and worth > LEAST_WORTH and balance.pays(worth, 1, 0.0)

    def _catch_up(self, rows: list[_Row], prices: Prices) -> tuple[list[_Row], list[Chunk], int]:
        """The rows of the first round, its chunks, and how many positions these compute for
        sequences that are behind. Of such a sequence there are a few in each step."""
        position_s = self._cost.position_s
        left = _FIRST_POSITIONS
        if position_s and prices.step_s:
            left = max(1, int(min(_SHARE * prices.step_s, prices.within_s) / position_s))
        ready, chunks, partly = [], [], []
        behind = 0
        for row in sorted(rows, key=_missing):
            wish, known, missing = row.wish, row.known, _missing(row)
            end = len(wish.tokens)
            if missing > _NEAR:
                # About what its drafts can still save.
                saved_s = row.hope * wish.left * prices.step_s / prices.rows
                if not left or (position_s and saved_s and missing * position_s > saved_s):
                    continue
                if known.computed + left < end:
                    # In a block that is shared, the rest of a tile is another's.
                    whole_tiles = (known.computed + left) // _TILE
                    end = max(whole_tiles, known.computed // _TILE + 1) * _TILE
                left = max(0, left - end + known.computed)
                behind += end - known.computed
            whole = end == len(wish.tokens)
            tokens = wish.tokens[known.computed : end]
            chunk = Chunk(wish.sequence_id, tokens, known.computed, wish.extents)
            known.computed = end
            if whole:
                ready.append(row)
                chunks.append(chunk._replace(samples=_WANTED))
            else:
                partly.append(chunk)
        return ready, chunks + partly, behind

    def _hope(self, known: _Drafted) -> float:
        return self._guess(known, _ANY, _PRIOR)

    def _guess(self, known: _Drafted, index: int, prior: float) -> float:
        of_all = self._odds.guess(index, prior, _WEIGHT)
        return known.odds.guess(index, of_all, _WEIGHT)


def _new(wish: Wish) -> _Drafted:
    return _Drafted(wish.stay, Odds(_CLASSES + 1))


def _missing(row: _Row) -> int:
    """Positions to compute before the first guess; 1 at least, that of the last token."""
    return len(row.wish.tokens) - row.known.computed


def _next_chunk(row: _Row) -> Chunk:
    """Of the newest guess."""
    wish, guesses = row.wish, row.known.guesses
    first = len(wish.tokens) + len(guesses) - 1
    return Chunk(wish.sequence_id, guesses[-1:], first, wish.extents, _WANTED)


def _class_of(probability: float) -> int:
    return min(_CLASSES - 1, int(probability * _CLASSES))


_Find = Callable[[Many[Wish], Prices], list[Draft]]


class Drafters:
    """A Drafter that looks up, and has a model compute where that is worth more."""

    computes = True

    def __init__(self, model: DraftModel, kind: str = "draft") -> None:
        """kind: the name of the model's drafts in metrics."""
        self.kinds = (NgramDrafter.kind, kind)
        self._ngram = NgramDrafter()
        self._model = ModelDrafter(model, kind)

    @property
    def seconds(self) -> float:
        return self._model.seconds

    @property
    def behind_s(self) -> float:
        return self._model.behind_s

    def draft(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        return self._better(self._ngram.draft, self._model.draft, wishes, prices)

    def peek(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        return self._better(self._ngram.peek, self._model.peek, wishes, prices)

    def forget(self, sequence_id: int) -> None:
        self._ngram.forget(sequence_id)
        self._model.forget(sequence_id)

    def _better(
        self, look_up: _Find, compute: _Find, wishes: Many[Wish], prices: Prices
    ) -> list[Draft]:
        """What look-up finds, or the model where that is worth more. It is asked where it will
        probably find more."""
        found = look_up(wishes, prices)
        asked = []
        for i, (draft, wish) in enumerate(zip(found, wishes, strict=True)):
            hopes = [self._model.hope(wish)] * min(wish.most, MOST_DRAFTS)
            if sum(worths(draft.odds)) < sum(worths(hopes)):
                asked.append(i)
        for i, draft in zip(asked, compute([wishes[i] for i in asked], prices), strict=True):
            if sum(worths(draft.odds)) > sum(worths(found[i].odds)):
                found[i] = draft
        return found


def drafter_of(speculation: str, model: DraftModel | None) -> Drafter | None:
    """What finds drafts, by the policy's name for it; None: nothing. Without a model, which ranks
    and runners for tests do not have, there is look-up alone."""
    if speculation == "off":
        return None
    if speculation != NgramDrafter.kind and model is not None:
        return Drafters(model, speculation)
    return NgramDrafter()
