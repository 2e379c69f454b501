"""/api/…, as in Ollama's API: chats, generation, embeddings, and what is served.

In: bodies of that API, which become the same core Requests as those of the OpenAI routes. Out: its
answers, lines of streams and errors. What would change an answer and is not offered is refused by
name; what Ollama does to the models of its own machine is refused in words.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import InvalidArgument, model_not_found
from batonlm.core.request.model import ModelDescription, ModelTask
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    Message,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    ToolCall,
    ToolCallDelta,
    VectorInput,
)
from batonlm.core.request.validation import MAX_CALLS_PER_MESSAGE, wrong
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.answers import AnswerWriter, call_arguments
from batonlm.router.api.http.body import Bodies, from_a_page, while_connected
from batonlm.router.api.http.generation import Generation, worded
from batonlm.router.api.http.json_route import RefusedRoute
from batonlm.router.api.http.parse import GenerationCall, sampling_fields, tool_of
from batonlm.router.api.http.responses import (
    Failure,
    Json,
    WireFormat,
    encode,
    json_response,
    send_json,
    utc_time,
)
from batonlm.router.api.http.schema import (
    INSTEAD,
    REFUSED_ELSEWHERE,
    ToolOfBody,
    VectorBody,
    client_names,
    decode,
    no_value,
)
from batonlm.router.api.http.vectors import VectorRoute
from batonlm.router.api.translation import ANY_OBJECT, EFFORTS, in_client_words
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.workers.encoders import Vectors, floats

PREFIX = "/api/"

_LATEST = ":latest"
"""The tag that Ollama's clients may put behind a name without one."""


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """What chats and generation have in common. stream: true where it is absent. format: `json` or
    a schema. think: a boolean, or how much."""

    model: str | None = None
    stream: bool | None = None
    format: msgspec.Raw = msgspec.field(default_factory=no_value)
    options: dict[str, Any] | None = None
    think: bool | str | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """POST /api/chat. messages: empty: the model is loaded, and nothing is answered."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolOfBody] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """POST /api/generate. prompt: empty: the model is loaded, and nothing is answered. raw: the
    prompt is not put into the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaEmbedBody(VectorBody, kw_only=True):
    """POST /api/embed"""

    inputs: str | list[str] = msgspec.field(name="input")
    truncate: bool | None = True
    dimensions: int | None = None


class OllamaEmbeddingsBody(VectorBody, kw_only=True):
    """POST /api/embeddings, of older clients."""

    inputs: str = msgspec.field(name="prompt")
    truncate: bool | None = True


class OllamaShowBody(msgspec.Struct, kw_only=True):
    """POST /api/show. name: the same as model, of older clients."""

    model: str | None = None
    name: str | None = None


class OllamaOptions(msgspec.Struct, kw_only=True):
    """What of `options` is applied."""

    max_tokens: int | None = msgspec.field(default=None, name="num_predict")
    seed: int | None = None
    stop_strings: str | tuple[str, ...] | None = msgspec.field(default=None, name="stop")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = msgspec.field(default=None, name="repeat_penalty")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None


_REFUSED_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "logits_all": (False,),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "vocab_only": (False,),
}
_REFUSED: Mapping[str, tuple[object, ...]] = {
    **REFUSED_ELSEWHERE,
    "context": ([],),
    "prompt": ("",),
    "raw": (False,),
    "tools": ([],),
    "top_logprobs": (0,),
}
_INSTEAD: Mapping[str, str] = {
    **INSTEAD,
    **{
        name: f"options.{name}"
        for name in ("frequency_penalty", "min_p", "presence_penalty", "seed", "stop")
    },
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p")},
    "context": "/api/chat",
    "max_tokens": "options.num_predict",
    "num_predict": "options.num_predict",
    "response_format": "format",
    "system": "a message of the role system",
}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OPTIONS = dict.fromkeys(OllamaOptions.__struct_fields__) | client_names(OllamaOptions)
_NAMES = {
    **{ours: f"options.{theirs or ours}" for ours, theirs in _OPTIONS.items()},
    "continue_final_message": "messages",
    "grammar": "format",
    "template_kwargs": "think",
}
"""Core's field names to the client's."""


