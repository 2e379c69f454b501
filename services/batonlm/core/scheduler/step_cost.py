"""StepCost, how long a step will probably take.

A best guess, unlike `StepTimes`, which is pessimistic because it decides whether a worker lives.
Steps without prefill teach a + b * rows + c * context. Steps with prefill teach only the seconds
that one prefilled position adds to that, so a long time without any forgets nothing about it. The
growth of a position's cost with its context is not modelled: it is averaged over recent chunks
(`PrefillCost` has it, for those who look further ahead than one step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from batonlm.core.routing.load import reads
from batonlm.core.scheduler.plan import Chunk, StepWork

_KEEP = 0.99
"""Weight that evidence keeps with each newer one: the fit looks at some hundred of them."""
_KEEP_WITH_DRAFTS = 0.9
"""Less, so that after a while without drafts a few show what one takes now."""

_REFIT_EVERY = 8
_PULL = 1e-4
"""Share of a term's own evidence that pulls its weight towards 0, which decides between terms that
always changed together."""


class Regression:
    """value = sum of weights * terms, by least squares over what was observed.

    Old evidence fades, and no weight is below 0: more work never takes less time, whatever was
    measured.
    """

    def __init__(self, num_terms: int, keep: float = _KEEP) -> None:
        """keep: the weight that evidence keeps with each newer one."""
        self._keep = keep
        self._products = [[0.0] * num_terms for _ in range(num_terms)]
        self._sums = [0.0] * num_terms
        self.weights = (0.0,) * num_terms
        """All 0 until something was observed; replaced as a whole, so that another thread may read
        them."""
        self._unfitted = 0
        self._seen = 0

    def observe(self, terms: Sequence[float], value: float, *, at_once: bool = False) -> None:
        """at_once: the weights are those of all that was observed, and not a little older."""
        keep = self._keep
        for i, row in enumerate(self._products):
            self._sums[i] = keep * self._sums[i] + terms[i] * value
            for j, term in enumerate(terms):
                row[j] = keep * row[j] + terms[i] * term
        self._unfitted += 1
        self._seen += 1
        if at_once or self._unfitted >= _REFIT_EVERY or self._seen < _REFIT_EVERY:
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

    def __init__(self, *, drafts: bool = False) -> None:
        """drafts: whether steps may have some."""
        self._drafts = drafts
        self._decode = Regression(3)
        self._with_drafts: dict[int, Regression] = {}
        """By the class of a step's rows: of a step, a position that rows look back on, a draft."""
        self._warming: dict[int, int] = {}
        """By the class, how many of its first steps with drafts still teach nothing."""
        self._num_measured: Counter[int] = Counter()
        """By the class, steps with drafts that taught something."""
        self.prefill_position_s: float | None = None
        """Of one prefilled position; None until there was one."""

    @property
    def curve(self) -> tuple[float, float, float]:
        """Seconds of a step without prefill: for itself, for a row, and for a row's position."""
        step_s, row_s, position_s = self._decode.weights
        return step_s, row_s, position_s

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        if self._drafts:
            self._observe_drafts(work, seconds)
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

    @staticmethod
    def class_of(rows: int) -> int:
        """Steps of similar numbers of rows are of one class: what one position more takes depends
        on how many there are."""
        return rows.bit_length()

    def with_drafts(self, work: StepWork) -> tuple[float, float]:
        """Seconds of a step with this work, and of one draft in it, 0 until there was one.

        A class that had none borrows from the nearest below that had."""
        size = self.class_of(work.rows)
        known = self._with_drafts.get(size)
        if known is None:
            step_s = self.predict(work)
        else:
            step_s = known.predict((1.0, float(work.context), 0.0))
            step_s += work.prefill * (self.prefill_position_s or 0.0)
        measured = (s for s in range(size, 0, -1) if self.knows_drafts(s))
        found = next(measured, None)
        return step_s, 0.0 if found is None else self._with_drafts[found].weights[2]

    def knows_drafts(self, size: int) -> bool:
        """Whether drafts were measured in steps of this class."""
        return self._num_measured[size] > 0

    def _observe_drafts(self, work: StepWork, seconds: float) -> None:
        if work.prefill:
            return
        size = self.class_of(work.rows)
        left = self._warming.setdefault(size, WARM_UP)
        if work.drafts and left:
            self._warming[size] = left - 1
            return
        known = self._with_drafts.get(size)
        if known is None:
            known = self._with_drafts[size] = Regression(3, _KEEP_WITH_DRAFTS)
        terms = 1.0, float(work.context), float(work.drafts)
        known.observe(terms, seconds, at_once=work.drafts > 0)
        self._num_measured[size] += work.drafts > 0

    def most_prefill(self, rows: int, context: int, within_s: float) -> int | None:
        """How many positions can be prefilled next to these rows within a time, at least 0; None
        when that is not known."""
        if not self.prefill_position_s:
            return None
        left = within_s - self.predict(StepWork(rows, context))
        return max(0, int(left / self.prefill_position_s))


def _terms(work: StepWork) -> tuple[float, float, float]:
    return 1.0, float(work.rows), float(work.context)
