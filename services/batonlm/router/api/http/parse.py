"""Converts bodies of generating routes to core Requests, with one GenerationCall per HTTP request.

A parameter whose name or value differs between OpenAI and core is translated here. Every other
parameter is copied by its name, so a new one needs a field of `schema` and of core's Request or
SamplingParams only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Grammar,
    GrammarKind,
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
from batonlm.core.request.resumption import FIELD, StreamPosition, keyed_stream_id
from batonlm.core.request.validation import REQUEST_RANGES, validate
from batonlm.router.api.http.responses import encode
from batonlm.router.api.http.schema import (
    SPELLINGS,
    TEMPLATE_VARIABLES,
    ChatBody,
    ChatMessage,
    ChatTemplateBody,
    CompletionBody,
    GenerationBody,
    NamedTool,
    StructuredOutputs,
    ToolOfBody,
    client_names,
    decode,
)
from batonlm.router.api.translation import (
    ANY_OBJECT,
    checked_key,
    choice,
    in_client_words,
    lark_or_gbnf,
)

RESUME_HEADER, LAST_EVENT_ID_HEADER = "x-baton-resume", "Last-Event-ID"

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for text completions. A chat answer may fill the context."""

MAX_CHOICES_PER_CALL = 128
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Texts that may be put into a header unchanged."""
_MAX_LISTED = 32
_INT64_MIN = -(2**63)
_UINT64 = 2**64 - 1
TOOL_USES = {"none": ToolUse.NONE, "auto": ToolUse.AUTO, "required": ToolUse.REQUIRED}

_REQUEST_FIELDS = {field.name for field in fields(Request)} - {"prompt", "sampling"}
_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"seed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One HTTP request of a generating route: what to run and how to write the answer."""

    requests: tuple[Request, ...]
    """One per prompt. Choice c of prompt p has the index p * n + c in the answer."""
    stream: bool
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    continuous_usage: bool = False
    """Whether each chunk of a stream has the usage so far."""
    ignored: tuple[str, ...]
    """Names of parameters without effect."""
    names: Mapping[str, str]
    """Core's field names to the client's, where they differ."""
    request_id: str = ""
    """The client's own id, or ""."""
    prompt_logprobs: int | None = None
    """Number of alternatives in vLLM's field of this name; None: the field is absent."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name their tokens by id."""
    include_reasoning: bool = True

    @property
    def resumable(self) -> bool:
        """Whether each event of the stream has an id, from which another call can continue it."""
        return self.requests[0].resumable

    @property
    def resumes(self) -> StreamPosition | None:
        """What the client has of an earlier call's stream, which this one continues."""
        return self.requests[0].resumes

    @property
    def n(self) -> int:
        return self.requests[0].n

    @property
    def wants_token_ids(self) -> bool:
        return self.requests[0].return_token_ids

    @property
    def wants_logprobs(self) -> bool:
        return self.requests[0].sampling.top_logprobs is not None

    def of(self, tenant: Tenant, trace: TraceContext) -> GenerationCall:
        """Returns the call with its tenant and its caller's trace context."""
        requests = tuple(request.of(tenant, trace) for request in self.requests)
        return replace(self, requests=requests)

    def stream_id(self, accepted: Accepted) -> str:
        """Returns the id of the stream: of the one that this call continues, that of its key, or
        its own."""
        return self.requests[0].stream_id(accepted.request_id)

    def with_idempotency_key(self, key: str) -> GenerationCall:
        """Returns the call, whose tenant is known, as one that runs once for this key. Raises
        InvalidArgument."""
        key = checked_key(key)
        requests = tuple(
            replace(each, keyed_stream_id=keyed_stream_id(each.tenant.name, key, place))
            for place, each in enumerate(self.requests)
        )
        return replace(self, requests=requests)

    def with_event_ids(self, last_event_id: str | None) -> GenerationCall:
        """Returns the call, whose tenant is known, as one with a resumable stream. last_event_id:
        of the stream that it continues; None: it begins one. Raises InvalidArgument naming the
        header."""
        header = RESUME_HEADER if last_event_id is None else LAST_EVENT_ID_HEADER
        if not self.stream:
            raise InvalidArgument(f"{header} needs stream = true", field=header)
        if len(self.requests) > 1:
            raise InvalidArgument(f"{header} takes a single prompt", field=header)
        names = {**self.names, "resumable": header, FIELD: header}
        (request,) = self.requests
        position = None
        if last_event_id is not None:
            try:
                position = StreamPosition.parse(last_event_id, request.tenant.name)
            except InvalidArgument as error:
                raise in_client_words(error, names) from None
        request = replace(request, resumable=True, resumes=position)
        return replace(self, requests=(request,), names=names)

    def streamed(self) -> GenerationCall:
        """Returns the call as one whose answer is a stream. Raises InvalidArgument."""
        if self.prompt_logprobs is not None:
            raise InvalidArgument(
                "prompt_logprobs cannot be streamed; echo and logprobs can", field="prompt_logprobs"
            )
        return replace(self, stream=True)

    def resuming(self, position: StreamPosition) -> GenerationCall:
        """Returns the call of a single prompt as one that goes on with a stream of it."""
        (request,) = self.requests
        return replace(self, requests=(replace(request, resumable=True, resumes=position),))


