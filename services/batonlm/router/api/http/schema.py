"""The JSON bodies of the HTTP API as types, and their decoding.

This is the only definition of each body: the decoder, the names in errors and the OpenAPI document
are derived from it. An attribute is named as in core; `name=` is the client's name where it
differs. A field exists here exactly when it is applied. `SPELLINGS` are other names for such
fields, of other servers. `REFUSED` names parameters that would change the answer but are not
supported, so that they are an error instead of being ignored. All others are accepted without
effect and named in a response header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from batonlm.core.errors import InvalidArgument


def no_value() -> msgspec.Raw:
    """A function, because msgspec cannot write a default of type Raw into a JSON schema."""
    return msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class CallOfTool(msgspec.Struct):
    id: str
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[CallOfTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Other servers' ways to ask for continue_final_message; refused.
    prefix: bool | None = None
    partial: bool | None = None


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=no_value)


class ToolOfBody(msgspec.Struct):
    type: str
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: str
    function: NamedFunction | None = None


class JsonSchemaFormat(msgspec.Struct):
    """name, description and strict have no effect: an answer always follows the schema."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=no_value)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's parameter. A client gives exactly one of the fields."""

    json: msgspec.Raw = msgspec.field(default_factory=no_value)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common. null means absent in every field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop_strings: str | tuple[str, ...] | None = msgspec.field(default=None, name="stop")
    # Parameters of vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    include_stop_string: bool | None = msgspec.field(
        default=None, name="include_stop_str_in_output"
    )
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Baton's own
    speculation: Literal["on", "off"] | None = None
    request_id: str | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    # OpenAI has it for chats, vLLM for text completions, too.
    response_format: ResponseFormat | None = None
    # One form each, as SGLang, llama.cpp and earlier versions of vLLM name them.
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=no_value)
    guided_json: msgspec.Raw = msgspec.field(default_factory=no_value)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # See SPELLINGS
    max_new_tokens: int | None = None
    n_predict: int | None = None
    min_new_tokens: int | None = None
    no_stop_trim: bool | None = None


class ChatTemplateBody(msgspec.Struct, kw_only=True):
    """A conversation and how it becomes text."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template: str | None = msgspec.field(default=None, name="chat_template")
    template_kwargs: dict[str, Any] | None = msgspec.field(
        default=None, name="chat_template_kwargs"
    )
    tools: list[ToolOfBody] | None = None


class TokenizeBody(ChatTemplateBody, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    prompt: tuple[int, ...] = msgspec.field(name="tokens")


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter"""

    name: str = msgspec.field(name="lora_name")
    path: str = msgspec.field(name="lora_path")
    replace: bool | None = msgspec.field(default=None, name="load_inplace")
    model: str | None = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter"""

    name: str = msgspec.field(name="lora_name")
    model: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template: str | None = msgspec.field(default=None, name="chat_template")
    template_kwargs: dict[str, Any] | None = msgspec.field(
        default=None, name="chat_template_kwargs"
    )
    tools: list[ToolOfBody] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    # Variables of the chat template, see TEMPLATE_VARIABLES
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    top_logprobs: int | None = msgspec.field(default=None, name="logprobs")
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class VectorBody(msgspec.Struct, kw_only=True):
    """What the routes of encode workers have in common."""

    model: str | None = None
    truncate_tokens: int | None = msgspec.field(default=None, name="truncate_prompt_tokens")
    # Jina's: true is a truncate_prompt_tokens of -1
    truncate: bool | None = None
    prompt_name: str | None = None
    priority: int | None = None


class EmbedBody(VectorBody, kw_only=True):
    """POST /v1/embeddings"""

    inputs: str | list[str | int | list[int]] = msgspec.field(name="input")
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None


class TextDocument(msgspec.Struct):
    text: str


class RerankBody(VectorBody, kw_only=True):
    """POST /v1/rerank"""

    query: str
    documents: list[str | TextDocument]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreBody(VectorBody, kw_only=True):
    """POST /score: one query with each document, or as many queries as documents."""

    queries: str | list[str] = msgspec.field(name="text_1")
    documents: str | list[str] = msgspec.field(name="text_2")


SPELLINGS: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",  # OpenAI
    "max_new_tokens": "max_tokens",  # SGLang, TGI
    "n_predict": "max_tokens",  # llama.cpp; -1: as many as fit
    "min_new_tokens": "min_tokens",  # SGLang
    "no_stop_trim": "include_stop_string",  # SGLang
}
"""Fields that are another name for one of GenerationBody's attributes."""