def parse_ollama_chat(raw: bytes) -> GenerationCall:
    """Raises InvalidArgument naming the field."""
    body, ignored = decode(raw, OllamaChatBody, _REFUSED, _INSTEAD)
    messages = tuple(_messages(body.messages or ()))
    last = messages[-1] if messages else None
    continues = last is not None and last.role == "assistant" and not last.tool_calls
    prompt = ChatPrompt(
        messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tools=tuple(tool_of(index, tool) for index, tool in enumerate(body.tools or ())),
        template_kwargs=_variables(body.think),
    )
    return _call(body, prompt, ignored, "messages")


def parse_ollama_generate(raw: bytes) -> GenerationCall:
    """Raises InvalidArgument naming the field."""
    body, ignored = decode(raw, OllamaGenerateBody, _REFUSED, _INSTEAD)
    prompt: Prompt
    if not body.prompt:
        prompt = _NOTHING
    elif body.raw:
        for name in ("system", "think"):
            if getattr(body, name):
                raise wrong(name, "cannot be combined with raw")
        prompt = TextPrompt(body.prompt)
    else:
        messages = (Message("system", body.system),) if body.system else ()
        prompt = ChatPrompt(
            (*messages, Message("user", body.prompt)), template_kwargs=_variables(body.think)
        )
    return _call(body, prompt, ignored, "prompt")


_NOTHING = ChatPrompt(())
"""The prompt of a request that only loads its model."""


def _call(
    body: OllamaBody, prompt: Prompt, ignored: tuple[str, ...], prompt_name: str
) -> GenerationCall:
    """prompt_name: the client's name of the prompt."""
    try:
        options, without_effect = decode(
            encode(body.options or {}), OllamaOptions, _REFUSED_OPTIONS
        )
    except InvalidArgument as error:
        raise in_client_words(error, {error.field: f"options.{error.field}"}) from None
    sampling = sampling_fields(options)
    if options.repeat_last_n == 0:
        # Penalties look at none of the tokens before.
        sampling = {name: value for name, value in sampling.items() if name not in _PENALTIES}
    elif options.repeat_last_n not in (None, -1) and any(name in sampling for name in _PENALTIES):
        raise wrong("options.repeat_last_n", "must be -1 (all tokens) or 0 beside a penalty")
    stops, most = options.stop_strings or (), options.max_tokens
    request = Request(
        prompt,
        model=(body.model or "").removesuffix(_LATEST),
        sampling=SamplingParams(**sampling),
        seed=None if options.seed == -1 else options.seed,
        # -1 and -2 are as many as fit.
        max_tokens=None if most is not None and most < 0 else most,
        cap_max_tokens=True,
        stop_strings=(stops,) if isinstance(stops, str) else stops,
        grammar=_grammar(bytes(body.format)),
    )
    return GenerationCall(
        requests=(request,),
        stream=body.stream is not False,
        ignored=(*ignored, *(f"options.{name}" for name in without_effect)),
        names=_NAMES | {"prompt": prompt_name},
    )


def _messages(given: Sequence[OllamaMessage]) -> Iterator[Message]:
    """Calls have no ids in this API unless a client gives them, so each gets one, and a result
    belongs to the first of the latest calls of its tool that has none."""
    pending: list[ToolCall] = []
    num_calls = 0
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.images:
            raise wrong(f"{where}.images", "is not supported")
        calls = []
        for call in message.tool_calls or ():
            arguments = encode(call.function.arguments).decode()
            calls.append(ToolCall(call.id or f"call_{num_calls}", call.function.name, arguments))
            num_calls += 1
        if calls:
            # More than that are refused when the request is validated.
            pending = calls[:MAX_CALLS_PER_MESSAGE]
        answered = None
        if message.role == "tool":
            answered = _answered(message, pending)
            if answered is None:
                raise wrong(where, "must follow a call of its tool")
            pending.remove(answered)
        yield Message(
            message.role,
            message.content or "",
            tool_calls=tuple(calls),
            tool_call_id=answered.id if answered else "",
            name=answered.name if answered else "",
            reasoning=message.thinking or "",
        )


