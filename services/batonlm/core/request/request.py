"""The request of a client and the events of its answer, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

from batonlm.core.admission.tenants import ANYONE, Tenant
from batonlm.core.observe.stages import UNTRACED, StageTimes, TraceContext

if TYPE_CHECKING:
    from batonlm.core.request.resumption import StreamPosition


class GrammarKind(Enum):
    """The language in which a Grammar is written."""

    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3
    GBNF = 4


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole answer follows, unless the answer ends early for another reason."""

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression that must match the whole answer, llguidance's dialect of
    Lark, or llama.cpp's GBNF. The public entries convert every other form of structured output to
    one of these."""

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal for equal grammars only."""
        return blake2b(f"{self.kind.name}\0{self.text}".encode(), digest_size=16).digest()


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    TOOL_CALLS = 4


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of a choice is sampled. All values are resolved defaults."""

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
    """Number of alternatives to report with each token's log-probability; None reports none."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: all."""

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
    """When a choice ends. Counts are output tokens of the choice across all attempts."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that an assistant made."""

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
    """Only in messages of role assistant."""
    tool_call_id: str = ""
    """The id of the call that a message of role tool answers."""
    name: str = ""
    """The name of the participant, where several share one role, or of the tool."""
    reasoning: str = ""
    """Only in messages of role assistant."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """A JSON schema as text; empty when the function has no parameters."""


class ToolUse(Enum):
    """Whether an answer calls tools."""

    NONE = 1
    AUTO = 2
    REQUIRED = 3


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether an answer calls tools, and which."""

    use: ToolUse = ToolUse.AUTO
    name: str = ""
    """The one tool to call, with REQUIRED only; empty: any tool."""
    parallel: bool = True
    """Whether an answer may contain several calls."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, which the model's chat template renders to text."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_kwargs: str = ""
    """Additional template variables as the text of a JSON object, or empty."""
    template: str = ""
    """A template that replaces the model's own, where the operator allows it, or empty."""
    needed_variables: tuple[str, ...] = ()
    """Names of template_kwargs without which the answer is another one: a template that has no such
    variable is an error."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """A query, and a text that may answer it."""

    query: str
    document: str


VectorInput = str | tuple[int, ...] | TextPair
"""A text, token ids with the special tokens that the model needs, or a pair to score."""


@dataclass(frozen=True, slots=True)
class VectorPrompt:
    """What an encode worker computes: the vectors of texts and ids, or the scores of pairs."""

    inputs: tuple[VectorInput, ...]
    """All pairs, or none."""
    dimensions: int = 0
    """Numbers of each vector to keep, from its start; 0: all."""
    truncate_tokens: int | None = None
    """Drops what exceeds so many tokens; -1: what exceeds the model's length; None: that is an
    error."""
    prompt_name: str = ""
    """Which of the model's prompts goes before each text; empty: its default one."""

    @property
    def scores(self) -> bool:
        return bool(self.inputs) and isinstance(self.inputs[0], TextPair)


Prompt = TextPrompt | TokenPrompt | ChatPrompt | VectorPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """A request as every public entry passes it to the router's pipeline."""

    prompt: Prompt
    model: str = ""
    n: int = 1
    """The number of choices."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Its `seed` is ignored here; the request has a `seed` of its own."""
    seed: int | None = None
    """None: the router draws one."""
    max_tokens: int | None = None
    """Output tokens of a choice. None: up to the model's context length; 0: nothing is generated.
    """
    cap_max_tokens: bool = False
    """Whether `max_tokens` is lowered to the room that the prompt leaves in the model's context.
    False: more than that is an error."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    deadline_s: float | None = None
    """Seconds from arrival; None: the router's limit applies."""
    tenant: Tenant = ANYONE
    cache_salt: bytes = b""
    grammar: Grammar | None = None
    echo: bool = False
    """Whether Accepted includes the text of the prompt."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each prompt token; None reports
    none."""
    truncate_prompt_tokens: int | None = None
    """The most prompt tokens to keep; -1: as many as leave room for the output."""
    truncation_side: str = "left"
    """The side where tokens are dropped: "left" keeps the end, "right" keeps the beginning."""
    trace: TraceContext = UNTRACED
    """The trace context of the caller."""
    resumable: bool = False
    """Whether another run of the request may continue its stream, so that it has to be one that any
    router can repeat."""
    no_speculation: bool = False
    """Whether workers compute no drafts of its tokens."""
    resumes: StreamPosition | None = None
    """What the client has of an earlier run's stream, which this one continues."""
    keyed_stream_id: str = ""
    """The id of its stream where that is known before it runs: it follows from the client's
    idempotency key, or the request runs in the background. Else empty."""

    def stream_id(self, request_id: str) -> str:
        """Returns the id of its stream, from which what is left to chance follows. request_id: of
        this run, which is that of a stream that it begins without a key."""
        if self.resumes is not None:
            return self.resumes.stream_id
        return self.keyed_stream_id or request_id

    @property
    def may_go_on_elsewhere(self) -> bool:
        """Whether its client can get the rest of its stream at another router."""
        return self.resumable or bool(self.keyed_stream_id)

    @property
    def least_room(self) -> int:
        """The output tokens of a choice for which the model's context must have room."""
        return 1 if self.cap_max_tokens else max(1, self.max_tokens or 0)

    def of(self, tenant: Tenant, trace: TraceContext = UNTRACED) -> Request:
        """Returns the request with the tenant of its API key and the trace context of its caller.
        Called once, at the public entry."""
        return replace(self, tenant=tenant, cache_salt=tenant.salted(self.cache_salt), trace=trace)


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """One token with its bytes (not always whole characters) and its natural log-probability."""

    token_id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a sampled token and the most likely tokens at its position, best
    first."""

    token: TextLogprob
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event of every request."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    """Filled only when the request asks for token ids."""
    prompt_text: str = ""
    """Filled only when the request asks for it."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per prompt token, when requested. The number of the first token has no meaning,
    because no token precedes it."""
    trace_id: str = ""
    """The trace id, when the request is traced."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """An increment of one tool call. `id` and `name` are set in the first delta of an index only;
    `arguments` is JSON text that follows what was sent before."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """An increment of one choice."""

    choice: int
    text: str = ""
    """Whole characters that follow what was sent before. It may lag behind `token_ids` while a
    possible stop string or an incomplete character is held back. In a chat, reasoning and tool
    calls are in their own fields instead."""
    token_ids: Sequence[int] = ()
    """Always filled; the public entries drop them when the client did not ask for them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last delta of the choice, with what stopped it."""
    stop_string: str | None = None
    stop_token_id: int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def join_deltas(choice: int, parts: Sequence[Delta]) -> Delta:
    """Joins all deltas of a choice into one. The last one determines how it ended."""
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
    """The last event of every request that did not fail."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stages: StageTimes | None = None
    """None when the operator hides it."""
    reasoning_tokens: int = 0
    """The part of `completion_tokens` that was reasoning."""
    tried_tokens: int = 0
    """Tokens, of prompt and output, of a model that was asked before this one and did not suffice.
    They are charged, too."""


Event = Accepted | Delta | Finished
