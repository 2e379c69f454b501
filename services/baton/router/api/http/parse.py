"""Bodies in OpenAI's words to core Requests, and failures back into the client's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from baton.core.admission.tenants import Tenant
from baton.core.errors import BatonError, InvalidArgument
from baton.core.observe.stages import TraceContext
from baton.core.request.request import (
    ChatPrompt,
    Grammar,
    Message,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
)
from baton.core.request.validation import REQUEST_RANGES, validate
from baton.router.api.http.responses import encode
from baton.router.api.http.schema import (
    REFUSED,
    CallOfTool,
    ChatBody,
    ChatMessage,
    ChatTemplateBody,
    CompletionBody,
    Function,
    GenerationBody,
    NamedTool,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolOfBody,
    decode,
)
from baton.router.api.translation import (
    Asked,
    any_object,
    choice,
    either_grammar,
    in_client_words,
    json_schema,
    regex,
)

# The form that an HTTP body asks an answer to have, in OpenAI's words and in vLLM's.

TYPES = ("text", "json_object", "json_schema")


def asked_form(body: GenerationBody) -> Asked | None:
    """None when the body asks for none. Raises InvalidArgument naming the field."""
    by_openai = body.response_format and _of_openai(body.response_format)
    by_vllm = body.structured_outputs and _of_vllm(body.structured_outputs)
    if by_openai and by_vllm:
        name = "structured_outputs"
        raise InvalidArgument(f"{name} cannot be combined with response_format", field=name)
    return by_openai or by_vllm or None


def _of_openai(form: ResponseFormat) -> Asked | None:
    name = "response_format"
    match form.type:
        case "text":
            return None
        case "json_object":
            return any_object(name)
        case "json_schema":
            field = f"{name}.json_schema.schema"
            asked = form.json_schema and _schema(form.json_schema.schema, field)
            if not asked:
                raise InvalidArgument(f"{field} is required", field=field)
            return asked
        case _:
            raise InvalidArgument(
                f"{name}.type must be one of {', '.join(TYPES)}", field=f"{name}.type"
            )


def _of_vllm(form: StructuredOutputs) -> Asked | None:
    name = "structured_outputs"
    asked: list[Asked] = []
    if schema := _schema(form.json, f"{name}.json"):
        asked.append(schema)
    if form.regex is not None:
        asked.append(regex(form.regex, f"{name}.regex"))
    if form.choice is not None:
        asked.append(choice(form.choice, f"{name}.choice"))
    if form.grammar is not None:
        asked.append(either_grammar(form.grammar, f"{name}.grammar"))
    if form.json_object:
        asked.append(any_object(f"{name}.json_object"))
    if len(asked) > 1:
        raise InvalidArgument(f"{name} must name one form only", field=name)
    return asked[0] if asked else None


def _schema(given: msgspec.Raw, field: str) -> Asked | None:
    """An object, or a text that holds one, as some clients send it. None for null."""
    text = bytes(given).decode()
    if text == "null":
        return None
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text, value = value, msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} must be an object", field=field)
    return json_schema(text, field)


COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions; chat answers may fill the context."""

MAX_CHOICES_PER_CALL = 128
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What may go into a header as it is."""
PROMPT_NAMES = {"template": "chat_template", "template_kwargs": "chat_template_kwargs"}
"""Of a conversation: core's field names to those of bodies."""
_MAX_LISTED = 32
_INT64_MIN = -(2**63)
_UINT64 = 2**64 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, understood: what to run and how to word the answer.

    requests: one a prompt; choice c of prompt p has index p * n + c. ignored: parameters without
    effect. names: core's field names to the client's, where they differ. request_id: the client's
    own, or "". prompt_logprobs: alternatives to tell in vLLM's field of that name, None: no field.
    tokens_as_ids: tokens of log-probabilities are named by their ids.
    """

    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    ignored: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    request_id: str = ""
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    include_reasoning: bool = True

    @property
    def n(self) -> int:
        return self.requests[0].n

    @property
    def wants_token_ids(self) -> bool:
        return self.requests[0].return_token_ids

    @property
    def wants_logprobs(self) -> bool:
        return self.requests[0].sampling.top_logprobs is not None

    def of(self, tenant: Tenant, trace: TraceContext) -> Call:
        """The same call, of whoever made it, as a part of its trace."""
        requests = tuple(request.of(tenant, trace) for request in self.requests)
        return replace(self, requests=requests)

    def in_client_words(self, error: BatonError) -> BatonError:
        """The same failure with the client's name of the field, in its message too."""
        return in_client_words(error, self.names)


