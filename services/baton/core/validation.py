"""The one check that every public entry (HTTP, gRPC) puts a Request through.

Knows neither wire formats nor any model: what depends on the model (its name, its context, its
vocabulary) is checked where the model is known. Field names in errors are those of `Request`, its
parts and `SamplingParams`; an entry whose clients use other names translates them.

A request that passes costs a bounded amount of memory and work, whatever it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.core.errors import InvalidArgument
from baton.core.request import ChatPrompt, Message, Request, SamplingParams, TextPrompt, TokenPrompt


class Range(NamedTuple):
    """Numbers from low to high, both included unless `above`: then low itself is not."""

    low: float
    high: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """False for NaN and the infinities too: no comparison with NaN is true."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"from {self.low:.10g} to {self.high:.10g}"


INT32_MAX = 2**31 - 1
MAX_PROMPT_BYTES = 1 << 20
MAX_PROMPT_TOKENS = 1 << 18
MAX_MESSAGES = 2048
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT_BYTES = 1024
MAX_MODEL_NAME_BYTES = 256

ROLES = ("system", "user", "assistant", "tool")

TOKEN_ID = Range(0, INT32_MAX)

SAMPLING_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0, INT32_MAX),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 10, above=True),
    "top_logprobs": Range(0, 20),
}
LOGIT_BIAS = Range(-100, 100)

REQUEST_RANGES = {
    "n": Range(1, 16),
    "max_tokens": Range(1, INT32_MAX),
    "min_tokens": Range(0, INT32_MAX),
    "seed": Range(0, 2**64 - 1),
    "priority": Range(-(2**31), INT32_MAX),
    "deadline_s": Range(0, 86_400, above=True),
}


def validate(request: Request) -> Request:
    """The request itself, or InvalidArgument naming the first field at fault."""
    _check_prompt(request)
    for field, bounds in REQUEST_RANGES.items():
        _check_number(field, getattr(request, field), bounds)
    _check_sampling(request.sampling)
    _check_stops(request)
    _check_text("model", request.model, MAX_MODEL_NAME_BYTES)
    if len(request.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise _wrong("cache_salt", f"must have at most {MAX_CACHE_SALT_BYTES} bytes")
    return request


def _check_prompt(request: Request) -> None:
    match request.prompt:
        case TextPrompt(text=text):
            if not text:
                raise _wrong("prompt", "must not be empty")
            _check_text("prompt", text, MAX_PROMPT_BYTES)
        case TokenPrompt(token_ids=ids):
            if not ids:
                raise _wrong("prompt", "must not be empty")
            _check_length("prompt", ids, MAX_PROMPT_TOKENS, "tokens")
            _check_token_ids("prompt", ids)
        case ChatPrompt() as chat:
            _check_chat(chat)


def _check_chat(chat: ChatPrompt) -> None:
    if not chat.messages:
        raise _wrong("messages", "must not be empty")
    _check_length("messages", chat.messages, MAX_MESSAGES, "messages")
    room = MAX_PROMPT_BYTES
    for index, message in enumerate(chat.messages):
        room -= _check_message(f"messages[{index}]", message)
        if room < 0:
            raise _wrong("messages", f"must have at most {MAX_PROMPT_BYTES} bytes of content")
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            raise _wrong(
                "continue_final_message", "cannot be combined with add_generation_prompt = true"
            )
        if chat.messages[-1].role != "assistant":
            raise _wrong("continue_final_message", "needs a last message of role assistant")


def _check_message(field: str, message: Message) -> int:
    if message.role not in ROLES:
        raise _wrong(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    return _check_text(f"{field}.content", message.content, MAX_PROMPT_BYTES)


def _check_sampling(sampling: SamplingParams) -> None:
    for field, bounds in SAMPLING_RANGES.items():
        _check_number(field, getattr(sampling, field), bounds)
    _check_length("logit_bias", sampling.logit_bias, MAX_LOGIT_BIASES, "entries")
    _check_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
    if len({token_id for token_id, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise _wrong("logit_bias", "names a token twice")
    for _, bias in sampling.logit_bias:
        _check_number("logit_bias", bias, LOGIT_BIAS)


def _check_stops(request: Request) -> None:
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise _wrong("min_tokens", "must not be above max_tokens")
    _check_length("stop_strings", request.stop_strings, MAX_STOP_STRINGS, "entries")
    for stop in request.stop_strings:
        if not stop:
            raise _wrong("stop_strings", "must not contain an empty string")
        _check_text("stop_strings", stop, MAX_STOP_STRING_BYTES)
    _check_length("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS, "entries")
    _check_token_ids("stop_token_ids", request.stop_token_ids)


def _check_number(field: str, value: float | None, bounds: Range) -> None:
    if value is not None and not bounds.holds(value):
        raise _wrong(field, f"must be {bounds}")


def _check_token_ids(field: str, ids: Sequence[int]) -> None:
    # min and max run in C: a prompt of 262 144 tokens is checked in milliseconds.
    if ids and not (TOKEN_ID.holds(min(ids)) and TOKEN_ID.holds(max(ids))):
        raise _wrong(field, f"has a token id that is not {TOKEN_ID}")


def _check_length(field: str, items: Sequence[object], most: int, noun: str) -> None:
    if len(items) > most:
        raise _wrong(field, f"must have at most {most} {noun}")


def _check_text(field: str, text: str, most: int) -> int:
    """The text's size in UTF-8 bytes. Refuses lone surrogates, which no wire can carry."""
    if len(text) > most:
        raise _wrong(field, f"must have at most {most} bytes")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _wrong(field, "is not valid Unicode text") from None
    if size > most:
        raise _wrong(field, f"must have at most {most} bytes")
    return size


def _wrong(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {what}", field=field)
