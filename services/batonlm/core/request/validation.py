"""Validation of a Request, which every public entry (HTTP, gRPC) applies.

Field names in errors are those of `Request`, its parts and `SamplingParams`; an entry whose clients
use other names translates them. A request that passes needs bounded memory and work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import (
    ChatPrompt,
    Grammar,
    Message,
    Prompt,
    Request,
    SamplingParams,
    TextPair,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolChoice,
    ToolUse,
    VectorPrompt,
)

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""A JSON escape of a surrogate, which may be half of a pair or lone."""


def check_length(field: str, items: Sequence[object], most: int, noun: str) -> None:
    if len(items) > most:
        raise wrong(field, f"must have at most {most} {noun}")


def check_text(field: str, text: str, most: int) -> int:
    """Returns the size of the text in UTF-8 bytes. Raises InvalidArgument for lone surrogates,
    which cannot be encoded, and for texts that are too long."""
    if len(text) > most:
        raise wrong(field, f"must have at most {most} bytes")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise wrong(field, "is not valid Unicode text") from None
    if size > most:
        raise wrong(field, f"must have at most {most} bytes")
    return size


def check_json_text(field: str, text: str) -> None:
    """Raises InvalidArgument for JSON with an escape of a lone surrogate, which would be invalid
    text once parsed. Text that is not JSON passes, because it is used as plain text."""
    if not _SURROGATE.search(text):
        return
    try:
        whole = is_whole(json.loads(text))
    except (ValueError, RecursionError):
        return
    if not whole:
        raise wrong(field, "must have no escape of half a character")


def is_whole(value: Any) -> bool:
    """Whether every text in a JSON value, including keys, consists of whole characters. Raises
    RecursionError."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,199}")


def is_adapter_name(name: str) -> bool:
    return _ADAPTER_NAME.fullmatch(name) is not None


def check_adapter_name(name: str) -> None:
    """Raises InvalidArgument (`name`). Without a colon, so that "model:adapter" has one meaning."""
    if not is_adapter_name(name):
        raise wrong("name", "must be 1 to 200 letters, digits and ._/@+-, the first no sign")


def wrong(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {what}", field=field)


# Additional variables that a client passes to its chat template. A template is third-party code, so
# they are small plain JSON and cannot replace the conversation itself.

FIELD = "template_kwargs"
MAX_BYTES = 1 << 14
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)
"""Names that have request fields of their own, or that would change what the template returns."""


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Returns the variables by name; empty for an empty text. Raises InvalidArgument naming
    FIELD."""
    if not text:
        return {}
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise _wrong(f"must have at most {MAX_BYTES} bytes")
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
        whole = is_whole(values)
    except (ValueError, RecursionError):
        raise _wrong("must be JSON, and not nested deeply") from None
    if not whole:
        raise _wrong("must have no escape of half a character")
    if not isinstance(values, dict):
        raise _wrong("must be a JSON object")
    for name in values:
        if not name.isidentifier() or name.startswith("_"):
            raise _wrong("must have keys that are names, without an underscore in front")
        if name in RESERVED:
            raise _wrong(f"must not set {name}")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _wrong(what: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD} {what}", field=FIELD)


# Validation of a conversation and its tools. Field names are those of ChatPrompt and its parts.

MAX_CHAT_BYTES = 1 << 20
MAX_MESSAGES = 2048
MAX_CALLS_PER_MESSAGE = 128
MAX_CHAT_TEMPLATE_BYTES = 1 << 16
MAX_TOOLS = 1024
"""OpenAI allows 128, Anthropic names no number. Their bytes count, too."""
MAX_SCHEMA_BYTES = 1 << 16
MAX_SCHEMA_DEPTH = 32
MAX_NAME_BYTES = 256

ROLES = ("system", "user", "assistant", "tool")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""Anthropic's; OpenAI allows 64 characters."""


def check_chat(chat: ChatPrompt) -> None:
    """Raises InvalidArgument naming the first invalid field."""
    if not chat.messages:
        raise wrong("messages", "must not be empty")
    check_length("messages", chat.messages, MAX_MESSAGES, "messages")
    room = MAX_CHAT_BYTES
    for index, message in enumerate(chat.messages):
        room -= _check_message(f"messages[{index}]", message)
        if room < 0:
            raise wrong("messages", f"must have at most {MAX_CHAT_BYTES} bytes of content")
    check_text("template", chat.template, MAX_CHAT_TEMPLATE_BYTES)
    parse_template_kwargs(chat.template_kwargs)
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            raise wrong(
                "continue_final_message", "cannot be combined with add_generation_prompt = true"
            )
        if chat.messages[-1].role != "assistant":
            raise wrong("continue_final_message", "needs a last message of role assistant")
    check_length("tools", chat.tools, MAX_TOOLS, "tools")
    for index, tool in enumerate(chat.tools):
        room -= _check_tool(f"tools[{index}]", tool)
        if room < 0:
            raise wrong("tools", f"and messages must have at most {MAX_CHAT_BYTES} bytes")
    names = [tool.name for tool in chat.tools]
    if len(set(names)) < len(names):
        raise wrong("tools", "must not have two of one name")
    _check_choice(chat.tool_choice, names)