def most_urgent(raw: bytes, tenant: Tenant) -> int:
    """The smallest priority number that a body may turn out to ask for, without parsing it. Its
    name may be spelled with escapes."""
    if b"priority" not in raw and b"\\u" not in raw:
        return 0
    lowest = int(REQUEST_RANGES["priority"].low)
    return lowest if tenant.most_urgent is None else tenant.most_urgent


def parse_chat(raw: bytes) -> Call:
    """Raises InvalidArgument naming the field."""
    body, ignored = decode(raw, ChatBody, REFUSED)
    names = {"stop_strings": "stop", "prompt": "messages", **PROMPT_NAMES}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens, names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs = true", field="top_logprobs")
    top_logprobs = _or(body.top_logprobs, 0) if body.logprobs else None
    call = _call(body, [chat_prompt(body)], max_tokens, top_logprobs, ignored, names)
    return replace(call, include_reasoning=_or(body.include_reasoning, True))


def chat_prompt(body: ChatBody | ChatTemplateBody) -> ChatPrompt:
    """Raises InvalidArgument naming the field."""
    kwargs = body.chat_template_kwargs
    return ChatPrompt(
        messages=tuple(_message(i, message) for i, message in enumerate(body.messages or ())),
        add_generation_prompt=_or(body.add_generation_prompt, True),
        continue_final_message=_or(body.continue_final_message, False),
        template_kwargs=encode(kwargs).decode() if kwargs else "",
        template=body.chat_template or "",
        tools=tools_of(body.tools),
        tool_choice=(
            choice_of(body.tool_choice, body.parallel_tool_calls)
            if isinstance(body, ChatBody)
            else ToolChoice()
        ),
    )


def parse_completion(raw: bytes) -> Call:
    """Raises InvalidArgument naming the field."""
    body, ignored = decode(raw, CompletionBody, REFUSED)
    if body.best_of is not None and body.best_of != _or(body.n, 1):
        raise InvalidArgument("best_of other than n is not supported", field="best_of")
    prompts = _prompts(body.prompt, _or(body.add_special_tokens, True))
    names = {"stop_strings": "stop", "top_logprobs": "logprobs"}
    max_tokens = _or(body.max_tokens, COMPLETION_MAX_TOKENS)
    if body.echo and body.logprobs is not None:
        names["prompt_logprobs"] = "logprobs"
    return _call(body, prompts, max_tokens, body.logprobs, ignored, names)


def listed(names: Sequence[str]) -> bytes:
    """Names are the client's: only plain ones, and a bounded number, go into a header."""
    plain = [name for name in names if PLAIN.fullmatch(name)][:_MAX_LISTED]
    rest = len(names) - len(plain)
    return ", ".join([*plain, *([f"and {rest} more"] if rest else [])]).encode()


def _call(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    top_logprobs: int | None,
    ignored: tuple[str, ...],
    names: Mapping[str, str],
) -> Call:
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options needs stream = true", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs cannot be streamed; echo and logprobs can", field="prompt_logprobs"
        )
    options = body.stream_options or StreamOptions()
    asked = asked_form(body)
    if asked is not None:
        names = {**names, "grammar": asked.field}
    grammar = asked and asked.grammar
    try:
        requests = tuple(
            validate(_request(body, prompt, max_tokens, top_logprobs, grammar))
            for prompt in prompts
        )
    except BatonError as error:
        raise in_client_words(error, names) from None
    if len(requests) * requests[0].n > MAX_CHOICES_PER_CALL:
        raise InvalidArgument(
            f"prompts times n must be at most {MAX_CHOICES_PER_CALL}", field="prompt"
        )
    return Call(
        requests=requests,
        stream=_or(body.stream, False),
        include_usage=_or(options.include_usage, False),
        continuous_usage=_or(options.continuous_usage_stats, False),
        ignored=ignored,
        names=names,
        request_id=_request_id(body.request_id),
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=_or(body.return_tokens_as_token_ids, False),
    )


def _request(
    body: GenerationBody,
    prompt: Prompt,
    max_tokens: int | None,
    top_logprobs: int | None,
    grammar: Grammar | None,
) -> Request:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Request(
        prompt=prompt,
        model=body.model or "",
        n=_or(body.n, 1),
        sampling=_sampling(body, top_logprobs),
        seed=_seed(body.seed),
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop_strings=tuple(stops),
        include_stop_string=_or(body.include_stop_str_in_output, False),
        ignore_eos=_or(body.ignore_eos, False),
        return_token_ids=_or(body.return_token_ids, False),
        skip_special_tokens=_or(body.skip_special_tokens, True),
        priority=_or(body.priority, 0),
        cache_salt=(body.cache_salt or "").encode(),
        echo=isinstance(body, CompletionBody) and _or(body.echo, False),
        prompt_logprobs=_prompt_logprobs(body),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        grammar=grammar,
    )


