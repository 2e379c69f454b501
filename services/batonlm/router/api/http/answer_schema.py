"""The JSON answers of the HTTP API as types.

The OpenAPI document is built from them, and commands decode answers with them. A docstring is the
description in that document, so it describes the fields, too. Answers of generating routes are
built as plain values, because there is one for every token; tests compare them strictly with these
types.

Times in the record of a request are seconds. Without an operator's key a record has no worker
addresses, no candidates and predictions of attempts (null), and no messages of losses. A replay
file has no text of the client, except a grammar on request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

FinishReasonWord = Literal["stop", "length", "abort", "tool_calls"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True):
    """Other fields are errors."""


class CachedTokens(StrictStruct):
    cached_tokens: int


class ReasoningTokens(StrictStruct):
    reasoning_tokens: int


class UsageAnswer(StrictStruct):
    """The details: when the request has finished."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | msgspec.UnsetType = msgspec.UNSET
    completion_tokens_details: ReasoningTokens | msgspec.UnsetType = msgspec.UNSET
    tried_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Of a model that was asked first and did not suffice."""


class RankedLogprob(StrictStruct):
    """rank: 1 for the most likely token; null for one that is not among those looked at."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobsAnswer = list[dict[str, RankedLogprob] | None]
"""One a prompt token, by token id; null for the first."""