TEMPLATE_VARIABLES: Mapping[str, str] = {
    "reasoning_effort": "reasoning_effort",  # OpenAI
    "enable_thinking": "enable_thinking",  # Qwen
    "thinking_budget": "thinking_budget",  # Qwen
    "thinking_token_budget": "thinking_budget",  # vLLM
}
"""Fields of a chat by the variable of its template that they set. A template without the variable
would drop them, so it is an error then."""

_OFF: tuple[object, ...] = (False,)
_ZERO: tuple[object, ...] = (0,)
_ONE: tuple[object, ...] = (1,)
_EMPTY: tuple[object, ...] = ([], {}, "")
REFUSED: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning": ({},),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # of one of the two routes only
    "echo": _OFF,
    "enable_thinking": (),
    "reasoning_effort": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    # Anthropic, Cohere, Google, Mistral
    "documents": ([],),
    "safe_prompt": _OFF,
    "thinking": (),
    # vLLM
    "bad_words": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "length_penalty": _ONE,
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": _OFF,
    # SGLang, Dynamo
    "custom_logit_processor": _EMPTY,
    "custom_params": _EMPTY,
    "input_embeds": (),
    "input_ids": (),
    "lora_path": _EMPTY,
    "nvext": ({},),
    "return_hidden_states": _OFF,
    "sampling_params": ({},),
    "separate_reasoning": (True,),
    "session_params": ({},),
    "stop_regex": _EMPTY,
    "structural_tag": _EMPTY,
    # llama.cpp
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "grammar_lazy": _OFF,
    "lora": _EMPTY,
    "mirostat": _ZERO,
    "n_indent": _ZERO,
    "n_probs": _ZERO,
    "post_sampling_probs": _OFF,
    "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_penalty": _ONE,
    "samplers": ([],),
    "t_max_predict_ms": (0, -1),
    "tfs_z": _ONE,
    "top_n_sigma": (0, -1),
    "typical_p": _ONE,
    "typ_p": _ONE,
    "xtc_probability": _ZERO,
    # Ollama
    "format": ("",),
    "images": ([],),
    "num_ctx": (),
    "num_predict": (),
    "options": ({},),
    "system": ("",),
    "template": ("",),
    "think": (),
    # TGI, transformers, text-generation-webui
    "adapter_id": _EMPTY,
    "ban_eos_token": _OFF,
    "bad_words_ids": ([],),
    "custom_token_bans": ("",),
    "diversity_penalty": _ZERO,
    "do_sample": (True,),
    "early_stopping": _OFF,
    "encoder_repetition_penalty": _ONE,
    "eos_token_id": (),
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "frequency_penalty_range": _ZERO,
    "guidance_scale": _ONE,
    "max_length": (),
    "max_time": (),
    "min_length": _ZERO,
    "mirostat_mode": _ZERO,
    "negative_prompt": ("",),
    "no_repeat_ngram_size": _ZERO,
    "num_beams": _ONE,
    "num_return_sequences": _ONE,
    "parameters": ({},),
    "penalty_alpha": _ZERO,
    "preset": ("",),
    "sampler_priority": ([],),
    "sequence_bias": _EMPTY,
    "smoothing_factor": _ZERO,
    "suppress_tokens": ([],),
    "temperature_last": _OFF,
    "tfs": _ONE,
    "top_a": _ZERO,
    "watermark": _OFF,
}
"""Each parameter with the values that are accepted because they have no effect; null always is.

Those of other servers are from the documentation of their APIs: what changes an answer there."""

REFUSED_ELSEWHERE: Mapping[str, tuple[object, ...]] = {
    **{
        name: ()
        for name in ChatBody.__struct_encode_fields__
        # These change no answer's text.
        if name
        not in (
            "cache_salt",
            "include_reasoning",
            "priority",
            "request_id",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "speculation",
            "stream_options",
        )
    },
    **REFUSED,
    "logprobs": _OFF,
    "n": _ONE,
    "stop": _EMPTY,
}
"""As REFUSED, of routes of other APIs: with what only the OpenAI routes apply."""