def _answered(message: OllamaMessage, pending: Sequence[ToolCall]) -> ToolCall | None:
    """Returns the call to which a message of role tool is the result."""
    for call in pending:
        if message.tool_call_id in (None, call.id) and message.tool_name in (None, call.name):
            return call
    return None


def _variables(think: bool | str | None) -> str:
    """Returns the variables of the chat template that `think` sets. A template may lack them:
    clients send it whatever the model is."""
    match think:
        case None | "":
            return ""
        case bool():
            return encode({"enable_thinking": think}).decode()
        case str() if think in EFFORTS:
            effort = {"reasoning_effort": EFFORTS[think]}
            return encode({"enable_thinking": True, **effort}).decode()
    raise wrong("think", f"must be a boolean or one of {', '.join(EFFORTS)}")


def _grammar(text: bytes) -> Grammar | None:
    if text in (b"null", b'""'):
        return None
    if text == b'"json"':
        return ANY_OBJECT
    if not text.startswith(b"{"):
        raise wrong("format", "must be json or a schema")
    return Grammar(GrammarKind.JSON_SCHEMA, text.decode())


class OllamaAnswer(AnswerWriter):
    """The answer of a generating route. Calls come whole, because this API has no parts of them."""

    id_prefix = "ollama"

    def __init__(self, call: GenerationCall, accepted: Sequence[Accepted], created: int) -> None:
        super().__init__(call, accepted, created)
        self._head = {"model": accepted[0].model, "created_at": utc_time(created)}
        self._calls: list[ToolCallDelta] = []
        """Parts of the call that the model is writing."""
        self._last: Json = {}

    def opening(self, prompt: int) -> list[Json]:
        return []

    def chunks(self, prompt: int, delta: Delta) -> list[Json]:
        found = []
        if delta.text or delta.reasoning:
            found.append(self._chunk(delta.text, delta.reasoning, ()))
        for call in delta.tool_calls:
            if self._calls and call.index != self._calls[0].index:
                found += self._whole_call()
            self._calls.append(call)
        if delta.finish_reason is not None:
            found += self._whole_call()
            self._last = _ending(delta)
        return found

    def document(self, whole: Sequence[Sequence[Delta]]) -> Json:
        ((delta,),) = whole
        document = self._chunk(delta.text, delta.reasoning, delta.tool_calls)
        return document | _ending(delta) | self._numbers()

    def last_chunk(self, *, with_timings: bool) -> list[Json]:
        last = self._chunk("", "", ()) | self._last | self._numbers()
        return [last | (self.timings() if with_timings else {})]

    def loaded(self) -> Json:
        """Returns the answer of a request that only loaded its model."""
        return self._chunk("", "", ()) | {"done": True, "done_reason": "load"}

    def _part(self, text: str, thinking: str, calls: Sequence[ToolCallDelta]) -> Json:
        """Returns what of an answer is new, in the form of the route."""
        raise NotImplementedError

    def _chunk(self, text: str, thinking: str, calls: Sequence[ToolCallDelta]) -> Json:
        return {**self._head, **self._part(text, thinking, calls), "done": False}

    def _whole_call(self) -> list[Json]:
        if not self._calls:
            return []
        first, arguments = self._calls[0], "".join(part.arguments for part in self._calls)
        self._calls = []
        call = ToolCallDelta(first.index, first.id, first.name, arguments)
        return [self._chunk("", "", (call,))]

    def _numbers(self) -> Json:
        """Returns tokens, and nanoseconds unless the operator hides them, of a request that has
        finished."""
        (end,) = self._finished.values()
        return {**_durations(end), **_counts(end)}


class OllamaChatAnswer(OllamaAnswer):
    """The answer of POST /api/chat."""

    def _part(self, text: str, thinking: str, calls: Sequence[ToolCallDelta]) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
        return {"message": message}


