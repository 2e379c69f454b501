"""How far loading has come, from transformers' own bar to a callback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) while weights are read."""


class Bar:
    """Turns steps of any size into (done, total) calls that never go backwards."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress = progress
        self._done = 0
        self.total = total

    def advance(self, count: int) -> None:
        self._done = min(self._done + count, self.total)
        if self._progress is not None:
            self._progress(self._done, self.total)


class _WeightsBar:
    """Stands in for transformers' own progress bar, which counts tensors."""

    def __init__(self, bar: Bar, items: Any):
        self._bar = bar
        self._items = list(items)

    def __iter__(self) -> Iterator[Any]:
        share = self._bar.total // 2 // max(1, len(self._items))
        for item in self._items:
            yield item
            self._bar.advance(share)
        self._bar.advance(self._bar.total)


@contextmanager
def quiet(bar: Bar) -> Iterator[None]:
    """Transformers' bar drives ours, and its advice to Python users is not printed."""

    def hook(factory: Any, args: Any, kwargs: Any) -> Any:
        items = args[0] if args else kwargs.get("iterable")
        return factory(*args, **kwargs) if items is None else _WeightsBar(bar, items)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
        transformers_logging.set_verbosity(verbosity)