INSTEAD: Mapping[str, str] = {
    "do_sample": "temperature = 0",
    "documents": "messages",
    "eos_token_id": "stop_token_ids",
    "format": "response_format",
    "functions": "tools",
    "function_call": "tool_choice",
    "input_ids": "a text completion's prompt, which may be token ids,",
    "max_length": "max_tokens",
    "n_probs": "logprobs",
    "num_ctx": "the server's own option",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "reasoning": "reasoning_effort",
    "reasoning_budget": "thinking_token_budget",
    "repeat_penalty": "repetition_penalty",
    "separate_reasoning": "include_reasoning",
    "stop_regex": "stop",
    "suppress_tokens": "logit_bias",
    "bad_words_ids": "logit_bias",
    "system": "a message of the role system",
    "think": "enable_thinking",
    "thinking": "enable_thinking",
}
"""What has the meaning, or a part of it, of a parameter that is refused."""


REFUSED_OF_VECTORS: Mapping[str, tuple[object, ...]] = {
    # Cohere, Jina, Voyage
    "embedding_type": ("float",),
    "embedding_types": (["float"],),
    "input_type": (),
    "late_chunking": _OFF,
    "normalized": (True,),
    "output_dtype": ("float",),
    "task": (),
    # vLLM
    "activation": (True,),
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "instruction": ("",),
    "messages": ([],),
    "normalize": (True,),
    "use_activation": (True,),
}
"""As REFUSED, of the routes of encode workers."""

Body = TypeVar("Body", bound=msgspec.Struct)

_JSON_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}
_MISMATCH = re.compile(r"Expected `([a-z |]+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PATH = re.compile(r"`\$([\w.\[\]]*)`")
_NAME = re.compile(r"\w{1,64}", re.ASCII)
"""Client-chosen names that an error may repeat. Other names are not always valid in JSON."""


def decode(
    body: bytes,
    kind: type[Body],
    refused: Mapping[str, tuple[object, ...]] | None = None,
    instead: Mapping[str, str] = INSTEAD,
) -> tuple[Body, tuple[str, ...]]:
    """Returns the body as `kind`, and the sorted names of its parameters that have no effect.

    refused, instead: of another API, as `REFUSED` and `INSTEAD`. Raises InvalidArgument for
    anything but a JSON object, for a wrong type, and for a parameter in `refused`, unless its value
    is null or listed there, or the body has it as a field.
    """
    if refused is None:
        refused = {}
        if issubclass(kind, GenerationBody):
            refused = REFUSED
        elif issubclass(kind, VectorBody):
            refused = REFUSED_OF_VECTORS
    applied = set(kind.__struct_encode_fields__)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the body is not valid UTF-8") from None
    try:
        parameters = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        given = {name for name, raw in parameters.items() if bytes(raw) != b"null"}
        for name in sorted((given & refused.keys()) - applied):
            if msgspec.json.decode(parameters[name]) not in refused[name]:
                raise InvalidArgument(_unsupported(name, instead), field=name)
        parsed = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error)) from None
    except msgspec.DecodeError:
        raise _malformed(text) from None
    except RecursionError:
        raise InvalidArgument("the body is nested too deeply") from None
    return parsed, tuple(sorted(given - refused.keys() - applied))


def _unsupported(name: str, instead: Mapping[str, str]) -> str:
    hint = f"; {instead[name]} may serve instead" if name in instead else ""
    return f"{name} is not supported here{hint}"


def client_names(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Returns core's field names to those of a body, where they differ."""
    pairs = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return {ours: theirs for ours, theirs in pairs if ours != theirs}


def _mismatch(report: str) -> InvalidArgument:
    """Translates msgspec's report of a value that does not fit its type."""
    path = _PATH.search(report)
    field = path[1].lstrip(".").removesuffix("[...]") if path else ""
    if missing := _MISSING.search(report):
        field = f"{field}.{missing[1]}".lstrip(".")
        return InvalidArgument(f"{field} is required", field=field)
    if "`key` in" in report:
        return InvalidArgument(f"{field} must have integers as keys", field=field)
    if expected := _MISMATCH.search(report):
        types = [_JSON_TYPES.get(name, name) for name in expected[1].split(" | ") if name != "null"]
        return InvalidArgument(f"{field or 'the body'} must be {' or '.join(types)}", field=field)
    return InvalidArgument(f"{field or 'the body'} has a value out of range", field=field)


def _malformed(text: str) -> InvalidArgument:
    """Names the field that has NaN or an infinity, which are not JSON but which clients send."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    for name, part in value.items() if isinstance(value, dict) else ():
        try:
            json.dumps(part, allow_nan=False)
        except (ValueError, RecursionError):
            if _NAME.fullmatch(name):
                return InvalidArgument(f"{name} must be a finite number", field=name)
    return InvalidArgument("the body is not valid JSON")
