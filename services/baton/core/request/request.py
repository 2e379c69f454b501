"""What a client asks for, frozen, and the events that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b

from baton.core.admission.tenants import ANYONE, Tenant
from baton.core.observe.stages import UNTRACED, StageTimes, TraceContext


class GrammarKind(Enum):
    """What the text of a Grammar is written in."""

    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3
    GBNF = 4


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole answer follows, unless something else ends the answer before."""

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression that must match the whole answer, llguidance's dialect of
    Lark, or llama.cpp's GBNF. Every other way to ask for structure becomes one of these at the
    edge."""

    @property
    def digest(self) -> bytes:
        """16 bytes that name it: equal for equal grammars only."""
        return blake2b(f"{self.kind.name}\0{self.text}".encode(), digest_size=16).digest()


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    TOOL_CALLS = 4


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice's next token is drawn. All values are resolved: nothing is absent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    top_logprobs: int | None = None
    """How many alternatives to report with each token's log-probability; None reports nothing."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; none named: all may."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a choice ends. Counts are output tokens of the choice over all attempts."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """In messages of an assistant only."""
    tool_call_id: str = ""
    """The call that the message of a tool answers."""
    name: str = ""
    """Who speaks, where several have one role, or which tool."""
    reasoning: str = ""
    """In messages of an assistant only."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """A JSON schema as text; empty: the function has none."""


class ToolUse(Enum):
    """Whether an answer calls tools."""

    NONE = 1
    AUTO = 2
    REQUIRED = 3


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and which tools an answer calls."""

    use: ToolUse = ToolUse.AUTO
    name: str = ""
    """The one tool to call, with REQUIRED only; empty: any."""
    parallel: bool = True
    """Whether an answer may have several calls."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, which the chat template of the model turns into a text."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_kwargs: str = ""
    """More variables of the template, a JSON object as text, or empty."""
    template: str = ""
    """A template instead of the model's own, where the operator allows it, or empty."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as every public entry hands it to the router's pipeline."""

    prompt: Prompt
    model: str = ""
    n: int = 1
    """Choices."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Its seed has no meaning here: see `seed`."""
    seed: int | None = None
    """None: the router draws one."""
    max_tokens: int | None = None
    """Output tokens of a choice. None: up to the model's context; 0: nothing is generated."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    deadline_s: float | None = None
    """Seconds from arrival; None: as long as the router allows."""
    tenant: Tenant = ANYONE
    cache_salt: bytes = b""
    grammar: Grammar | None = None
    echo: bool = False
    """Whether Accepted has the text of the prompt."""
    prompt_logprobs: int | None = None
    """How many alternatives to report with the log-probability of each token of the prompt; None
    reports nothing."""
    truncate_prompt_tokens: int | None = None
    """Keeps at most so many of the prompt's tokens; -1: as many as leave room for the output."""
    truncation_side: str = "left"
    """Where tokens are dropped: "left" keeps those at the end, "right" those at the beginning."""
    trace: TraceContext = UNTRACED
    """The caller's own."""

    def of(self, tenant: Tenant, trace: TraceContext = UNTRACED) -> Request:
        """The same request, of the tenant whose key it has, as a part of the caller's trace. Called
        once, at the edge."""
        return replace(self, tenant=tenant, cache_salt=tenant.salted(self.cache_salt), trace=trace)


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """One token with its own bytes (not always whole characters) and natural log-probability."""

    token_id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A sampled token's log-probability and the most likely tokens at its position, best first."""

    token: TextLogprob
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of every request."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    """Only when token ids were asked for."""
    prompt_text: str = ""
    """Only when it was asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One of each of the prompt's tokens, when asked for. The first one's number says nothing, as
    nothing comes before it."""
    trace_id: str = ""
    """Of its trace, where it has one."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one call. id and name come once, with the first delta of an index; arguments are JSON
    text that follows what was sent before."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one choice. `text` is whole characters that follow what was sent before.

    Of a chat, what the model thinks aloud is in `reasoning` and its calls are in `tool_calls`
    instead of in `text`.

    token_ids are filled always; entries drop them when the client did not ask. Text may lag behind
    tokens (held back for a stop string or an unfinished character). finish_reason is set on the
    choice's last delta, with what stopped it.
    """

    choice: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def join_deltas(choice: int, parts: Sequence[Delta]) -> Delta:
    """One Delta with all of a choice. The last part says how it ended."""
    calls: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        calls.setdefault(call.index, call)
        arguments.setdefault(call.index, []).append(call.arguments)
    return replace(
        parts[-1] if parts else Delta(choice),
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        tool_calls=tuple(
            replace(call, arguments="".join(arguments[index])) for index, call in calls.items()
        ),
    )


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of every request that did not fail."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stages: StageTimes | None = None
    """Unless the operator wants it not told."""
    reasoning_tokens: int = 0
    """How many of the completion's were reasoning."""


Event = Accepted | Delta | Finished
