"""StepCost, how long a step will probably take, and DraftCost, what drafts add to it.

A best guess, unlike `StepTimes`, which is pessimistic because it decides whether a worker lives.
Steps without prefill teach a + b * rows + c * context. Steps with prefill teach only the seconds
that one prefilled position adds to that, so a long time without any forgets nothing about it. The
growth of a position's cost with its context is not modelled: it is averaged over recent chunks
(`PrefillCost` has it, for those who look further ahead than one step).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import median

from batonlm.core.routing.load import reads
from batonlm.core.scheduler.plan import Chunk, StepWork

_KEEP = 0.99
"""Weight that evidence keeps with each newer one: the fit looks at some hundred of them."""

_REFIT_EVERY = 8
_PULL = 1e-4
"""Share of a term's own evidence that pulls its weight towards 0, which decides between terms that
always changed together."""


class Regression:
    """value = sum of weights * terms, by least squares over what was observed.

    Old evidence fades, and no weight is below 0: more work never takes less time, whatever was
    measured.
    """

    def __init__(self, num_terms: int) -> None:
        self._products = [[0.0] * num_terms for _ in range(num_terms)]
        self._sums = [0.0] * num_terms
        self.weights = (0.0,) * num_terms
        """All 0 until something was observed; replaced as a whole, so that another thread may read
        them."""
        self._unfitted = 0
        self._seen = 0

    def observe(self, terms: Sequence[float], value: float) -> None:
        for i, row in enumerate(self._products):
            self._sums[i] = _KEEP * self._sums[i] + terms[i] * value
            for j, term in enumerate(terms):
                row[j] = _KEEP * row[j] + terms[i] * term
        self._unfitted += 1
        self._seen += 1
        if self._unfitted >= _REFIT_EVERY or self._seen < _REFIT_EVERY:
            self._unfitted = 0
            self.weights = _fit(self._products, self._sums)

    def predict(self, terms: Sequence[float]) -> float:
        return sum(w * t for w, t in zip(self.weights, terms, strict=True))


def _fit(products: list[list[float]], sums: list[float]) -> tuple[float, ...]:
    """Terms that would get a weight below 0 are left out, worst first."""
    used = [i for i in range(len(sums)) if products[i][i] > 0.0]
    while used:
        matrix = [[products[i][j] * (1.0 + _PULL * (i == j)) for j in used] for i in used]
        found = _solve(matrix, [sums[i] for i in used])
        worst = min(range(len(used)), key=found.__getitem__)
        if found[worst] >= 0.0:
            weights = dict(zip(used, found, strict=True))
            return tuple(weights.get(i, 0.0) for i in range(len(sums)))
        del used[worst]
    return (0.0,) * len(sums)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss elimination of a small symmetric system whose diagonal dominates by the pull."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found


WARM_UP = 2
"""First steps that teach nothing: they take longer than any later one, and a worker that is taken
for slow may never be given the work that would show otherwise."""


class PrefillCost:
    """What prefilling so many positions takes, in seconds. What was never seen costs nothing.

    Every step with prefill teaches a + b * positions + c * reads, where a read is one position that
    a computed one attends to: attention grows with the square of a prompt's length, all else does
    not. Reads count from NEAR on, so that short prompts teach nothing about that square: from
    differences as small as theirs, any number could come out for a long prompt.
    """

    def __init__(self) -> None:
        self._fit = Regression(3)
        self._warming = WARM_UP

    @property
    def curve(self) -> tuple[float, float, float]:
        """Seconds of a step for itself, for a position and for a read. All 0: nothing is known."""
        step_s, position_s, read_s = self._fit.weights
        return step_s, position_s, read_s

    def observe(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Computing these chunks in one step took so long, or added so much to it."""
        positions = num_reads = 0
        for chunk in chunks:
            positions += len(chunk.token_ids)
            num_reads += reads(chunk.first_position, chunk.end_position)
        if self._warming and positions:
            self._warming -= 1
        elif positions:
            self._fit.observe((1.0, float(positions), float(num_reads)), seconds)


_FORGET = 0.05
"""Weight of a step that was faster than expected."""


