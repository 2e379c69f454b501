"""When a detokenizer is asked for the text of a request's new tokens: at once, or, while the router
is too busy to send each by itself, together with those that come soon.

Knows neither the detokenizer nor the client. What the client is not to be told yet needs no text
yet; but stop strings are searched for in the text, so with those nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from baton.core.observe.load_monitor import LoadMonitor
from baton.core.request.token_log import TokenLog
from baton.router.request.deferred_calls import DeferredCalls


class TokenCoalescer:
    """ask: has the text of a choice's new tokens asked for. searched: there are stop strings."""

    def __init__(
        self,
        logs: Sequence[TokenLog],
        ask: Callable[[int], None],
        pace: LoadMonitor,
        later: DeferredCalls,
        *,
        searched: bool,
    ) -> None:
        self._logs = logs
        self._ask = ask
        self._pace = pace
        self._later = later
        self._searched = searched
        self._told_at = 0.0
        self._clock = asyncio.get_running_loop().time
        self._waiting: set[int] = set()

    def told(self) -> None:
        """The client has just been told something."""
        self._told_at = self._clock()

    @property
    def early_s(self) -> float:
        """How much too early it would be to tell the client more now; 0 or less: it is not."""
        if not (self._told_at and self._pace.interval_s):
            return 0.0
        return self._told_at + self._pace.interval_s - self._clock()

    def came(self, choice: int) -> None:
        """A choice's log has grown or ended. Neither the first tokens wait nor the last."""
        if self._pace.interval_s and not (self._searched or self._logs[choice].ended):
            if choice in self._waiting:
                return
            if self.early_s > 0:
                self._waiting.add(choice)
                due = self._told_at + self._pace.interval_s
                self._later.at(due, partial(self._waited, choice))
                return
        self._ask(choice)

    def _waited(self, choice: int) -> None:
        self._waiting.discard(choice)
        self._ask(choice)
