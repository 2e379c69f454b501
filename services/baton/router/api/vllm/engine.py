"""`vllm.grpc.engine.VllmEngine`, whose one engine is this Baton. Converts, calls, converts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from baton.core.admission.admission import Holding
from baton.core.errors import BatonError, Cancelled, InvalidArgument, Unimplemented
from baton.core.request.request import Accepted, Delta
from baton.router.api.grpc.grpc_door import caller
from baton.router.api.grpc.time_left import deadline_s
from baton.router.api.vllm.about import About
from baton.router.api.vllm.answer import Answer
from baton.router.api.vllm.calls import MAX_REQUEST_IDS, Call, call_of
from baton.router.api.vllm.running import Aborted, Handle, Running
from baton.router.api.vllm.tokenizer_files import TokenizerFiles
from baton.router.request.pipeline import Pipeline
from baton.rpc.calls import WriteTimeout
from baton.rpc.server import Service
from baton.rpc.tracing import context_of

SERVICE = "vllm.grpc.engine.VllmEngine"
REQUEST_ID, SEED = "x-baton-request-id", "x-baton-seed"
"""What the protocol has no field for is told in headers, named as HTTP's are."""

Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngine(pb_grpc.VllmEngineServicer):
    """A request ends with its call, whoever ends it, or by Abort, which its choices then name as
    their reason."""

    def __init__(
        self,
        pipeline: Pipeline,
        about: About,
        files: TokenizerFiles | None,
        *,
        stall_timeout_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._about = about
        self._files = files
        self._stall_timeout_s = stall_timeout_s
        self._running = Running()

    def service(self) -> Service:
        """Ready to be given to a ProcessServer."""
        return Service(
            SERVICE, lambda server: pb_grpc.add_VllmEngineServicer_to_server(self, server)
        )

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        tenant = caller(context)
        # The message is in memory already: what is held is room for its encoding.
        holding = self._pipeline.receive(tenant, request.ByteSize())
        try:
            self._pipeline.turn_away(tenant, 0)
            self._about.check_single()
            with self._pipeline.reading(tenant):
                call = call_of(request, deadline_s(context)).of(
                    tenant, context_of(context.invocation_metadata() or ())
                )
            with self._running.entered(tenant.name, call.request_id) as handle:
                try:
                    async with WriteTimeout(self._stall_timeout_s) as stall:
                        await self._answer(call, holding, handle, context, stall)
                except BatonError as error:
                    raise call.in_client_words(error) from error
        finally:
            holding.release()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if len(request.request_ids) > MAX_REQUEST_IDS:
            raise InvalidArgument(
                f"request_ids must have at most {MAX_REQUEST_IDS} entries", field="request_ids"
            )
        self._running.abort(caller(context).name, request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        return self._about.health()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return self._about.model_info()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return self._about.server_info(caller(context))

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidArgument("dp_rank must be 0: there is one", field="dp_rank")
        return self._about.loads(caller(context))

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        if self._files is None:
            raise Unimplemented(
                "This router has no copy of the tokenizer to give away (vllm_tokenizer)."
            )
        archive = await self._files.archive(self._about.model().tokenizer_digest)
        for data, last in archive.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=archive.sha256 if last else "")

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        raise Unimplemented("Embeddings are not offered here.")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        raise Unimplemented("Which worker a request gets is chosen here, by what each has cached.")

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        raise Unimplemented("Prefix caches cannot be emptied from here.")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        raise Unimplemented("Workers cannot be profiled from here.")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        raise Unimplemented("Workers cannot be profiled from here.")

    async def _answer(
        self, call: Call, holding: Holding, handle: Handle, context: Context, stall: WriteTimeout
    ) -> None:
        async def tell(messages: Iterable[pb.GenerateResponse]) -> None:
            for message in messages:
                await stall.watch(context.write(message))

        try:
            async with handle.interrupting():
                stream = await self._pipeline.open(call.request, holding)
        except Aborted:
            await tell(Answer(call).aborted())
            return
        # Not before the request was found to be sound: it says how many choices there are.
        answer = Answer(call)
        try:
            handle.on_abort(stream.call_off)
            async for event in stream:
                if isinstance(event, Delta):
                    await tell(answer.delta(event, stream.cached_tokens))
                elif isinstance(event, Accepted):
                    answer.accepted(event)
                    await context.send_initial_metadata(_headers(event))
        except Cancelled:
            if not handle.aborted:
                raise
            await tell(answer.aborted(stream.cached_tokens))
        finally:
            await stream.aclose()


def _headers(event: Accepted) -> tuple[tuple[str, str], ...]:
    return ((REQUEST_ID, event.request_id), (SEED, str(event.seed)))