class OllamaGenerateAnswer(OllamaAnswer):
    """The answer of POST /api/generate."""

    def _part(self, text: str, thinking: str, calls: Sequence[ToolCallDelta]) -> Json:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _tool_call(call: ToolCallDelta) -> Json:
    function = {"index": call.index, "name": call.name, "arguments": call_arguments(call)}
    return {"id": call.id, "function": function}


def _ending(delta: Delta) -> Json:
    reason = "length" if delta.finish_reason is FinishReason.LENGTH else "stop"
    return {"done": True, "done_reason": reason}


def _durations(end: Finished) -> Json:
    if end.stages is None:
        return {}
    total, first = (round(1e9 * each) for each in (end.stages.total_s, end.stages.first_token_s))
    return {
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_duration": first,
        "eval_duration": total - first,
    }


def _counts(end: Finished) -> Json:
    return {"prompt_eval_count": end.prompt_tokens, "eval_count": end.completion_tokens}


def _failure(error: Failure, _: str) -> Json:
    return {"error": error.message}


OLLAMA = WireFormat(
    content_type=b"application/x-ndjson",
    frame=lambda document: encode(document) + b"\n",
    end=b"",
    # There is no line that means nothing, so this one is an empty part, of either route.
    keep_alive=encode(
        {
            "model": "",
            "created_at": utc_time(0),
            "message": {"role": "assistant", "content": ""},
            "response": "",
            "done": False,
        }
    )
    + b"\n",
    failure=_failure,
)


class OllamaGeneration(Generation):
    """A generating route. A request without a prompt waits for workers of its model, which starts
    if it sleeps, and has no answer."""

    async def respond(
        self,
        call: GenerationCall,
        holding: Holding,
        given: Mapping[str, bytes],
        receive: Receive,
        send: Send,
    ) -> None:
        (request,) = call.requests
        if not isinstance(request.prompt, ChatPrompt) or request.prompt.messages:
            await super().respond(call, holding, given, receive, send)
            return
        await while_connected(receive, self._load(call, request, holding, send))

    async def _load(
        self, call: GenerationCall, request: Request, holding: Holding, send: Send
    ) -> None:
        probe = Request(TextPrompt("."), model=request.model, max_tokens=1)
        with worded(call):
            stream = await self.pipeline.open(probe.of(request.tenant, request.trace), holding)
            async with aclosing(stream):
                accepted = await anext(stream)
        assert isinstance(accepted, Accepted)
        answer = self.answer(call, [accepted], int(time.time()))
        assert isinstance(answer, OllamaAnswer)
        await send_json(send, 200, answer.loaded())


def embed_texts(body: OllamaEmbedBody) -> tuple[VectorInput, ...]:
    return (body.inputs,) if isinstance(body.inputs, str) else tuple(body.inputs)


def write_ollama_embeddings(_: OllamaEmbedBody, vectors: Vectors) -> Iterator[bytes]:
    yield b'{"model":%s,"prompt_eval_count":%d,"embeddings":[' % (
        encode(vectors.model.name),
        vectors.num_tokens,
    )
    for index, numbers in enumerate(vectors.numbers):
        yield b"," * (index > 0) + encode(floats(numbers).tolist())
    yield b"]}"


def embed_prompt(body: OllamaEmbeddingsBody) -> tuple[VectorInput, ...]:
    return (body.inputs,)


def write_ollama_embedding(_: OllamaEmbeddingsBody, vectors: Vectors) -> Iterator[bytes]:
    (numbers,) = vectors.numbers
    yield b'{"embedding":%s}' % encode(floats(numbers).tolist())


REFUSED_ROUTES = {
    "pull": ("POST", "models come with the workers (--model), not over this API"),
    "push": ("POST", "models are not published over this API"),
    "create": ("POST", "models are not made over this API"),
    "copy": ("POST", "a model gets another name by --aliases of the router"),
    "delete": ("DELETE", "models go with their workers, not over this API"),
}
"""By the last part of the path: the method, and why there is no such thing here."""