def _check_message(field: str, message: Message) -> int:
    """Returns the bytes of the message."""
    if message.role not in ROLES:
        raise wrong(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    size = check_text(f"{field}.content", message.content, MAX_CHAT_BYTES)
    if not (message.tool_calls or message.tool_call_id or message.name or message.reasoning):
        if message.role == "tool":
            raise wrong(f"{field}.tool_call_id", "is required in a message of role tool")
        return size
    size += check_text(f"{field}.name", message.name, MAX_NAME_BYTES)
    size += check_text(f"{field}.reasoning", message.reasoning, MAX_CHAT_BYTES)
    size += check_text(f"{field}.tool_call_id", message.tool_call_id, MAX_NAME_BYTES)
    if (message.role == "tool") != bool(message.tool_call_id):
        raise wrong(f"{field}.tool_call_id", "must be in messages of role tool, and only there")
    if message.role != "assistant" and (message.tool_calls or message.reasoning):
        misplaced = "tool_calls" if message.tool_calls else "reasoning"
        raise wrong(f"{field}.{misplaced}", "must be in messages of role assistant only")
    return size + _check_calls(f"{field}.tool_calls", message)


def _check_calls(field: str, message: Message) -> int:
    check_length(field, message.tool_calls, MAX_CALLS_PER_MESSAGE, "calls")
    size = 0
    for index, call in enumerate(message.tool_calls):
        where = f"{field}[{index}]"
        if not call.id:
            raise wrong(f"{where}.id", "must not be empty")
        if not call.name:
            raise wrong(f"{where}.name", "must not be empty")
        size += check_text(f"{where}.id", call.id, MAX_NAME_BYTES)
        size += check_text(f"{where}.name", call.name, MAX_NAME_BYTES)
        size += check_text(f"{where}.arguments", call.arguments, MAX_CHAT_BYTES)
        check_json_text(f"{where}.arguments", call.arguments)
    return size


def _check_tool(field: str, tool: Tool) -> int:
    if not _NAME.fullmatch(tool.name):
        raise wrong(f"{field}.name", "must be 1 to 128 letters, digits, _ or -")
    size = check_text(f"{field}.description", tool.description, MAX_CHAT_BYTES)
    size += check_text(f"{field}.parameters", tool.parameters, MAX_SCHEMA_BYTES)
    if tool.parameters:
        check_json_text(f"{field}.parameters", tool.parameters)
        _check_schema(f"{field}.parameters", tool.parameters)
    return len(tool.name) + size


def _check_schema(field: str, text: str) -> None:
    """Checks only that the schema can be one of an object; the grammar compiler checks the rest."""
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise wrong(field, "must be JSON") from None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise wrong(field, "must be the JSON schema of an object")
    if not isinstance(schema.get("properties", {}), dict):
        raise wrong(field, "must have an object as properties")
    if not isinstance(schema.get("required", []), list):
        raise wrong(field, "must have a list as required")
    if not _is_flat(schema, MAX_SCHEMA_DEPTH):
        raise wrong(field, f"must be nested at most {MAX_SCHEMA_DEPTH} deep")


def _no_number(constant: str) -> Any:
    raise ValueError(constant)


def _is_flat(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not parts or (depth > 0 and all(_is_flat(part, depth - 1) for part in parts))


def _check_choice(choice: ToolChoice, names: list[str]) -> None:
    if choice.name and choice.use is not ToolUse.REQUIRED:
        raise wrong("tool_choice", "can name a tool only where a call is required")
    if choice.name and choice.name not in names:
        raise wrong("tool_choice", "must name one of tools")
    if choice.use is ToolUse.REQUIRED and not names:
        raise wrong("tool_choice", "cannot require a call without tools")


class Range(NamedTuple):
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float
    above: bool = False
    """Excludes `low` itself."""

    def holds(self, value: float) -> bool:
        """Whether the value is in the range. False for NaN and the infinities."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"from {self.low:.10g} to {self.high:.10g}"


INT32_MAX = 2**31 - 1
MAX_PROMPT_BYTES = 1 << 20
MAX_PROMPT_TOKENS = 1 << 18
MAX_VECTOR_INPUTS = 2048
MAX_VECTOR_BYTES = 1 << 23
"""Of all inputs of a request, a query counted with each of its documents."""
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


VECTOR_RANGES = {
    "dimensions": Range(0, 1 << 16),
    "truncate_tokens": Range(-1, INT32_MAX),
}


def validate(request: Request) -> Request:
    """Returns the request itself. Raises InvalidArgument naming the first invalid field."""
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
        case VectorPrompt() as vectors:
            _check_vectors(vectors)


def _check_vectors(prompt: VectorPrompt) -> None:
    field = "documents" if prompt.scores else "inputs"
    if not prompt.inputs:
        raise wrong(field, "must not be empty")
    check_length(field, prompt.inputs, MAX_VECTOR_INPUTS, "entries")
    left = MAX_VECTOR_BYTES
    for given in prompt.inputs:
        match given:
            case TextPair(query, document):
                if not query:
                    raise wrong("query", "must not be empty")
                left -= check_text("query", query, MAX_PROMPT_BYTES)
                left -= check_text(field, document, MAX_PROMPT_BYTES)
            case str():
                left -= check_text(field, given, MAX_PROMPT_BYTES)
            case _:
                check_length(field, given, MAX_PROMPT_TOKENS, "tokens")
                _check_token_ids(field, given)
        if not given or (isinstance(given, TextPair) and not given.document):
            raise wrong(field, "must not have an empty entry")
        if left < 0:
            raise wrong(field, f"must have at most {MAX_VECTOR_BYTES} bytes with their query")
    _check_number("dimensions", prompt.dimensions, VECTOR_RANGES["dimensions"])
    if prompt.truncate_tokens is not None:
        _check_number("truncate_tokens", prompt.truncate_tokens, VECTOR_RANGES["truncate_tokens"])
        if prompt.truncate_tokens == 0:
            raise wrong("truncate_tokens", "must not be 0")
    check_text("prompt_name", prompt.prompt_name, MAX_NAME_BYTES)


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