class StepTimes:
    """How long a step of so many tokens may take.

    The guess is pessimistic on purpose: a worker whose step runs for longer than a multiple of it
    counts as dead. It follows slower steps at once and faster ones slowly, in classes of token
    counts that double from one to the next.
    """

    def __init__(self, first_s: float = 10.0):
        """first_s: the guess before anything is known, in seconds: first steps compile."""
        self._first_s = first_s
        self._by_class: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step took so long."""
        size = num_tokens.bit_length()
        known = self._by_class.get(size, seconds)
        self._by_class[size] = max(seconds, known + _FORGET * (seconds - known))

    def predict(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens may take.

        A class without steps of its own borrows: a larger one's time as it is, a smaller one's in
        proportion to the tokens.
        """
        size = num_tokens.bit_length()
        own = self._by_class.get(size)
        if own is not None:
            return own
        larger = [known for known in self._by_class if known > size]
        if larger:
            return self._by_class[min(larger)]
        if self._by_class:
            largest = max(self._by_class)
            return self._by_class[largest] * 2.0 ** (size - largest)
        return self._first_s


_RENEW = 0.2
"""Weight of the newest step among those with prefill."""


class StepCost:
    """How long a step will take, in seconds. Until a kind of work was seen it costs nothing."""

    def __init__(self) -> None:
        self._decode = Regression(3)
        self.prefill_position_s: float | None = None
        """Of one prefilled position; None until there was one."""

    @property
    def curve(self) -> tuple[float, float, float]:
        """Seconds of a step without prefill: for itself, for a row, and for a row's position."""
        step_s, row_s, position_s = self._decode.weights
        return step_s, row_s, position_s

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long. One with drafts teaches nothing here, see `DraftCost`."""
        if work.drafts:
            return
        if work.prefill:
            added = self.added(work, seconds) / work.prefill
            known = self.prefill_position_s
            self.prefill_position_s = added if known is None else known + _RENEW * (added - known)
        else:
            self._decode.observe(_terms(work), seconds)

    def added(self, work: StepWork, seconds: float) -> float:
        """What a step's prefill added to the time of its rows."""
        return max(0.0, seconds - self._decode.predict(_terms(work)))

    def predict(self, work: StepWork) -> float:
        """Seconds that a step with this work, drafts apart, will take."""
        return self._decode.predict(_terms(work)) + work.prefill * (self.prefill_position_s or 0.0)

    def most_prefill(self, rows: int, context: int, within_s: float) -> int | None:
        """How many positions can be prefilled next to these rows within a time, at least 0; None
        when that is not known."""
        if not self.prefill_position_s:
            return None
        left = within_s - self.predict(StepWork(rows, context))
        return max(0, int(left / self.prefill_position_s))


def _terms(work: StepWork) -> tuple[float, float, float]:
    return 1.0, float(work.rows), float(work.context)


ALLOWANCE = 0.01
"""Of the time of all steps, what drafts may lose in the long run."""
_FIRST_BALANCE = 1.0
"""What drafts may lose before they have gained anything, in steps without drafts."""
_LARGEST_BALANCE = 4.0
"""What they may lose of their gains, before they have to gain again."""
_FEWEST_PLAIN = 3
"""Steps without drafts that are measured before there are any: one may have been slowed down."""
_PLAIN_KEPT, _DRAFTED_KEPT = 16, 64
"""So many of the newest steps of a class, without drafts and with some, say what these take."""
_ENOUGH = 8
"""Of fewer of them the median counts, of more the mean: disturbances lengthen that of steps with
drafts, too."""
_PLAIN_EVERY = 8, 32
"""Steps with drafts between two without, at first and later."""
_FADE = 0.99
"""Each step without drafts because of their price lets it fade a little: it is measured again when
it has fallen below what they are worth."""
_KEPT_ON_RETURN = 2
"""Of the steps with drafts that were measured before, so that the new ones count."""
_TRIALS = 6
"""Steps in which that is measured again, one behind the other: from one nothing can be said."""
_TRIED = 8
"""Drafts of a step that measures what they take, at most, and for every other row one."""
_MORE = 2
"""A step has no more than so many times the drafts of any before, as far as these are known."""
_NOISE = 0.1
"""By which part of itself a step's time varies for no known reason."""
_OUTLIER = 1.0
"""What a step may take beyond what is expected, as a part of one without drafts: more than that was
a disturbance, and counts as so much."""
_DEAREST = 2.0
"""What finding the drafts of a step may take, in steps without: more was a disturbance, too, or the
first time."""


