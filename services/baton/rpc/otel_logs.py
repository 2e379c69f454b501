"""What OpenTelemetry says about itself, as Baton's own log lines.

Its lines come with every batch that nobody takes, and hold texts that are not for a log: another
server's words, and headers that carry keys. So only who spoke and the kind of the trouble are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc

SAY_EVERY_S = 60.0
"""Of one kind of trouble; the next line says how many went unsaid."""

log = logging.getLogger(__name__)

_TROUBLES = {
    "opentelemetry.exporter": "the OTLP endpoint takes no spans",
    "opentelemetry.util.re": "a header for the OTLP endpoint is not name=value, and is left out",
}
_OTHER_TROUBLE = "OpenTelemetry may lose spans"


class OtelLogs(logging.Handler):
    """Takes OpenTelemetry's records of WARNING and above."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        trouble = next(
            (said for name, said in _TROUBLES.items() if record.name.startswith(name)),
            _OTHER_TROUBLE,
        )
        now = self._clock()
        if trouble in self._said and now - self._said[trouble] < SAY_EVERY_S:
            self._unsaid[trouble] = self._unsaid.get(trouble, 0) + 1
            return
        self._said[trouble] = now
        told: dict[str, object] = {"source": record.name}
        if kind := _kind(record):
            told["error"] = kind
        if unsaid := self._unsaid.pop(trouble, 0):
            told["unsaid"] = unsaid
        log.warning("%s", trouble, extra=told)


def take_over() -> None:
    """From now on OpenTelemetry's lines are told by OtelLogs and by nobody else."""
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, OtelLogs) for handler in theirs.handlers):
        theirs.handlers = [OtelLogs()]
        theirs.propagate = False


def _kind(record: logging.LogRecord) -> str:
    """In one word, never its text."""
    args = record.args if isinstance(record.args, tuple) else ()
    for arg in args:
        if isinstance(arg, grpc.StatusCode):
            return arg.name.lower()
    return record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