def _sampling(body: GenerationBody, top_logprobs: int | None) -> SamplingParams:
    default = SamplingParams()
    top_k = _or(body.top_k, default.top_k)
    return SamplingParams(
        temperature=_or(body.temperature, default.temperature),
        top_p=_or(body.top_p, default.top_p),
        top_k=0 if top_k == -1 else top_k,
        min_p=_or(body.min_p, default.min_p),
        repetition_penalty=_or(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, default.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, default.frequency_penalty),
        logit_bias=tuple((body.logit_bias or {}).items()),
        top_logprobs=top_logprobs,
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
    )


def _prompt_logprobs(body: GenerationBody) -> int | None:
    """An echo with log-probabilities has the prompt's own, too."""
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    wanted = [each for each in (body.prompt_logprobs, echoed) if each is not None]
    return max(wanted) if wanted else None


def _request_id(given: str | None) -> str:
    if given and not PLAIN.fullmatch(given):
        raise InvalidArgument(
            "request_id must be up to 64 letters, digits, dots, dashes or underscores",
            field="request_id",
        )
    return given or ""


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed 64 bit, core's unsigned: a negative one keeps its bits."""
    return seed & _UINT64 if seed is not None and _INT64_MIN <= seed < 0 else seed


def _message(index: int, message: ChatMessage) -> Message:
    where = f"messages[{index}]"
    # "developer" is OpenAI's newer word for "system"; chat templates know the older one.
    role = "system" if message.role == "developer" else message.role
    return Message(
        role,
        _content(f"{where}.content", message),
        tool_calls=calls_of(message.tool_calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _content(where: str, message: ChatMessage) -> str:
    match message.content:
        case None if message.tool_calls:
            return ""
        case None:
            raise InvalidArgument(f"{where} is required", field=where)
        case str(text):
            return text
        case parts:
            for index, part in enumerate(parts):
                if part.type != "text" or part.text is None:
                    name = f"{where}[{index}]"
                    raise InvalidArgument(f"{name} must be a text part", field=name)
            return "".join(part.text or "" for part in parts)


def _prompts(
    prompt: str | list[str | int | list[int]], add_special_tokens: bool
) -> list[TextPrompt | TokenPrompt]:
    """One prompt as a string or ids, or a list of either kind."""
    items: list[str | int | list[int]] = [prompt] if isinstance(prompt, str) else prompt
    texts = [item for item in items if isinstance(item, str)]
    ids = [item for item in items if isinstance(item, int)]
    lists = [item for item in items if isinstance(item, list)]
    if not items:
        raise InvalidArgument("prompt must not be empty", field="prompt")
    if len(items) == len(ids):
        return [TokenPrompt(tuple(ids))]
    if len(items) > MAX_CHOICES_PER_CALL:
        raise InvalidArgument(
            f"prompt must have at most {MAX_CHOICES_PER_CALL} prompts", field="prompt"
        )
    if len(items) == len(texts):
        return [TextPrompt(text, add_special_tokens) for text in texts]
    if len(items) == len(lists):
        return [TokenPrompt(tuple(item)) for item in lists]
    raise InvalidArgument("prompt must not mix texts and token ids", field="prompt")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


_USES = {"none": ToolUse.NONE, "auto": ToolUse.AUTO, "required": ToolUse.REQUIRED}


def tools_of(tools: Sequence[ToolOfBody] | None) -> tuple[Tool, ...]:
    """Raises InvalidArgument for a tool that is no function."""
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            name = f"tools[{index}].type"
            raise InvalidArgument(f"{name} must be function", field=name)
    return tuple(_tool(tool.function) for tool in tools or ())


def choice_of(choice: str | NamedTool | None, parallel: bool | None) -> ToolChoice:
    """Raises InvalidArgument for a choice that is not offered."""
    several = True if parallel is None else parallel
    if choice is None:
        return ToolChoice(parallel=several)
    if isinstance(choice, NamedTool):
        if choice.type != "function" or choice.function is None or not choice.function.name:
            raise InvalidArgument("tool_choice must name a function", field="tool_choice")
        return ToolChoice(ToolUse.REQUIRED, choice.function.name, several)
    if choice not in _USES:
        raise InvalidArgument(
            f"tool_choice must be {', '.join(_USES)} or name a function", field="tool_choice"
        )
    return ToolChoice(_USES[choice], parallel=several)


def calls_of(calls: Sequence[CallOfTool] | None) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call.id, call.function.name, call.function.arguments) for call in calls or ()
    )


def _tool(function: Function) -> Tool:
    parameters = bytes(function.parameters).decode()
    return Tool(
        function.name,
        function.description or "",
        "" if parameters == "null" else parameters,
    )
