"""`vllm.grpc.engine.VllmEngine`, whose one engine is this Baton."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from baton.core.admission.admission import Holding
from baton.core.admission.tenants import Tenant
from baton.core.errors import (
    BatonError,
    Cancelled,
    InvalidArgument,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from baton.core.request.model import ModelDescription
from baton.core.request.request import Accepted, Delta
from baton.router.api.grpc.access import caller, deadline_s
from baton.router.api.vllm.messages import MAX_REQUEST_IDS, Answer, Call, call_of
from baton.router.observe.gauges import Use
from baton.router.request.pipeline import Pipeline
from baton.rpc.calls import WriteTimeout
from baton.rpc.digest import FILES, tokenizer_digest
from baton.rpc.model_folder import read_json
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


class Aborted(Exception):
    """What was under way was called off."""


class Handle:
    """One request. aborted: it is to end."""

    def __init__(self) -> None:
        self.aborted = False
        self._call_off: Callable[[], None] = _nothing

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self._call_off()

    def on_abort(self, call_off: Callable[[], None]) -> None:
        """call_off: called when it is to end, at once if it already is. Must not wait."""
        self._call_off = call_off
        if self.aborted:
            call_off()

    @asynccontextmanager
    async def interrupting(self) -> AsyncIterator[None]:
        """Whatever is awaited within is cancelled, and Aborted raised, when it is to end."""
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self.on_abort(lambda: scope.reschedule(loop.time()))
                try:
                    yield
                finally:
                    self._call_off = _nothing
        except TimeoutError:
            if scope.expired():
                raise Aborted from None
            raise


class Running:
    """One per service."""

    def __init__(self) -> None:
        self._handles: dict[tuple[str, str], set[Handle]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._handles.values()))

    @contextmanager
    def entered(self, tenant: str, request_id: str) -> Iterator[Handle]:
        """A request is under way while the block runs."""
        key, handle = (tenant, request_id), Handle()
        self._handles.setdefault(key, set()).add(handle)
        try:
            yield handle
        finally:
            named = self._handles[key]
            named.discard(handle)
            if not named:
                del self._handles[key]

    def abort(self, tenant: str, request_ids: Iterable[str]) -> None:
        """Unknown names are those of requests that have ended."""
        for request_id in request_ids:
            for handle in list(self._handles.get((tenant, request_id), ())):
                handle.abort()


def _nothing() -> None:
    return


SERVER_TYPE = "baton"
FIRST_TOKEN = "first_token"
"""Where a grammar starts, in the protocol's words."""


class About:
    """files: of the tokenizer, where the operator gave them."""

    def __init__(self, pipeline: Pipeline, use: Use, files: TokenizerFiles | None) -> None:
        self._pipeline = pipeline
        self._use = use
        self._files = files
        self._since = time.monotonic()

    def check_single(self) -> None:
        """Raises Unimplemented where requests would have to name a model: they cannot."""
        if len(self._pipeline.models()) > 1:
            raise Unimplemented(
                "This router serves several models, and this protocol names none: give the router "
                "one of them with --model."
            )

    def model(self) -> ModelDescription:
        """The one that is served. Raises Unavailable while there is none, and Unimplemented."""
        self.check_single()
        for model in self._pipeline.models():
            return model
        raise Unavailable("No worker is ready.", retry_after_s=1.0)

    def health(self) -> pb.HealthCheckResponse:
        ready = self._pipeline.ready()
        said = "Requests can be answered." if ready else "No request can be answered now."
        return pb.HealthCheckResponse(healthy=ready, message=said)

    def model_info(self) -> pb.GetModelInfoResponse:
        """Raises BatonError."""
        model = self.model()
        config = self._files.model if self._files else {}
        architectures = config.get("architectures")
        # Where a path is told, gateways ask here for the tokenizer, and never look in a folder of
        # their own: so it is told only where they can have it.
        source = model.name if self._files else ""
        return pb.GetModelInfoResponse(
            model_path=source,
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            tokenizer_path=source,
            model_type=str(config.get("model_type", "")),
            architectures=map(str, architectures) if isinstance(architectures, list) else (),
            eos_token_ids=model.eos_token_ids,
            max_req_input_len=model.max_model_len - 1,
        )

    def server_info(self, caller: Tenant) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._pipeline.num_requests if caller.sees_others else 0,
            uptime_seconds=time.monotonic() - self._since,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=sum(told.max_sequences for _, told, _ in self._use.decodes()),
            constrained_decoding_start=FIRST_TOKEN,
        )

    def loads(self, caller: Tenant) -> pb.GetLoadsResponse:
        """Raises Unauthenticated: it tells of all tenants together."""
        if not caller.sees_others:
            raise Unauthenticated("The load is told to an operator's key only.")
        running, waiting = self._use.running().total(), self._use.waiting().total()
        positions = used = sequences = 0
        for _, told, load in self._use.decodes():
            positions += told.num_blocks * told.block_size
            used += (told.num_blocks - load.free_blocks) * told.block_size
            sequences += told.max_sequences
        usage = used / positions if positions else 0.0
        load_now = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=positions,
            token_usage=usage,
            utilization=usage,
            max_running_requests=sequences,
            num_waiting_uncached_tokens=self._use.waiting_tokens(),
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("baton"),
            dp_rank_count=1,
            loads=[load_now],
        )


MORE_FILES = ("config.json", "generation_config.json", "added_tokens.json", "chat_template.json")
"""That a gateway looks for beside those that Baton's own tokenizers read."""

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Archive:
    """sha256: of the data, in hex. digest: of the tokenizer, as its workers tell it."""

    data: bytes
    sha256: str
    digest: str

    def chunks(self) -> Iterator[tuple[bytes, bool]]:
        """Each with whether it is the last one."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            yield self.data[start:end], end >= len(self.data)


class TokenizerFiles:
    """Of one folder, read at the first wish. model: what its config.json says."""

    def __init__(self, folder: Path, model: dict[str, Any]) -> None:
        self.model = model
        self._folder = folder
        self._archive: Archive | None = None
        self._reading = asyncio.Lock()

    @classmethod
    def of(cls, folder: str) -> TokenizerFiles:
        """Raises InvalidArgument naming `vllm_tokenizer`. Blocks for a moment."""
        path = Path(folder).expanduser()
        if not (path / FILES[0]).is_file():
            raise InvalidArgument(f"there is no {FILES[0]} in {path}", field="vllm_tokenizer")
        try:
            return cls(path, read_json(path / "config.json"))
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field="vllm_tokenizer") from None

    async def archive(self, digest: str) -> Archive:
        """digest: of the tokenizer that is served. Raises Unavailable when the folder has another:
        its ids would mean something else."""
        async with self._reading:
            if self._archive is None or self._archive.digest != digest:
                self._archive = await asyncio.to_thread(_pack, self._folder)
            if self._archive.digest != digest:
                raise Unavailable("This router's copy of the tokenizer is not the one in use.")
            return self._archive


def _pack(folder: Path) -> Archive:
    """The same bytes whenever the files are the same."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*FILES, *MORE_FILES):
            path = folder / name
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest(), tokenizer_digest(folder))
