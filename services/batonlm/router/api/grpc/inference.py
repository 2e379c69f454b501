"""The public gRPC service `baton.v1.Inference`: messages to core Requests, events to messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from batonlm.core.admission.admission import Holding
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, InvalidArgument, from_reason
from batonlm.core.observe.stages import StageTimes, TraceContext
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Grammar,
    GrammarKind,
    Prompt,
    Request,
    TextLogprob,
    TextPair,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
    ToolUse,
    VectorInput,
    VectorPrompt,
)
from batonlm.core.request.resumption import EventIds, StreamPosition, keyed_stream_id
from batonlm.router.api.grpc.access import caller, deadline_s
from batonlm.router.api.translation import ANY_OBJECT, IDEMPOTENCY_KEY, checked_key, choice
from batonlm.router.request.kept import not_kept
from batonlm.router.request.pipeline import EventStream, Pipeline
from batonlm.router.workers.encoders import Vectors, floats
from batonlm.rpc.calls import WriteTimeout
from batonlm.rpc.convert import (
    filled,
    finish_reason_to_proto,
    messages_from_proto,
    model_to_proto,
    parsed,
    sampling_from_proto,
    tools_from_proto,
)
from batonlm.rpc.errors import with_hint
from batonlm.rpc.server import Service
from batonlm.rpc.tracing import context_of
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc, types_pb2

RequestMessage = TypeVar("RequestMessage", pb.GenerateRequest, pb.ChatRequest)
VectorMessage = TypeVar("VectorMessage", pb.EmbedRequest, pb.ScoreRequest)
ResponseMessage = TypeVar("ResponseMessage", pb.GenerateResponse, pb.ChatResponse)


SERVICE = "baton.v1.Inference"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves Inference. A request ends when its call ends: by the client, the deadline or the write
    timeout."""

    def __init__(self, pipeline: Pipeline, *, stall_timeout_s: float) -> None:
        self._pipeline = pipeline
        self._stall_timeout_s = stall_timeout_s

    def service(self) -> Service:
        """Returns the service for a ProcessServer."""
        return Service(
            SERVICE, lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        )

    async def Generate(  # type: ignore[override]
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        await self._answer(request, generate_from_proto, pb.GenerateResponse, context)

    async def Chat(  # type: ignore[override]
        self,
        request: pb.ChatRequest,
        context: grpc.aio.ServicerContext[pb.ChatRequest, pb.ChatResponse],
    ) -> None:
        await self._answer(request, chat_from_proto, pb.ChatResponse, context)

    async def Resume(  # type: ignore[override]
        self,
        request: pb.ResumeRequest,
        context: grpc.aio.ServicerContext[pb.ResumeRequest, pb.ResumeResponse],
    ) -> None:
        tenant = caller(context)
        with self._pipeline.receive(tenant, request.ByteSize()) as holding:
            try:
                found = await resumed(self._pipeline, request, tenant, holding)
                await self._write(*found, pb.ResumeResponse, context)
            except BatonError as error:
                raise with_hint(error) from error

    async def Leave(
        self,
        request: pb.LeaveRequest,
        context: grpc.aio.ServicerContext[pb.LeaveRequest, pb.LeaveResponse],
    ) -> pb.LeaveResponse:
        tenant = caller(context)
        with self._pipeline.receive(tenant, request.ByteSize()):
            return await leave(self._pipeline, request, tenant)

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        return listed_models(self._pipeline)

    async def Embed(
        self,
        request: pb.EmbedRequest,
        context: grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse],
    ) -> pb.EmbedResponse:
        return embed_response(await self._vectors(request, embed_from_proto, context))

    async def Score(
        self,
        request: pb.ScoreRequest,
        context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse],
    ) -> pb.ScoreResponse:
        return score_response(await self._vectors(request, score_from_proto, context))

    async def _vectors(
        self,
        message: VectorMessage,
        read: Callable[[VectorMessage, float | None], Request],
        context: grpc.aio.ServicerContext[VectorMessage, Any],
    ) -> Vectors:
        tenant = caller(context)
        with self._pipeline.receive(tenant, message.ByteSize()) as holding:
            try:
                trace = context_of(context.invocation_metadata() or ())
                return await vectors(
                    self._pipeline, message, read, lambda: deadline_s(context),
                    tenant=tenant, trace=trace, holding=holding,
                )  # fmt: skip
            except BatonError as error:
                raise in_client_words(error) from error

    async def _answer(
        self,
        message: RequestMessage,
        read: Callable[[RequestMessage, float | None], Request],
        new: Callable[[], ResponseMessage],
        context: grpc.aio.ServicerContext[RequestMessage, ResponseMessage],
    ) -> None:
        tenant = caller(context)
        # The message is in memory already; the reserved room is for its encoding.
        with self._pipeline.receive(tenant, message.ByteSize()) as holding:
            try:
                trace = context_of(context.invocation_metadata() or ())
                request, stream = await opened(
                    self._pipeline, message, read, lambda: deadline_s(context),
                    tenant=tenant, trace=trace, holding=holding,
                    idempotency_key=_idempotency_key(context),
                )  # fmt: skip
                await self._write(request, stream, new, context)
            except BatonError as error:
                raise in_client_words(error) from error

    async def _write(
        self,
        request: Request,
        stream: EventStream,
        new: Callable[[], Any],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Writes the events of a stream, and closes it."""
        events = EventMessages(request)
        async with aclosing(stream), WriteTimeout(self._stall_timeout_s) as stall:
            async for event in stream:
                response = new()
                if events.put(event, response.event):
                    await stall.watch(context.write(response))


def _idempotency_key(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name == IDEMPOTENCY_KEY.lower():
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


def listed_models(pipeline: Pipeline) -> pb.ListModelsResponse:
    aliased = pipeline.aliased()
    found = [model_to_proto(model) for model in pipeline.all_models() if model.name not in aliased]
    for model, adapter in pipeline.adapters():
        listed = model_to_proto(replace(model, name=adapter.name, digest=adapter.digest))
        listed.parent = model.name
        found.append(listed)
    found += [model_to_proto(replace(model, name=alias)) for alias, model in aliased.items()]
    return pb.ListModelsResponse(models=found)


async def vectors(
    pipeline: Pipeline,
    message: VectorMessage,
    read: Callable[[VectorMessage, float | None], Request],
    deadline_s: Callable[[], float | None],
    *,
    tenant: Tenant,
    trace: TraceContext,
    holding: Holding,
) -> Vectors:
    """Computes a message's vectors or scores, and grows holding by them. read: `embed_from_proto`
    or `score_from_proto`. Raises BatonError."""
    with pipeline.reading(tenant):
        request = read(message, deadline_s()).of(tenant, trace)
    found = await pipeline.vectors(request, holding)
    holding.grow(sum(map(len, found.numbers)))
    return found


def embed_from_proto(message: pb.EmbedRequest, deadline_s: float | None) -> Request:
    """Raises InvalidArgument for an input that is not set."""
    inputs: list[VectorInput] = []
    for each in message.inputs:
        match each.WhichOneof("input"):
            case "text":
                inputs.append(each.text)
            case "token_ids":
                inputs.append(tuple(each.token_ids.ids))
            case _:
                raise InvalidArgument("inputs must be text or token_ids", field="inputs")
    prompt = parsed(VectorPrompt, message, inputs=tuple(inputs), truncate_tokens=_truncate(message))
    return Request(prompt, model=message.model, deadline_s=deadline_s)


def score_from_proto(message: pb.ScoreRequest, deadline_s: float | None) -> Request:
    pairs = tuple(TextPair(message.query, document) for document in message.documents)
    if not pairs:
        raise InvalidArgument("documents must not be empty", field="documents")
    prompt = VectorPrompt(pairs, truncate_tokens=_truncate(message))
    return Request(prompt, model=message.model, deadline_s=deadline_s)


def _truncate(message: pb.EmbedRequest | pb.ScoreRequest) -> int | None:
    return message.truncate_tokens if message.HasField("truncate_tokens") else None


def embed_response(found: Vectors) -> pb.EmbedResponse:
    response = pb.EmbedResponse(
        request_id=found.request_id, model=found.model.name, prompt_tokens=found.num_tokens
    )
    for numbers in found.numbers:
        response.vectors.add().values.extend(floats(numbers))
    return response


def score_response(found: Vectors) -> pb.ScoreResponse:
    return pb.ScoreResponse(
        request_id=found.request_id,
        model=found.model.name,
        scores=[floats(numbers)[0] for numbers in found.numbers],
        prompt_tokens=found.num_tokens,
    )


async def opened(
    pipeline: Pipeline,
    message: RequestMessage,
    read: Callable[[RequestMessage, float | None], Request],
    deadline_s: Callable[[], float | None],
    *,
    tenant: Tenant,
    trace: TraceContext,
    holding: Holding,
    idempotency_key: str | None = None,
) -> tuple[Request, EventStream]:
    """Starts the request of a message, or reads what runs for its idempotency key. The caller
    closes the stream. read: `generate_from_proto` or `chat_from_proto`. Raises BatonError."""
    pipeline.turn_away(tenant, message.options.priority)
    with pipeline.reading(tenant):
        request = read(message, deadline_s()).of(tenant, trace)
        if message.options.last_event_id:
            position = StreamPosition.parse(message.options.last_event_id, tenant.name)
            request = replace(request, resumable=True, resumes=position)
        if idempotency_key is not None:
            key = checked_key(idempotency_key)
            request = replace(request, keyed_stream_id=keyed_stream_id(tenant.name, key, 0))
    return request, await pipeline.kept.open(request, holding)


async def resumed(
    pipeline: Pipeline, message: pb.ResumeRequest, tenant: Tenant, holding: Holding
) -> tuple[Request, EventStream]:
    """Reads a stream that this router has. The caller closes it. Raises BatonError."""
    with pipeline.reading(tenant):
        position = StreamPosition.parse(message.last_event_id, tenant.name)
        kept = pipeline.kept.find(tenant, position.stream_id)
        if kept is None:
            raise not_kept("options.last_event_id")
    request = replace(kept.request, resumable=True, resumes=position)
    return request, await pipeline.kept.open(request, holding)


async def leave(pipeline: Pipeline, message: pb.LeaveRequest, tenant: Tenant) -> pb.LeaveResponse:
    """Ends a stream with its last reader. Raises BatonError."""
    with pipeline.reading(tenant):
        position = StreamPosition.parse(message.last_event_id, tenant.name)
    await pipeline.kept.leave(tenant, position.stream_id)
    return pb.LeaveResponse()


_FIELDS = {
    **{name: f"options.{name}" for name in pb.GenerationOptions.DESCRIPTOR.fields_by_name},
    **{
        name: f"options.sampling.{name}"
        for name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    },
    **{name: f"options.stop.{name}" for name in types_pb2.StopParams.DESCRIPTOR.fields_by_name},
    "grammar": "options.structured_output",
    "resumable": "options.event_ids",
}
"""Core's request field names to those of these messages, where they differ."""

_TOOL_USES = {
    pb.ToolChoice.USE_UNSPECIFIED: ToolUse.AUTO,
    pb.ToolChoice.USE_NONE: ToolUse.NONE,
    pb.ToolChoice.USE_AUTO: ToolUse.AUTO,
    pb.ToolChoice.USE_REQUIRED: ToolUse.REQUIRED,
}


def in_client_words(error: BatonError) -> BatonError:
    """Returns the error with the field named as in these messages, and a time to retry where that
    may help."""
    hinted = with_hint(error)
    worded = from_reason(
        hinted.reason,
        hinted.message,
        field=_FIELDS.get(hinted.field, hinted.field),
        retry_after_s=hinted.retry_after_s,
    )
    worded.request_id = error.request_id
    return worded


def generate_from_proto(message: pb.GenerateRequest, deadline_s: float | None) -> Request:
    """Raises InvalidArgument without a prompt."""
    match message.WhichOneof("prompt"):
        case "text":
            prompt: Prompt = TextPrompt(message.text)
        case "token_ids":
            prompt = TokenPrompt(tuple(message.token_ids.ids))
        case _:
            raise InvalidArgument("prompt must be set: text or token_ids", field="prompt")
    return _request(message.model, prompt, message.options, deadline_s)


def chat_from_proto(message: pb.ChatRequest, deadline_s: float | None) -> Request:
    """Raises InvalidArgument for a tool choice that this version does not support."""
    prompt = ChatPrompt(
        messages_from_proto(message.messages),
        tools=tools_from_proto(message.tools),
        tool_choice=_tool_choice(message.tool_choice),
    )
    return _request(message.model, prompt, message.options, deadline_s)


def _tool_choice(message: pb.ToolChoice) -> ToolChoice:
    if message.use not in _TOOL_USES:
        raise InvalidArgument("tool_choice.use is not known", field="tool_choice")
    return ToolChoice(_TOOL_USES[message.use], message.name, parallel=not message.single)


def _request(
    model: str, prompt: Prompt, options: pb.GenerationOptions, deadline_s: float | None
) -> Request:
    sampling = options.sampling
    return parsed(
        Request,
        options.stop,
        prompt=prompt,
        model=model,
        n=options.n if options.HasField("n") else 1,
        sampling=sampling_from_proto(sampling, "options.sampling"),
        seed=sampling.seed if sampling.HasField("seed") else None,
        return_token_ids=options.return_token_ids,
        skip_special_tokens=not options.keep_special_tokens,
        priority=options.priority,
        cache_salt=options.cache_salt.encode(),
        deadline_s=deadline_s,
        grammar=_grammar(options.structured_output),
        resumable=options.event_ids,
        no_speculation=options.no_speculation,
    )


def _grammar(form: pb.StructuredOutput) -> Grammar | None:
    """Raises InvalidArgument naming the field."""
    match form.WhichOneof("form"):
        case None:
            return None
        case "json_object":
            return ANY_OBJECT if form.json_object else None
        case "choice":
            return choice(form.choice.texts, f"{_FIELDS['grammar']}.choice")
        case name:
            return Grammar(GrammarKind[name.upper()], getattr(form, name))


class EventMessages:
    """Makes the messages of one request's events."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._ids: EventIds | None = None

    def put(self, event: Event, message: pb.GenerationEvent) -> bool:
        """Fills an empty message in place, because this runs for every token. Returns False when
        the client has all of the event. Raises InvalidArgument when the request says something else
        than the stream that it continues."""
        if self._request.resumable:
            return self._put_with_id(event, message)
        _put_event(event, message, self._request.return_token_ids)
        return True

    def _put_with_id(self, event: Event, message: pb.GenerationEvent) -> bool:
        request, ids = self._request, self._ids
        if isinstance(event, Accepted):
            position = request.resumes or StreamPosition(request.stream_id(event.request_id))
            ids = self._ids = EventIds(position, request.tenant.name, request.n)
        assert ids is not None
        if isinstance(event, Delta):
            _, event = ids.split(event)
            if event == Delta(event.choice):
                return False
        message.id = ids.finished() if isinstance(event, Finished) else ids.reached()
        _put_event(event, message, request.return_token_ids)
        return True


def _put_event(event: Event, message: pb.GenerationEvent, return_token_ids: bool) -> None:
    match event:
        case Delta():
            _put_delta(event, message.delta, return_token_ids)
        case Accepted():
            message.accepted.CopyFrom(filled(pb.RequestAccepted, event))
        case Finished():
            stages = _stages_to_proto(event.stages) if event.stages else None
            message.finished.CopyFrom(filled(pb.RequestFinished, event, stages=stages))


def _put_delta(delta: Delta, message: pb.ChoiceDelta, return_token_ids: bool) -> None:
    message.SetInParent()
    message.choice = delta.choice
    message.text = delta.text
    if return_token_ids:
        message.token_ids.extend(delta.token_ids)
    for entry in delta.logprobs:
        message.logprobs.add(
            token=_logprob_to_proto(entry.token),
            top=[_logprob_to_proto(other) for other in entry.top],
        )
    if delta.reasoning:
        message.reasoning = delta.reasoning
    for call in delta.tool_calls:
        message.tool_calls.append(filled(pb.ToolCallDelta, call))
    if delta.finish_reason is not None:
        message.finish_reason = finish_reason_to_proto(delta.finish_reason)
    if delta.stop_string is not None:
        message.stop_string = delta.stop_string
    if delta.stop_token_id is not None:
        message.stop_token_id = delta.stop_token_id


def _stages_to_proto(times: StageTimes) -> pb.StageTimes:
    spent = {f"{stage}_us": round(seconds * 1e6) for stage, seconds in times.spent().items()}
    return filled(
        pb.StageTimes,
        times,
        **spent,
        first_token_us=round(times.first_token_s * 1e6),
        total_us=round(times.total_s * 1e6),
        workers=[
            pb.ServingWorker(role=worker.role, instance_id=worker.short, address=worker.address)
            for worker in times.workers
        ],
    )


def _logprob_to_proto(entry: TextLogprob) -> pb.TextLogprob:
    return pb.TextLogprob(token_id=entry.token_id, text=entry.text, logprob=entry.logprob)
