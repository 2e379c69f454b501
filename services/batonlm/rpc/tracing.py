"""Spans of Baton's processes: their interface, which records nothing by itself, and all names.

`batonlm.rpc.otel` has the recording implementation. Every time is a reading of `now`, in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType

from batonlm.core.errors import BatonError, Reason
from batonlm.core.observe.stages import UNTRACED, TraceContext

now = time.perf_counter
"""The clock of spans and of a request's stages, in seconds. It is monotonic."""

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
"""Failures that the caller causes. The span carries them as `error.type`, but its status is not
ERROR."""


class Kind(Enum):
    """The kind of a span, as in OpenTelemetry."""

    SERVER = 1
    """Answers a call from another process."""
    CLIENT = 2
    """Calls another process."""
    INTERNAL = 3


class Span:
    """One timed operation. The code that begins a span ends it on every path; only the first `end`
    counts, and later changes are dropped. No method waits or raises.

    This class itself records nothing; `batonlm.rpc.otel` has the one that does.
    """

    recording = False
    """Whether the span is recorded. If not, a caller can skip costly attributes."""

    @property
    def context(self) -> TraceContext:
        """The context to pass to other processes. UNTRACED unless the span is recorded."""
        return UNTRACED

    def child(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        kind: Kind = Kind.INTERNAL,
        at: float | None = None,
    ) -> Span:
        """Begins a child span, which may outlive this one. at: when it began; None: now."""
        return self

    def rename(self, name: str) -> None:
        """Changes the span's name."""

    def set_attributes(self, attributes: Mapping[str, Value]) -> None:
        """Adds attributes; a newer value replaces an older one."""

    def event(self, name: str, *, at: float | None = None) -> None:
        """Adds an event. at: when it happened; None: now."""

    def end(self, error: str = "", *, at: float | None = None) -> None:
        """Ends the span. error: the kind of failure, as `error_type` names it; "": success."""


class Tracer:
    """Begins the spans of one process. This class itself begins none that is recorded."""

    def begin(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        parent: TraceContext = UNTRACED,
        at: float | None = None,
    ) -> Span:
        """Begins a call's span, in the caller's trace or, without one, in a new trace. A span that
        is not sampled is not recorded."""
        return NO_SPAN

    def go_on(
        self,
        name: str,
        attributes: Mapping[str, Value] = NOTHING,
        *,
        parent: TraceContext,
        at: float | None = None,
    ) -> Span:
        """Begins a call's span in the caller's trace; without one, the span is not recorded."""
        return self.begin(name, attributes, parent=parent, at=at) if parent.trace_id else NO_SPAN

    def close(self) -> None:
        """Sends the remaining spans, in bounded time. A process calls it last."""


NO_SPAN = Span()
OFF = Tracer()


@contextmanager
def ending(span: Span) -> Iterator[Span]:
    """Ends a span when the block ends, with `error_type` of an exception that leaves it."""
    try:
        yield span
    except BaseException as error:
        span.end(error_type(error))
        raise
    finally:
        span.end()


def error_type(error: BaseException | None) -> str:
    """The kind of a failure in one word, never its text; "" for None."""
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
    """The context in gRPC metadata or HTTP headers, whose names are in lower case. UNTRACED where
    there is none, or where a header occurs twice."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in TraceContext._fields:
            if name in found:
                return UNTRACED
            found[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    return TraceContext(**found) if "traceparent" in found else UNTRACED


def metadata_of(context: TraceContext) -> tuple[tuple[str, str], ...]:
    """The context as metadata of a gRPC call; empty when UNTRACED."""
    return tuple((name, value) for name, value in context._asdict().items() if value)


# The names of all spans, attributes and events. `gen_ai.` names follow OpenTelemetry's conventions
# for generative AI, which still change; Baton's own begin with `baton`. Of a client's input,
# attributes hold only the model's name and numeric parameters.

SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
CHAT = "chat"
TEXT_COMPLETION = "text_completion"
EMBEDDINGS = "embeddings"
RERANK = "rerank"
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
"""Event: the first text for the client is available."""

SCORE = "score_prompt"
"""Span of the router: computing the prompt's log probabilities, before the attempts."""

ATTEMPT = "attempt"
"""Span of the router, one per attempt; the spans of its workers are below it."""
ATTEMPT_NUMBER = "baton.attempt.number"
ATTEMPT_REASON = "baton.attempt.reason"
ATTEMPT_MOVED = "baton.attempt.moved"
ATTEMPT_POSITION = "baton.attempt.position"
ATTEMPT_TOKENS = "baton.attempt.input_tokens"
PREFILL_WORKER = "baton.prefill.instance_id"
DECODE_WORKER = "baton.decode.instance_id"

ENCODE = "tokenizer.encode"
TO_TEXT = "tokenizer.decode"
VECTORS = "encode.run"

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