def most_urgent(raw: bytes, tenant: Tenant) -> int:
    """Returns the smallest priority number that a body may have, without parsing it. A body may
    write the field's name with escapes."""
    if b"priority" not in raw and b"\\u" not in raw:
        return 0
    lowest = int(REQUEST_RANGES["priority"].low)
    return lowest if tenant.most_urgent is None else tenant.most_urgent


def parse_chat(raw: bytes) -> GenerationCall:
    """Raises InvalidArgument naming the field."""
    body, ignored = decode(raw, ChatBody)
    names = {"prompt": "messages", **client_names(ChatBody)}
    names |= _respell(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs = true", field="top_logprobs")
    body.top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt, variables = _with_variables(chat_prompt(body), body)
    call = _call(body, [prompt], ignored, names | variables, body.prompt_logprobs)
    return replace(call, include_reasoning=body.include_reasoning is not False)


def parse_completion(raw: bytes) -> GenerationCall:
    """Raises InvalidArgument naming the field."""
    body, ignored = decode(raw, CompletionBody)
    names = client_names(CompletionBody) | _respell(body)
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise InvalidArgument("best_of other than n is not supported", field="best_of")
    if body.max_tokens is None and body.n_predict is None:
        body.max_tokens = COMPLETION_MAX_TOKENS
    wanted = body.prompt_logprobs
    if body.echo and body.top_logprobs is not None:
        # An echo with log-probabilities includes those of the prompt.
        wanted = max(body.top_logprobs, wanted or 0)
        names["prompt_logprobs"] = "logprobs"
    prompts = _prompts(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return _call(body, prompts, ignored, names, wanted)


def chat_prompt(body: ChatBody | ChatTemplateBody) -> ChatPrompt:
    """Raises InvalidArgument naming the field."""
    return ChatPrompt(
        messages=tuple(_message(i, message) for i, message in enumerate(body.messages or ())),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=encode(body.template_kwargs).decode() if body.template_kwargs else "",
        template=body.template or "",
        tools=tuple(tool_of(index, tool) for index, tool in enumerate(body.tools or ())),
        tool_choice=(
            _tool_choice(body.tool_choice, parallel=body.parallel_tool_calls is not False)
            if isinstance(body, ChatBody)
            else ToolChoice()
        ),
    )


def _respell(body: GenerationBody) -> dict[str, str]:
    """Sets the attributes that the client gave by other names, see SPELLINGS.

    Returns the attributes' names to the client's. Raises InvalidArgument for two values."""
    names: dict[str, str] = {}
    theirs = client_names(type(body))
    for spelling, ours in SPELLINGS.items():
        value = getattr(body, spelling, None)
        if value is None or (spelling == "n_predict" and value == -1):
            continue
        known = getattr(body, ours)
        if known is not None and known != value:
            other = names.get(ours, theirs.get(ours, ours))
            raise InvalidArgument(f"{spelling} and {other} differ", field=spelling)
        setattr(body, ours, value)
        names[ours] = spelling
    return names


def _with_variables(prompt: ChatPrompt, body: ChatBody) -> tuple[ChatPrompt, dict[str, str]]:
    """Returns the prompt with the variables of its template that the body sets by fields of their
    own, and the variables' names to the client's."""
    kwargs = dict(body.template_kwargs or {})
    names: dict[str, str] = {}
    for field, variable in TEMPLATE_VARIABLES.items():
        value = getattr(body, field)
        if value is None:
            continue
        if field == "reasoning_effort" and value == "none":
            variable, value = "enable_thinking", False
        if variable in kwargs and kwargs[variable] != value:
            other = names.get(variable, f"chat_template_kwargs.{variable}")
            raise InvalidArgument(f"{field} and {other} differ", field=field)
        kwargs[variable] = value
        names[variable] = field
    if not names:
        return prompt, names
    text = encode(kwargs).decode()
    return replace(prompt, template_kwargs=text, needed_variables=tuple(names)), names


def listed(names: Sequence[str]) -> bytes:
    """Formats names for a header. They come from the client, so only plain ones are included, and a
    bounded number."""
    plain = [name for name in names if PLAIN.fullmatch(name)][:_MAX_LISTED]
    rest = len(names) - len(plain)
    return ", ".join([*plain, *([f"and {rest} more"] if rest else [])]).encode()


def _call(
    body: ChatBody | CompletionBody,
    prompts: Sequence[Prompt],
    ignored: tuple[str, ...],
    names: Mapping[str, str],
    prompt_logprobs: int | None,
) -> GenerationCall:
    """prompt_logprobs: alternatives of the prompt's tokens that any part of the answer needs."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidArgument("stream_options needs stream = true", field="stream_options")
    if body.request_id and not PLAIN.fullmatch(body.request_id):
        raise InvalidArgument(
            "request_id must be up to 64 letters, digits, dots, dashes or underscores",
            field="request_id",
        )
    grammar, grammar_name = _grammar(body)
    sampling = sampling_fields(body)
    sampling["logit_bias"] = tuple((body.logit_bias or {}).items())
    if body.top_k == -1:
        sampling["top_k"] = 0
    given = _given(body, _REQUEST_FIELDS) | {
        "sampling": SamplingParams(**sampling),
        "seed": _seed(body.seed),
        "cache_salt": (body.cache_salt or "").encode(),
        "prompt_logprobs": prompt_logprobs,
        "truncation_side": body.truncation_side or "left",
        "grammar": grammar,
        "no_speculation": body.speculation == "off",
    }
    if isinstance(body.stop_strings, str):
        given["stop_strings"] = (body.stop_strings,)
    names = {**names, "grammar": grammar_name}
    requests = tuple(Request(prompt, **given) for prompt in prompts)
    if len(requests) > 1:
        if len(requests) * requests[0].n > MAX_CHOICES_PER_CALL:
            raise InvalidArgument(
                f"prompts times n must be at most {MAX_CHOICES_PER_CALL}", field="prompt"
            )
        # The pipeline validates each when it opens it. A call with several prompts is refused as a
        # whole, before one of them has cost anything.
        try:
            for request in requests:
                validate(request)
        except BatonError as error:
            raise in_client_words(error, names) from None
    call = GenerationCall(
        requests=requests,
        stream=False,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        ignored=ignored,
        names=names,
        request_id=body.request_id or "",
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    return call.streamed() if body.stream else call


def sampling_fields(body: msgspec.Struct) -> dict[str, Any]:
    """Returns the sampling parameters that a body of any API gives, by core's names, which its
    attributes have."""
    return _given(body, _SAMPLING_FIELDS)


def _given(body: msgspec.Struct, names: set[str]) -> dict[str, Any]:
    """Returns the fields of a body that are not null. The others have core's defaults."""
    values = {name: getattr(body, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _seed(seed: int | None) -> int | None:
    """Converts a seed. OpenAI's seeds are signed 64 bit, core's unsigned: a negative one keeps its
    bits."""
    return seed & _UINT64 if seed is not None and _INT64_MIN <= seed < 0 else seed


def _grammar(body: GenerationBody) -> tuple[Grammar | None, str]:
    """Returns the grammar for every choice, and the client's name of the field that it comes
    from."""
    forms = [_of_response_format(body), *_of_single_fields(body)]
    if body.structured_outputs is not None:
        forms.append(_of_structured_outputs(body.structured_outputs))
    given = [form for form in forms if form[0] is not None]
    if len(given) > 1:
        (_, first), (_, name) = given[:2]
        raise InvalidArgument(f"{name} cannot be combined with {first}", field=name)
    return given[0] if given else forms[0]


def _of_single_fields(body: GenerationBody) -> Iterator[tuple[Grammar | None, str]]:
    """Yields the forms that have a field of their own. Some clients send "" for none."""
    for name in ("json_schema", "guided_json"):
        yield json_schema(getattr(body, name), name), name
    for name in ("regex", "guided_regex"):
        if text := getattr(body, name):
            yield Grammar(GrammarKind.REGEX, text), name
    for name in ("ebnf", "grammar", "guided_grammar"):
        if text := getattr(body, name):
            yield lark_or_gbnf(text), name
    if body.guided_choice:
        yield choice(body.guided_choice, "guided_choice"), "guided_choice"


def _of_response_format(body: GenerationBody) -> tuple[Grammar | None, str]:
    name, form = "response_format", body.response_format
    if form is None or form.type == "text":
        return None, name
    if form.type == "json_object":
        return ANY_OBJECT, name
    if form.type != "json_schema":
        raise InvalidArgument(
            f"{name}.type must be one of text, json_object, json_schema", field=f"{name}.type"
        )
    name = f"{name}.json_schema.schema"
    grammar = json_schema(form.json_schema.schema, name) if form.json_schema else None
    if grammar is None:
        raise InvalidArgument(f"{name} is required", field=name)
    return grammar, name


def _of_structured_outputs(form: StructuredOutputs) -> tuple[Grammar | None, str]:
    where = "structured_outputs"
    found: dict[str, Grammar] = {}
    if schema := json_schema(form.json, f"{where}.json"):
        found["json"] = schema
    if form.regex is not None:
        found["regex"] = Grammar(GrammarKind.REGEX, form.regex)
    if form.choice is not None:
        found["choice"] = choice(form.choice, f"{where}.choice")
    if form.grammar is not None:
        found["grammar"] = lark_or_gbnf(form.grammar)
    if form.json_object:
        found["json_object"] = ANY_OBJECT
    if len(found) > 1:
        raise InvalidArgument(f"{where} must name one form only", field=where)
    for name, grammar in found.items():
        return grammar, f"{where}.{name}"
    return None, where


def json_schema(given: msgspec.Raw, field: str) -> Grammar | None:
    """Accepts an object, or a text that contains one, which some clients send. Returns None for
    null."""
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
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _message(index: int, message: ChatMessage) -> Message:
    for name in ("prefix", "partial"):
        if getattr(message, name):
            where = f"messages[{index}].{name}"
            raise InvalidArgument(
                f"{where} is not supported here; continue_final_message may serve instead",
                field=where,
            )
    # "developer" is OpenAI's newer name for "system"; chat templates support the older one.
    return Message(
        "system" if message.role == "developer" else message.role,
        _content(f"messages[{index}].content", message),
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ),
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


def tool_of(index: int, tool: ToolOfBody) -> Tool:
    if tool.type != "function":
        name = f"tools[{index}].type"
        raise InvalidArgument(f"{name} must be function", field=name)
    function, parameters = tool.function, bytes(tool.function.parameters).decode()
    return Tool(
        function.name, function.description or "", "" if parameters == "null" else parameters
    )


def _tool_choice(given: str | NamedTool | None, *, parallel: bool) -> ToolChoice:
    if given is None:
        return ToolChoice(parallel=parallel)
    if isinstance(given, NamedTool):
        if given.type != "function" or given.function is None or not given.function.name:
            raise InvalidArgument("tool_choice must name a function", field="tool_choice")
        return ToolChoice(ToolUse.REQUIRED, given.function.name, parallel)
    if given not in TOOL_USES:
        raise InvalidArgument(
            f"tool_choice must be {', '.join(TOOL_USES)} or name a function", field="tool_choice"
        )
    return ToolChoice(TOOL_USES[given], parallel=parallel)


def _prompts(
    prompt: str | list[str | int | list[int]], *, add_special_tokens: bool
) -> list[TextPrompt | TokenPrompt]:
    """Returns the prompts: one as a string or as ids, or a list of either kind."""
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
