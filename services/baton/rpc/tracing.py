"""Spans of Baton's processes: their interface, the one that records nothing, and all names.

`baton.rpc.otel` has the real spans. Every time is a reading of `now`.
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


# The names of all spans, attributes and events. Those with `gen_ai.` are OpenTelemetry's
# conventions for generative AI, which still change; ours begin with `baton`. No attribute holds
# text of a client but the model's name and the request's parameters that are numbers.


SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
CHAT = "chat"
TEXT_COMPLETION = "text_completion"
BATON = "baton"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

TENANT = "baton.tenant"
ATTEMPTS = "baton.attempts"
MOVES = "baton.moves"
KV_BYTES = "baton.transfer.bytes"

FIRST_TOKEN = "baton.first_token"
"""Event: the client's first text is there."""

SCORE = "score_prompt"
"""Span of the router: how likely the prompt is, before its attempts."""

ATTEMPT = "attempt"
"""Span of the router, one an attempt; what its workers do is below it."""
ATTEMPT_NUMBER = "baton.attempt.number"
ATTEMPT_REASON = "baton.attempt.reason"
ATTEMPT_MOVED = "baton.attempt.moved"
ATTEMPT_POSITION = "baton.attempt.position"
ATTEMPT_TOKENS = "baton.attempt.input_tokens"
PREFILL_WORKER = "baton.prefill.instance_id"
DECODE_WORKER = "baton.decode.instance_id"

ENCODE = "tokenizer.encode"
TO_TEXT = "tokenizer.decode"

PREFILL_RUN = "prefill.run"
PREFILL_QUEUE = "prefill.queue"
PREFILL_COMPUTE = "prefill.compute"
WORKER_CACHED_TOKENS = "baton.cached_tokens"

GIVE = "handover.give"
COLLECT = "handover.collect"

DECODE_RUN = "decode.run"
DECODE_PREFILL = "decode.prefill"
GENERATE = "decode.generate"

TEXT = "detokenizer.text"
TEXT_TOKENS = "baton.text.tokens"
