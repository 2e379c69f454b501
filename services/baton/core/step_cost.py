"""StepCost, how long a step will probably take; knows no clock, only what it is told.

A best guess, unlike `StepTimes`, which is pessimistic for those who watch whether a worker lives.
Steps without prefill teach a + b * rows + c * context, fitted by least squares with old steps
slowly forgotten; every term's cost is at least 0. Steps with prefill teach only the seconds that
one prefilled position adds to that, so a long time without any forgets nothing about it. The
growth of a position's cost with its context is not modelled: it is averaged over recent chunks.
"""

from __future__ import annotations

from baton.core.plan import StepWork

_KEEP = 0.99
"""Weight that a step's evidence keeps with each newer one: the fit looks at some hundred steps."""

_RENEW = 0.2
"""Weight of the newest step among those with prefill."""

_REFIT_EVERY = 8
_PULL = 1e-4
"""Share of a term's own evidence that pulls its weight towards 0, which decides between terms that
always changed together."""


class StepCost:
    """All times are seconds. Until a kind of work was seen it counts as costing nothing."""

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._weights = (0.0, 0.0, 0.0)
        self._unfitted = 0
        self._seen = 0
        self.prefill_position_s: float | None = None
        """Of one prefilled position; None until there was one."""

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        if work.prefill:
            added = max(0.0, seconds - self.predict(work._replace(prefill=0))) / work.prefill
            known = self.prefill_position_s
            self.prefill_position_s = added if known is None else known + _RENEW * (added - known)
            return
        terms = _terms(work)
        for i, row in enumerate(self._products):
            self._sums[i] = _KEEP * self._sums[i] + terms[i] * seconds
            for j in range(3):
                row[j] = _KEEP * row[j] + terms[i] * terms[j]
        self._unfitted += 1
        self._seen += 1
        if self._unfitted >= _REFIT_EVERY or self._seen < _REFIT_EVERY:
            self._unfitted = 0
            self._weights = _fit(self._products, self._sums)

    def predict(self, work: StepWork) -> float:
        """Seconds that a step with this work will take."""
        terms = _terms(work)
        decode_s = sum(w * t for w, t in zip(self._weights, terms, strict=True))
        return decode_s + work.prefill * (self.prefill_position_s or 0.0)

    def most_prefill(self, rows: int, context: int, within_s: float) -> int | None:
        """How many positions can be prefilled next to these rows within a time, at least 0; None
        when that is not known."""
        if not self.prefill_position_s:
            return None
        left = within_s - self.predict(StepWork(rows, context))
        return max(0, int(left / self.prefill_position_s))


def _terms(work: StepWork) -> tuple[float, float, float]:
    return 1.0, float(work.rows), float(work.context)


def _fit(products: list[list[float]], sums: list[float]) -> tuple[float, float, float]:
    """Least squares with no weight below 0: terms that would get one are left out, worst first."""
    used = [i for i in range(3) if products[i][i] > 0.0]
    while used:
        matrix = [[products[i][j] * (1.0 + _PULL * (i == j)) for j in used] for i in used]
        found = _solve(matrix, [sums[i] for i in used])
        worst = min(range(len(used)), key=found.__getitem__)
        if found[worst] >= 0.0:
            weights = dict(zip(used, found, strict=True))
            return weights.get(0, 0.0), weights.get(1, 0.0), weights.get(2, 0.0)
        del used[worst]
    return 0.0, 0.0, 0.0


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
