"""Numbers in place of values, millions at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Ints = npt.NDArray[np.int64]


class Ids(dict[T, int]):
    """Numbers for values, in the order in which they are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.values_in_order: list[T] = []

    def __missing__(self, value: T) -> int:
        self[value] = found = len(self.values_in_order)
        self.values_in_order.append(value)
        return found


class Table:
    """A function of small numbers with small numbers as results, computed once for each."""

    def __init__(self, function: Callable[[int], int]):
        self._function = function
        self._values = np.full(1024, -1, dtype=np.int64)

    def __call__(self, numbers: Ints) -> Ints:
        if not len(numbers):
            return numbers
        above = int(numbers.max()) + 1
        if above > len(self._values):
            room = np.full(max(above, 2 * len(self._values)) - len(self._values), -1)
            self._values = np.concatenate((self._values, room))
        found = self._values[numbers]
        if found.min() < 0:
            for number in distinct(numbers[found < 0]).tolist():
                self._values[number] = self._function(number)
            found = self._values[numbers]
        return found


class Lists:
    """A function of small numbers with lists of rows of small numbers, computed once for each."""

    def __init__(self, function: Callable[[int], Iterable[tuple[int, ...]]], width: int):
        self._function = function
        self._starts = array("q", [0])
        self._columns = [array("q") for _ in range(width)]
        self._table = Table(self._append)

    def __call__(self, numbers: Ints) -> tuple[Ints, list[Ints]]:
        """Of every number all rows: (which of the numbers, the rows' columns)."""
        ids = self._table(numbers)
        starts = _view(self._starts)
        first = starts[ids]
        counts = starts[ids + 1] - first
        which = np.repeat(np.arange(len(numbers)), counts)
        at = np.arange(len(which)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        return which, [_view(column)[at] for column in self._columns]

    def _append(self, number: int) -> int:
        for row in self._function(number):
            for column, value in zip(self._columns, row, strict=True):
                column.append(value)
        self._starts.append(len(self._columns[0]))
        return len(self._starts) - 2


class Seen:
    """A set of numbers that grows by many at a time."""

    def __init__(self) -> None:
        self._runs: list[Ints] = []

    def add(self, numbers: Ints) -> Ints:
        """Returns those that were not in it. numbers: distinct, in order, as are the returned."""
        for run in self._runs:
            if not len(numbers):
                return numbers
            at = np.searchsorted(run, numbers)
            at[at == len(run)] = 0
            numbers = numbers[run[at] != numbers]
        if len(numbers):
            self._runs.append(numbers)
            # Few and ever larger runs, so that looking up stays cheap and merging does too.
            while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
                last = self._runs.pop()
                self._runs[-1] = in_order([self._runs[-1], last])
        return numbers

    def all(self) -> Ints:
        return in_order(self._runs)


def in_order(arrays: list[Ints]) -> Ints:
    joined = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
    joined.sort()
    return joined


def distinct(*arrays: Ints) -> Ints:
    """In order. Several times as fast as numpy's own."""
    ordered = in_order(list(arrays))
    if not len(ordered):
        return ordered
    fresh = np.empty(len(ordered), dtype=bool)
    fresh[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return ordered[fresh]


def _view(numbers: array[int]) -> Ints:
    """Without a copy. While it lives the array cannot grow."""
    return np.frombuffer(numbers, dtype=np.int64)