class ChatLogprob(StrictStruct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobsAnswer(StrictStruct):
    content: list[ChatTokenLogprobs]
    refusal: None


class FunctionAnswer(StrictStruct):
    """arguments: JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(StrictStruct):
    id: str
    type: Literal["function"]
    function: FunctionAnswer


class AssistantMessage(StrictStruct):
    """content: null when there are only calls. reasoning: under both names that it goes by."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallAnswer] | msgspec.UnsetType = msgspec.UNSET


class FinishReasonName(StrictStruct, kw_only=True):
    """stop_reason: the stop string or the named stop token that ended it."""

    index: int
    finish_reason: FinishReasonWord | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(FinishReasonName, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobsAnswer | None


class CachedBy(StrictStruct):
    """Input tokens whose KV a role's workers had."""

    prefill: int
    decode: int


class ServedBy(StrictStruct):
    """address: empty unless the caller shows an operator's key, or the router asks for none and is
    reached by its own machine only."""

    role: str
    instance_id: str
    address: str


class AnswerTimings(StrictStruct):
    """Where a request's time went, in seconds, and who served it; with `x-baton-timings: true`."""

    stages: dict[str, float]
    first_token_s: float
    total_s: float
    cached_tokens: CachedBy
    kv_bytes: int
    attempts: int
    moves: int
    workers: list[ServedBy]


class ChatCompletion(StrictStruct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    baton: AnswerTimings | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsAnswer | msgspec.UnsetType = msgspec.UNSET


class MoreOfFunction(StrictStruct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class MoreOfToolCall(StrictStruct):
    """id, type and name come once, with the first part of an index."""

    index: int
    function: MoreOfFunction
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(StrictStruct):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[MoreOfToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(StrictStruct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobsAnswer | None
    finish_reason: FinishReasonWord | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(StrictStruct, kw_only=True):
    """usage: null but in the last chunk, which has no choices; absent unless asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | msgspec.UnsetType | None = msgspec.UNSET
    baton: AnswerTimings | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextLogprobs(StrictStruct):
    """The first entries are null when the prompt is echoed. text_offset: in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(FinishReasonName, kw_only=True):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsAnswer | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(StrictStruct, kw_only=True):
    """Streamed, each chunk is one of these; usage as in chunks of chats."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageAnswer | msgspec.UnsetType | None = msgspec.UNSET
    baton: list[AnswerTimings] | msgspec.UnsetType = msgspec.UNSET


class ModelAnswer(StrictStruct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    task: Literal["generate", "embed", "score"]


class ModelList(StrictStruct):
    object: Literal["list"]
    data: list[ModelAnswer]


class Tokenized(StrictStruct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(StrictStruct):
    prompt: str


class VectorUsage(StrictStruct):
    prompt_tokens: int
    total_tokens: int


class Embedding(StrictStruct):
    """embedding: as base64, little-endian float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(StrictStruct):
    object: Literal["list"]
    id: str
    model: str
    data: list[Embedding]
    usage: VectorUsage


class RankedText(StrictStruct):
    text: str


class Ranked(StrictStruct):
    """document: unless `return_documents` is false."""

    index: int
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(StrictStruct):
    """The best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: VectorUsage


class Score(StrictStruct):
    index: int
    object: Literal["score"]
    score: float


class Scores(StrictStruct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class Version(StrictStruct):
    version: str


class ErrorDetail(StrictStruct):
    """param: the field at fault, if one is. retryable: whether the same request may do better."""

    message: str
    type: str
    param: str | None
    code: str | None
    retryable: bool


class ErrorAnswer(StrictStruct):
    error: ErrorDetail


class AnsweredText(StrictStruct, tag_field="type", tag="text"):
    text: str


class AnsweredThinking(StrictStruct, tag_field="type", tag="thinking"):
    """thinking: empty where the client wants none of it. signature: need not be sent back."""

    thinking: str
    signature: str


class AnsweredToolUse(StrictStruct, tag_field="type", tag="tool_use"):
    """input: empty where the end of the answer cut it."""

    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse


class ThinkingTokens(StrictStruct):
    thinking_tokens: int


class MessagesUsage(StrictStruct):
    """The tokens of the prompt are input_tokens and both numbers of cached ones. These and the
    details: when the request has finished. tried_tokens: as in `UsageAnswer`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cache_read_input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    output_tokens_details: ThinkingTokens | msgspec.UnsetType = msgspec.UNSET
    tried_tokens: int | msgspec.UnsetType = msgspec.UNSET


class MessageEnding(StrictStruct):
    stop_reason: (
        Literal[
            "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
        ]
        | None
    )
    stop_sequence: str | None


class MessagesMessage(MessageEnding, kw_only=True):
    """Of POST /v1/messages. stop_reason: null in `message_start` only."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    usage: MessagesUsage
    baton: AnswerTimings | msgspec.UnsetType = msgspec.UNSET


class MessageStart(StrictStruct, tag_field="type", tag="message_start"):
    message: MessagesMessage


class ContentBlockStart(StrictStruct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnsweredBlock


class MoreText(StrictStruct, tag_field="type", tag="text_delta"):
    text: str


class MoreThinking(StrictStruct, tag_field="type", tag="thinking_delta"):
    thinking: str


class MoreInput(StrictStruct, tag_field="type", tag="input_json_delta"):
    """partial_json: JSON text that follows what came before."""

    partial_json: str


class BlockSignature(StrictStruct, tag_field="type", tag="signature_delta"):
    signature: str


class ContentBlockDelta(StrictStruct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: MoreText | MoreThinking | MoreInput | BlockSignature


class ContentBlockStop(StrictStruct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(StrictStruct, tag_field="type", tag="message_delta"):
    delta: MessageEnding
    usage: MessagesUsage
    baton: AnswerTimings | msgspec.UnsetType = msgspec.UNSET


class MessageStop(StrictStruct, tag_field="type", tag="message_stop"):
    """The stream is whole."""


class Ping(StrictStruct, tag_field="type", tag="ping"):
    """Nothing is new."""


class ResponseTokens(StrictStruct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class CountedTokens(StrictStruct):
    input_tokens: int


class ModelOfMessages(StrictStruct, tag_field="type", tag="model"):
    """created_at: when this router started."""

    id: str
    display_name: str
    created_at: str


class ModelsOfMessages(StrictStruct):
    data: list[ModelOfMessages]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessagesErrorDetail(StrictStruct):
    type: str
    message: str


class MessagesError(StrictStruct, tag_field="type", tag="error"):
    """Also the last event of a stream that failed."""

    error: MessagesErrorDetail
    request_id: str | None


MESSAGE_EVENTS = (
    MessageStart,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    Ping,
    MessagesError,
)


class ResponseText(StrictStruct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprobs]


class ResponseReasoningText(StrictStruct, tag_field="type", tag="reasoning_text"):
    text: str


class ResponseSummaryText(StrictStruct, tag_field="type", tag="summary_text"):
    text: str


class ResponseOutputMessage(StrictStruct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[ResponseText]


class ResponseReasoning(StrictStruct, tag_field="type", tag="reasoning"):
    """summary: the reasoning itself, where the client asked for its summary, and else empty."""

    id: str
    status: ItemStatus
    summary: list[ResponseSummaryText]
    content: list[ResponseReasoningText]
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class ResponseFunctionCall(StrictStruct, tag_field="type", tag="function_call"):
    """arguments: JSON text; where the end of the answer cut it, the status is incomplete."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


ResponseItem = ResponseOutputMessage | ResponseReasoning | ResponseFunctionCall


class ResponseInputTokens(StrictStruct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(StrictStruct):
    """tried_tokens: as in `UsageAnswer`."""

    input_tokens: int
    input_tokens_details: ResponseInputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    tried_tokens: int | msgspec.UnsetType = msgspec.UNSET


class ResponseFailure(StrictStruct):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(StrictStruct):
    reason: Literal["max_output_tokens"]


class ResponseDocument(StrictStruct):
    """Of POST /v1/responses. usage: null until it is over, and where it failed. What the client
    asked for is repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: None
    baton: AnswerTimings | msgspec.UnsetType = msgspec.UNSET


class ResponseEvent(StrictStruct, kw_only=True):
    """One of a stream of POST /v1/responses. type: as in OpenAI's API; it says which of the other
    fields there are. sequence_number: 0 is the first event's."""

    type: str
    sequence_number: int
    response: ResponseDocument | msgspec.UnsetType = msgspec.UNSET
    item: ResponseItem | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    summary_index: int | msgspec.UnsetType = msgspec.UNSET
    part: ResponseText | ResponseReasoningText | ResponseSummaryText | msgspec.UnsetType = (
        msgspec.UNSET
    )
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatTokenLogprobs] | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ResponseDeleted(StrictStruct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseInputItems(StrictStruct):
    """data: the items of the response's own input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class OllamaCalled(StrictStruct):
    """arguments: empty where the end of the answer cut them."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(StrictStruct):
    id: str
    function: OllamaCalled


class OllamaAssistant(StrictStruct):
    role: Literal["assistant"]
    content: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[OllamaToolCall] | msgspec.UnsetType = msgspec.UNSET


class OllamaLine(StrictStruct, kw_only=True):
    """What follows `done` is in the last line of a stream, where `done` is true, and in an answer
    that is not streamed. Durations are nanoseconds; absent where the operator hides them."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    baton: AnswerTimings | msgspec.UnsetType = msgspec.UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    message: OllamaAssistant


class OllamaGenerateLine(OllamaLine, kw_only=True):
    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class OllamaEmbeddings(StrictStruct):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OllamaEmbedding(StrictStruct):
    embedding: list[float]


class OllamaDetails(StrictStruct):
    """Nothing of it is known to a router."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(StrictStruct):
    """modified_at: when this router started. context_length, size_vram: of running ones only."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    context_length: int | msgspec.UnsetType = msgspec.UNSET
    size_vram: int | msgspec.UnsetType = msgspec.UNSET


class OllamaModels(StrictStruct):
    models: list[OllamaModel]


class OllamaShown(StrictStruct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]


class OllamaError(StrictStruct):
    """Also the last line of a stream that failed."""

    error: str


class ExplainedChoice(StrictStruct):
    """finish_reason: null for one that had not ended when the request did. saved_steps: how many
    more it would have taken without drafts."""

    output_tokens: int
    finish_reason: FinishReasonWord | None
    saved_steps: int = 0


class ExplainedError(StrictStruct):
    """code: the kind of failure, as in the label of baton_requests_total."""

    code: str
    message: str


class ExplainedSplit(StrictStruct):
    """configured: this router has a prefill pool. used: one of its workers prefilled. why: one
    sentence; null before the request has workers."""

    configured: bool
    used: bool
    why: str | None


class ExplainedCandidate(StrictStruct):
    """A worker that was looked at, and what became of it. cost: null where it could not take the
    attempt at all; its total is what is compared."""

    worker: ServedBy
    filter_reason: str
    detail: str
    cost: dict[str, float] | None


class ExplainedLoss(StrictStruct):
    """phase: prefill or decode. at_s: since the request arrived."""

    phase: str
    code: str
    message: str
    at_s: float


class ExplainedPrefix(StrictStruct):
    """worker: in whose cache the beginning of the input was. planned_tokens: what it was believed
    to have; tokens: what came. outcome: empty until it is known. reason: why the attempt did not
    run there; null for those who may not see it."""

    worker: ServedBy
    planned_tokens: int
    tokens: int
    outcome: str
    collect_s: float
    reason: str | None


class ExplainedAttempt(StrictStruct):
    """began_s, ended_s: since the request arrived. position: output tokens accepted before it.
    moved: it went on with KV of another decode worker. state: failed where not all of its choices
    ended in it or left it. others: candidates that are not listed. local_s, remote_s: what was
    compared. kv_s: until decode had all KV, kv_wait_s: since decode reserved its blocks. restored:
    input tokens that came from tiers (host, disk, store) within restore_s; null where none can have
    had any."""

    number: int
    state: Literal["running", "ended", "failed"]
    began_s: float
    ended_s: float | None
    moved: bool
    position: int
    input_tokens: int
    choices: int
    prefill: ServedBy | None
    decode: ServedBy | None
    why: str
    uncached_tokens: int
    predicted_first_token_s: float | None
    local_s: float | None
    remote_s: float | None
    prefill_queue_s: float | None
    prefill_s: float | None
    prefill_cached_tokens: int | None
    decode_cached_tokens: int | None
    kv_bytes: int
    kv_wait_s: float | None
    kv_s: float | None
    restored: dict[str, int] | None
    restore_s: float
    prefix: ExplainedPrefix | None
    candidates: list[ExplainedCandidate]
    others: int
    losses: list[ExplainedLoss]


class Explained(StrictStruct):
    """What one router remembers of one request. stage: of one that runs. cached_tokens, choices:
    once it is over. num_attempts: with those that are not listed."""

    id: str
    object: Literal["baton.request"]
    state: Literal["running", "finished", "failed"]
    stage: str | None
    arrived_at: float
    asked: Literal["chat", "text", "tokens"]
    model: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int | None
    choices: list[ExplainedChoice] | None
    error: ExplainedError | None
    stages: dict[str, float]
    first_token_s: float | None
    total_s: float
    kv_bytes: int
    moves: int
    workers: list[ServedBy]
    split: ExplainedSplit
    num_attempts: int
    attempts: list[ExplainedAttempt]
    replayable: bool


TokenId = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Uint64 = Annotated[int, msgspec.Meta(ge=0)]


class ReplayModel(StrictStruct):
    """digest: of the weights. Only the same ones make the same tokens."""

    name: str
    digest: str


class ReplaySampling(StrictStruct, kw_only=True):
    """seed: the one in use, named by the client or not. logit_bias: pairs of id and bias."""

    seed: Uint64
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[TokenId, float]]
    allowed_token_ids: list[TokenId]


class ReplayStop(StrictStruct):
    """Without stop strings: outputs say how far to compare."""

    max_tokens: Count
    min_tokens: Count
    stop_token_ids: list[TokenId]
    ignore_eos: bool


class ReplayGrammar(StrictStruct):
    """text: null unless it was asked for."""

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    digest: str
    text: str | None


class ReplayOutput(StrictStruct):
    """Of one choice. sha256: hex, over its ids as little-endian int32."""

    tokens: Count
    sha256: str


class ReplayFile(StrictStruct, kw_only=True):
    """exact: all its workers ran in exact mode, so that the same tokens are promised elsewhere."""

    object: Literal["baton.replay"]
    version: Literal[1]
    request_id: str
    model: ReplayModel
    exact: bool
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    n: Annotated[int, msgspec.Meta(ge=1)]
    sampling: ReplaySampling
    stop: ReplayStop
    grammar: ReplayGrammar | None
    outputs: Annotated[list[ReplayOutput], msgspec.Meta(min_length=1)]
