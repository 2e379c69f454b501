"""Regression, weights that turn measured terms into a value; knows not what is measured.

Least squares over what was told, old evidence slowly forgotten, no weight below 0: more work never
takes less time, whatever was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEEP = 0.99
"""Weight that evidence keeps with each newer one: the fit looks at some hundred of them."""

_REFIT_EVERY = 8
_PULL = 1e-4
"""Share of a term's own evidence that pulls its weight towards 0, which decides between terms that
always changed together."""


class Regression:
    """value = sum of weights * terms. weights: all 0 until something was observed; replaced as a
    whole, so that another thread may read them."""

    def __init__(self, num_terms: int) -> None:
        self._products = [[0.0] * num_terms for _ in range(num_terms)]
        self._sums = [0.0] * num_terms
        self.weights = (0.0,) * num_terms
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