class _RowsClass:
    """What is known of steps of similar numbers of rows."""

    def __init__(self) -> None:
        self.plain: deque[tuple[int, float]] = deque(maxlen=_PLAIN_KEPT)
        """Of steps without drafts the rows and the seconds."""
        self._step_s = 0.0
        self._row_s = 0.0
        """What such a step takes for itself, and for a row."""
        self.drafted: deque[tuple[int, float, float]] = deque(maxlen=_DRAFTED_KEPT)
        """Of steps with drafts how many, the seconds that they added, and those without."""
        self.since_plain = 0
        """Steps with drafts since the last one without."""
        self.warming = WARM_UP
        self.faded = 1.0
        """How much of the price counts; nothing while it is measured for the first time."""
        self.trials = _TRIALS
        """After so many more steps with drafts all of it counts again."""
        self.balance = _FIRST_BALANCE
        """What drafts may still lose, in steps without drafts."""
        self.draft_s = 0.0
        """What one draft adds to a step, in seconds, as far as that can be said."""
        self.unsure_s = 0.0
        """By how much more that may be."""

    def learn_plain(self, rows: int, seconds: float, cost: StepCost) -> None:
        """cost: has how much is for a row and how much for the step. How much is for the context is
        not asked: between steps that follow one another it hardly changes, and a wrong slope would
        make drafts seem to cost nothing."""
        self.plain.append((rows, seconds))
        self.since_plain = 0
        step_s, row_s, _ = cost.curve
        if not step_s + row_s:
            step_s = 1.0
        ratios = [took_s / (step_s + row_s * rows) for rows, took_s in self.plain]
        level = median(ratios)
        if len(ratios) >= _ENOUGH:
            most = (1.0 + _OUTLIER) * level
            level = sum(min(ratio, most) for ratio in ratios) / len(ratios)
        self._step_s, self._row_s = level * step_s, level * row_s

    def base_s(self, rows: int) -> float:
        """Seconds of a step of so many rows without drafts; 0 until there was one."""
        return self._step_s + self._row_s * rows

    def learn(self, drafts: int, added_s: float, base_s: float) -> float:
        """Returns what a step's drafts added to it, disturbances apart."""
        self.drafted.append((drafts, added_s, base_s))
        typical = median(added / count for count, added, _ in self.drafted)
        limits = [typical * count + _OUTLIER * base for count, _, base in self.drafted]
        within = [min(one[1], limit) for one, limit in zip(self.drafted, limits, strict=True)]
        total = sum(count for count, _, _ in self.drafted)
        self.draft_s = max(0.0, sum(within) / total)
        steps = len(self.drafted)
        unsure = _NOISE * sqrt(1.0 / steps + 1.0 / max(1, len(self.plain)))
        self.unsure_s = unsure * base_s * steps / total
        return within[-1]

    @property
    def most_measured(self) -> int:
        return max((count for count, _, _ in self.drafted), default=0)


