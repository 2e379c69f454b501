"""Spans as Baton's processes speak of them.

The port and its double for a process that sends its spans nowhere. `baton.rpc.otel` is the real
one, loaded where an endpoint is configured and only there. Every time is a reading of `now`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from baton.core.errors import BatonError, Reason
from baton.core.observe.stages import UNTRACED, TraceContext

now = time.perf_counter
"""The clock of spans: it does not jump, and the stages of a request are timed by it."""

Value = str | int | float | bool | Sequence[str]

NOTHING: Mapping[str, Value] = MappingProxyType({})

NOT_OURS = frozenset(
    reason.name.lower()
    for reason in (
        Reason.CANCELLED,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        Reason.INVALID_ARGUMENT,
        Reason.MODEL_NOT_FOUND,
    )
)
"""Failures that are the caller's doing: they are told, and the span does not count as failed."""


class Kind(Enum):
    SERVER = 1
    """Answers a call from another process."""
    CLIENT = 2
    """Calls another process."""
    INTERNAL = 3


class Span(Protocol):
    """Something that takes time. Whoever begins it ends it, on every way out; only the first `end`
    counts, and what is said afterwards is dropped. Nothing here waits or raises."""

    @property
    def recording(self) -> bool:
        """Whether anything of it is kept; attributes that cost something need not be made else."""

    @property
    def context(self) -> TraceContext:
        """For others to go on with. UNTRACED unless it is recorded."""

    def child(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        kind: Kind = Kind.INTERNAL,
        at: float | None = None,
    ) -> Span:
        """A part of it, which may outlive it. at: when it began; None: now."""

    def rename(self, name: str) -> None: ...

    def tell(self, attributes: Mapping[str, Value]) -> None:
        """Adds attributes; a newer value takes an older one's place."""

    def event(self, name: str, *, at: float | None = None) -> None:
        """Something that happened at one moment of it."""

    def end(self, error: str = "", *, at: float | None = None) -> None:
        """error: the kind of failure, as `error_type` names it; "": it went well."""


class Tracer(Protocol):
    """Begins the spans of one process."""

    def begin(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        parent: TraceContext = UNTRACED,
        at: float | None = None,
    ) -> Span:
        """A call's span, of the caller's trace or, where it has none, of a new one. What is not
        sampled is not recorded."""

    def go_on(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        parent: TraceContext,
        at: float | None = None,
    ) -> Span:
        """A call's span, of the caller's trace; not recorded where that has none."""

    def close(self) -> None:
        """Sends what is left, in bounded time. The last thing a process does with it."""


class NoSpan:
    """The Span of what is not recorded."""

    recording = False
    context = UNTRACED

    def child(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        kind: Kind = Kind.INTERNAL,
        at: float | None = None,
    ) -> Span:
        return self

    def rename(self, name: str) -> None:
        return

    def tell(self, attributes: Mapping[str, Value]) -> None:
        return

    def event(self, name: str, *, at: float | None = None) -> None:
        return

    def end(self, error: str = "", *, at: float | None = None) -> None:
        return


NO_SPAN = NoSpan()


class NoTracer:
    """The Tracer of a process that sends its spans nowhere."""

    def begin(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        parent: TraceContext = UNTRACED,
        at: float | None = None,
    ) -> Span:
        return NO_SPAN

    def go_on(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        parent: TraceContext,
        at: float | None = None,
    ) -> Span:
        return NO_SPAN

    def close(self) -> None:
        return


OFF = NoTracer()


@contextmanager
def ending(span: Span) -> Iterator[Span]:
    """Ends a span with the block, however that ends."""
    try:
        yield span
    except BaseException as error:
        span.end(error_type(error))
        raise
    finally:
        span.end()


def error_type(error: BaseException | None) -> str:
    """The kind of a failure in one word, never its text; "" of none."""
    match error:
        case None:
            return ""
        case BatonError():
            return error.reason.name.lower()
        case asyncio.CancelledError() | GeneratorExit():
            return Reason.CANCELLED.name.lower()
        case _:
            return Reason.INTERNAL.name.lower()


def context_of(headers: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """The context that gRPC metadata or HTTP headers carry; their names are in lower case."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in TraceContext._fields:
            if name in found:
                return UNTRACED
            found[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    return TraceContext(**found) if "traceparent" in found else UNTRACED


def metadata_of(context: TraceContext) -> tuple[tuple[str, str], ...]:
    """For a gRPC call. Empty where nothing is traced."""
    return tuple((name, value) for name, value in context._asdict().items() if value)
