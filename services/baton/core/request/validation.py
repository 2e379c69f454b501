"""The one check that every public entry (HTTP, gRPC) puts a Request through.

Knows neither wire formats nor any model: what depends on the model (its name, its context, its
vocabulary) is checked where the model is known. Field names in errors are those of `Request`, its
parts and `SamplingParams`; an entry whose clients use other names translates them.

A request that passes costs a bounded amount of memory and work, whatever it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.core.request.chat_validation import check_chat
from baton.core.request.checks import check_length, check_text, wrong
from baton.core.request.grammar import Grammar
from baton.core.request.request import (
    ChatPrompt,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    ToolUse,
)


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
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_CACHE_SALT_BYTES = 1024
MAX_MODEL_NAME_BYTES = 256
MAX_GRAMMAR_BYTES = 1 << 17

TRUNCATION_SIDES = ("left", "right")
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
    "max_tokens": Range(0, INT32_MAX),
    "min_tokens": Range(0, INT32_MAX),
    "seed": Range(0, 2**64 - 1),
    "prompt_logprobs": Range(0, 20),
    "truncate_prompt_tokens": Range(-1, INT32_MAX),
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
    if request.truncate_prompt_tokens == 0:
        raise wrong("truncate_prompt_tokens", "must not be 0")
    if request.truncation_side not in TRUNCATION_SIDES:
        raise wrong("truncation_side", f"must be one of {', '.join(TRUNCATION_SIDES)}")
    if request.grammar is not None:
        _check_grammar(request.grammar, request.prompt)
    check_text("model", request.model, MAX_MODEL_NAME_BYTES)
    if len(request.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise wrong("cache_salt", f"must have at most {MAX_CACHE_SALT_BYTES} bytes")
    return request


def _check_prompt(request: Request) -> None:
    match request.prompt:
        case TextPrompt(text=text):
            if not text:
                raise wrong("prompt", "must not be empty")
            check_text("prompt", text, MAX_PROMPT_BYTES)
        case TokenPrompt(token_ids=ids):
            if not ids:
                raise wrong("prompt", "must not be empty")
            check_length("prompt", ids, MAX_PROMPT_TOKENS, "tokens")
            _check_token_ids("prompt", ids)
        case ChatPrompt() as chat:
            check_chat(chat)


def _check_sampling(sampling: SamplingParams) -> None:
    for field, bounds in SAMPLING_RANGES.items():
        _check_number(field, getattr(sampling, field), bounds)
    allowed = sampling.allowed_token_ids
    check_length("allowed_token_ids", allowed, MAX_ALLOWED_TOKEN_IDS, "entries")
    _check_token_ids("allowed_token_ids", allowed)
    check_length("logit_bias", sampling.logit_bias, MAX_LOGIT_BIASES, "entries")
    _check_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
    if len({token_id for token_id, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise wrong("logit_bias", "names a token twice")
    for _, bias in sampling.logit_bias:
        _check_number("logit_bias", bias, LOGIT_BIAS)


def _check_stops(request: Request) -> None:
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise wrong("max_tokens", f"must be {Range(1, INT32_MAX)}")
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise wrong("min_tokens", "must not be above max_tokens")
    check_length("stop_strings", request.stop_strings, MAX_STOP_STRINGS, "entries")
    for stop in request.stop_strings:
        if not stop:
            raise wrong("stop_strings", "must not contain an empty string")
        check_text("stop_strings", stop, MAX_STOP_STRING_BYTES)
    check_length("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS, "entries")
    _check_token_ids("stop_token_ids", request.stop_token_ids)


def _check_grammar(grammar: Grammar, prompt: Prompt) -> None:
    if not grammar.text:
        raise wrong("grammar", "must not be empty")
    check_text("grammar", grammar.text, MAX_GRAMMAR_BYTES)
    if isinstance(prompt, ChatPrompt) and prompt.tool_choice.use is ToolUse.REQUIRED:
        raise wrong("grammar", "cannot be combined with a tool that must be called")


def _check_number(field: str, value: float | None, bounds: Range) -> None:
    if value is not None and not bounds.holds(value):
        raise wrong(field, f"must be {bounds}")


def _check_token_ids(field: str, ids: Sequence[int]) -> None:
    # min and max run in C: a prompt of 262 144 tokens is checked in milliseconds.
    if ids and not (TOKEN_ID.holds(min(ids)) and TOKEN_ID.holds(max(ids))):
        raise wrong(field, f"has a token id that is not {TOKEN_ID}")