class DraftCost:
    """What drafts add to a step, and whether they have paid for it.

    Both are kept for each doubling of rows, because what one position more takes depends on how
    many there are. The price of a draft is what steps with drafts took more than the newest steps
    without, through the number of drafts, and what it may be more than that by chance. It fades
    while it keeps drafts away; then it is measured in a few steps with few drafts. Where drafts are
    computed, there is a step without from time to time, so that its duration stays known.

    A price is an estimate, and so are a draft's odds. So results count, too: each step adds a
    hundredth of its time to what drafts may lose; a step with drafts takes from it what they added
    to its time and what finding them took, and adds the time in which their tokens would have been
    made without. Where nothing is left there are no drafts, whatever their price seems to be.
    """

    def __init__(self, cost: StepCost) -> None:
        """cost: of steps without drafts; the caller has it observe these."""
        self._cost = cost
        self._classes: dict[int, _RowsClass] = {}
        self._passed: int | None = 0
        """Steps that were planned without drafts while none was observed; None: one was."""
        self._newest: tuple[_RowsClass, int] | None = None
        """The class and the rows of the newest observed step, if it had drafts."""

    def seconds(self, work: StepWork) -> tuple[float, float]:
        """Of a step with this work, drafts apart, and of one draft in it, as far as that counts."""
        known = self._of(work.rows)
        prefill_s = work.prefill * (self._cost.prefill_position_s or 0.0)
        return known.base_s(work.rows) + prefill_s, known.faded * self.draft_s(work.rows)

    def draft_s(self, rows: int) -> float:
        """What a draft takes in a step with so many rows, in seconds; 0 until there was one.

        A class that had none borrows from the nearest below that had."""
        sizes = range(rows.bit_length(), 0, -1)
        known = (self._classes[size] for size in sizes if size in self._classes)
        return next((one.draft_s + one.unsure_s for one in known if one.drafted), 0.0)

    def room(self, rows: int) -> int:
        """How many drafts a step with so many rows may have at most: none where they have lost too
        much, or where a step without them is due."""
        known = self._of(rows)
        if known.balance <= 0.0 or max(len(known.plain), self._passed or 0) < _FEWEST_PLAIN:
            return 0
        first, later = _PLAIN_EVERY
        if known.since_plain >= max(first, min(later, 4 * len(known.plain))):
            return 0
        if known.warming and known.plain:
            return max(1, rows // 8)
        tried = max(_TRIED, rows // 2)
        if not known.drafted:
            return tried
        most = tried if known.faded < 1.0 else max(tried, _MORE * known.most_measured)
        price = known.draft_s / known.drafted[-1][2]
        return max(1, min(most, int(known.balance / price))) if price else most

    def passed(self) -> None:
        """A step was planned without drafts because there is no room for any. Where steps are never
        observed, as in tests, drafts begin after a few."""
        if self._passed is not None:
            self._passed += 1

    def declined(self, rows: int) -> None:
        """Drafts were not computed because of their price."""
        known = self._of(rows)
        known.faded *= _FADE
        known.trials = _TRIALS

    def accepted(self, rows: int) -> None:
        """Drafts are computed at their price."""
        known = self._of(rows)
        if known.warming and known.plain:
            return
        if not known.drafted:
            known.faded = 0.0
        if known.faded == 1.0:
            return
        if known.trials == _TRIALS:
            while len(known.drafted) > _KEPT_ON_RETURN:
                known.drafted.popleft()
        known.trials -= 1
        if not known.trials:
            known.faded, known.trials = 1.0, _TRIALS

    def found(self, rows: int, seconds: float) -> None:
        """Finding the drafts of a step with so many rows took so long."""
        known = self._of(rows)
        if base_s := known.base_s(rows):
            known.balance -= min(_DEAREST, seconds / base_s)

    def observe(self, work: StepWork, seconds: float | None) -> None:
        """A step with rows took so long, which `StepCost` has observed, too. None: it took time for
        what is not work."""
        self._newest = None
        self._passed = None
        known = self._of(work.rows)
        known.balance = min(_LARGEST_BALANCE, known.balance + ALLOWANCE)
        if not work.drafts:
            if not work.prefill and seconds is not None:
                known.learn_plain(work.rows, seconds, self._cost)
            return
        known.since_plain += 1
        if known.warming:
            known.warming -= 1
            return
        base_s = known.base_s(work.rows)
        if base_s:
            if work.prefill or seconds is None:
                added_s = known.draft_s * work.drafts
            else:
                added_s = known.learn(work.drafts, seconds - base_s, base_s)
            known.balance -= added_s / base_s
            self._newest = known, work.rows

    def saved(self, steps: int) -> None:
        """The drafts of the step that was observed last saved their sequences so many steps."""
        if self._newest is not None:
            known, rows = self._newest
            known.balance = min(_LARGEST_BALANCE, known.balance + steps / rows)

    def sat_out(self, waiting: int, running: int) -> None:
        """Sequences are not in the next step because their drafts wait for the one in flight."""
        self._of(running).balance -= waiting / running

    def _of(self, rows: int) -> _RowsClass:
        return self._classes.setdefault(rows.bit_length(), _RowsClass())