@dataclass(frozen=True, slots=True)
class _OfAnyType:
    """An ASGI app that reads bodies as JSON whatever type a program names, as Ollama does: its
    documentation posts with `curl -d`, which sends them as forms. A web page has to send JSON, for
    which its browser asks first."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        if not from_a_page(dict(headers)):
            # No type counts as JSON.
            headers = [each for each in headers if each[0] != b"content-type"]
            scope = {**scope, "headers": headers}
        await self.app(scope, receive, send)


def _served(pipeline: Pipeline) -> dict[str, ModelDescription]:
    """Returns the models that can be requested now, by each of their names."""
    found = {model.name: model for model in pipeline.all_models()}
    found |= {adapter.name: model for model, adapter in pipeline.adapters()}
    return found | pipeline.aliased()


@dataclass(frozen=True, slots=True)
class _Show:
    """An ASGI app: POST /api/show."""

    pipeline: Pipeline
    bodies: Bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.bodies.received(scope, receive) as body:
            with self.pipeline.reading(caller(scope)):
                given, _ = decode(body.raw, OllamaShowBody)
                name = (given.model or given.name or "").removesuffix(_LATEST)
                if not name:
                    raise wrong("model", "is required")
            served = _served(self.pipeline)
            if name not in served:
                raise model_not_found(name, served)
            reasons = self.pipeline.reasons(served[name])
            await send_json(send, 200, _shown(served[name], reasons=reasons))


def _shown(model: ModelDescription, *, reasons: bool) -> Json:
    can = ["completion", "tools", *(["thinking"] if reasons else [])]
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(),
        "model_info": {
            "general.architecture": "baton",
            "general.basename": model.name,
            "baton.context_length": model.max_model_len,
        },
        "capabilities": can if model.task is ModelTask.GENERATE else ["embedding"],
    }


def _details() -> Json:
    empty = dict.fromkeys(("parent_model", "format", "family"), "")
    return {**empty, "families": [], "parameter_size": "", "quantization_level": ""}


def ollama_routes(pipeline: Pipeline, bodies: Bodies, created: float) -> list[BaseRoute]:
    """created: when this router started, in seconds since the epoch."""
    since = utc_time(created)

    async def show_version(_: HttpRequest) -> Response:
        return json_response({"version": version("batonlm")})

    async def list_models(_: HttpRequest) -> Response:
        served = _served(pipeline).items()
        return json_response({"models": [_listed(*each, since) for each in served]})

    async def list_running(_: HttpRequest) -> Response:
        found = [
            _listed(name, model, since) | {"context_length": model.max_model_len, "size_vram": 0}
            for name, model in _served(pipeline).items()
            # Not known while it sleeps.
            if model.max_model_len
        ]
        return json_response({"models": found})

    posts: dict[str, ASGIApp] = {
        "chat": OllamaGeneration(
            pipeline, bodies, OllamaChatAnswer, OLLAMA, parse=parse_ollama_chat
        ),
        "generate": OllamaGeneration(
            pipeline, bodies, OllamaGenerateAnswer, OLLAMA, parse=parse_ollama_generate
        ),
        "embed": VectorRoute(
            pipeline, bodies, OllamaEmbedBody, embed_texts, write_ollama_embeddings
        ),
        "embeddings": VectorRoute(
            pipeline, bodies, OllamaEmbeddingsBody, embed_prompt, write_ollama_embedding
        ),
        "show": _Show(pipeline, bodies),
    }
    gets = {"version": show_version, "tags": list_models, "ps": list_running}
    return [
        *(Route(PREFIX + name, _OfAnyType(app), methods=["POST"]) for name, app in posts.items()),
        *(Route(PREFIX + name, get) for name, get in gets.items()),
        *(
            Route(
                PREFIX + name,
                _OfAnyType(RefusedRoute(pipeline, bodies, PREFIX + name, why)),
                methods=[method],
            )
            for name, (method, why) in REFUSED_ROUTES.items()
        ),
    ]


def _listed(name: str, model: ModelDescription, since: str) -> Json:
    return {
        "name": name,
        "model": name,
        "modified_at": since,
        "size": 0,
        "digest": model.digest,
        "details": _details(),
    }
