"""`vllm.grpc.engine.VllmEngine`, with this Baton as its one engine."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import (
    BatonError,
    Cancelled,
    InvalidArgument,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import Accepted, Delta
from batonlm.router.api.grpc.access import caller, deadline_s
from batonlm.router.api.translation import in_client_words
from batonlm.router.api.vllm.messages import MAX_REQUEST_IDS, EngineAnswer, EngineCall, call_of
from batonlm.router.observe.gauges import RouterUse
from batonlm.router.request.pipeline import Pipeline
from batonlm.rpc.calls import WriteTimeout
from batonlm.rpc.errors import with_hint
from batonlm.rpc.model_folder import FILES, read_json, tokenizer_digest
from batonlm.rpc.server import Service
from batonlm.rpc.tracing import context_of

SERVICE = "vllm.grpc.engine.VllmEngine"
SERVER_TYPE = "baton"
FIRST_TOKEN = "first_token"
"""Where a grammar starts, in the protocol's terms."""

Context = grpc.aio.ServicerContext[Any, Any]


def _refusing(reason: str) -> Any:
    async def refuse(_: VllmEngine, request: object, context: Context) -> None:
        raise Unimplemented(reason)

    return refuse


class VllmEngine(pb_grpc.VllmEngineServicer):
    """One engine of one model. KV figures cover all decode workers; running and waiting requests
    are those of this router.

    A request ends when its call ends, for any reason, or by Abort, with the finish reason "abort".
    """

    Embed = _refusing("Embeddings are not offered here.")
    SubscribeKvEvents = _refusing(
        "Which worker a request gets is chosen here, by what each has cached."
    )
    FlushCache = _refusing("Prefix caches cannot be emptied from here.")
    StartProfile = StopProfile = _refusing("Workers cannot be profiled from here.")

    def __init__(
        self,
        pipeline: Pipeline,
        use: RouterUse,
        files: TokenizerArchive | None,
        *,
        stall_timeout_s: float,
    ) -> None:
        """files: the tokenizer's files, if the operator configured them."""
        self._pipeline = pipeline
        self._use = use
        self._files = files
        self._stall_timeout_s = stall_timeout_s
        self._running = RunningCalls()
        self._since = time.monotonic()

    def service(self) -> Service:
        """Returns the service for a ProcessServer."""
        return Service(
            SERVICE, lambda server: pb_grpc.add_VllmEngineServicer_to_server(self, server)
        )

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        tenant = caller(context)
        # The message is in memory already; the reserved room is for its encoding.
        with self._pipeline.receive(tenant, request.ByteSize()) as holding:
            self._pipeline.turn_away(tenant, 0)
            self._check_single()
            with self._pipeline.reading(tenant):
                call = call_of(request, deadline_s(context))
            trace = context_of(context.invocation_metadata() or ())
            call = replace(call, request=call.request.of(tenant, trace))
            with self._running.entered(tenant.name, call.request_id) as handle:
                try:
                    async with WriteTimeout(self._stall_timeout_s) as stall:
                        await self._answer(call, holding, handle, context, stall)
                except BatonError as error:
                    raise in_client_words(with_hint(error), call.names) from error

    async def _answer(
        self,
        call: EngineCall,
        holding: Holding,
        handle: CallHandle,
        context: Context,
        stall: WriteTimeout,
    ) -> None:
        async def send(messages: Iterable[pb.GenerateResponse]) -> None:
            for message in messages:
                await stall.watch(context.write(message))

        try:
            async with handle.interrupting():
                stream = await self._pipeline.open(call.request, holding)
        except Aborted:
            await send(EngineAnswer(call).aborted())
            return
        # The number of choices is known to be valid only from here on.
        answer = EngineAnswer(call)
        async with aclosing(stream):
            handle.on_abort(stream.call_off)
            try:
                async for event in stream:
                    if isinstance(event, Delta):
                        await send(answer.delta(event, stream.cached_tokens))
                    elif isinstance(event, Accepted):
                        answer.accepted(event)
                        # Values without a field in the protocol, under the names of HTTP headers.
                        ids = (
                            ("x-baton-request-id", event.request_id),
                            ("x-baton-seed", str(event.seed)),
                        )
                        await context.send_initial_metadata(ids)
            except Cancelled:
                if not handle.aborted:
                    raise
                await send(answer.aborted(stream.cached_tokens))

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
        ready = self._pipeline.ready()
        message = "Requests can be answered." if ready else "No request can be answered now."
        return pb.HealthCheckResponse(healthy=ready, message=message)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        model = self._model()
        config = self._files.model_config if self._files else {}
        architectures = config.get("architectures")
        # A gateway that gets a path fetches the tokenizer from here instead of a folder of its own.
        # So the path is set only when the tokenizer is available.
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

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        sees_others = caller(context).sees_others
        return pb.GetServerInfoResponse(
            active_requests=self._pipeline.num_requests if sees_others else 0,
            uptime_seconds=time.monotonic() - self._since,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=sum(worker.max_sequences for _, worker, _ in self._use.decodes()),
            constrained_decoding_start=FIRST_TOKEN,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidArgument("dp_rank must be 0: there is one", field="dp_rank")
        if not caller(context).sees_others:
            raise Unauthenticated("The load is told to an operator's key only.")
        running, waiting = self._use.running().total(), self._use.waiting().total()
        positions = used = sequences = 0
        for _, worker, load in self._use.decodes():
            positions += worker.num_blocks * worker.block_size
            used += (worker.num_blocks - load.free_blocks) * worker.block_size
            sequences += worker.max_sequences
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
            version=version("batonlm"),
            dp_rank_count=1,
            loads=[load_now],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        if self._files is None:
            raise Unimplemented(
                "This router has no copy of the tokenizer to give away (vllm_tokenizer)."
            )
        data, sha256 = await self._files.read(self._model().tokenizer_digest)
        for start in range(0, len(data), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(
                data=data[start:end], sha256=sha256 if end >= len(data) else ""
            )

    def _check_single(self) -> None:
        """Raises Unimplemented when the router serves several models, because these requests cannot
        name one."""
        if len(self._pipeline.models()) > 1:
            raise Unimplemented(
                "This router serves several models, and this protocol names none: give the router "
                "one of them with --model."
            )

    def _model(self) -> ModelDescription:
        """Returns the model that is served. Raises Unavailable when there is none, and
        Unimplemented."""
        self._check_single()
        for model in self._pipeline.models():
            return model
        raise Unavailable("No decode worker is ready.", retry_after_s=1.0)


class Aborted(Exception):
    """An Abort call has ended what was awaited."""


class CallHandle:
    """One running request, which can be aborted."""

    def __init__(self) -> None:
        self.aborted = False
        self._call_off: Callable[[], None] = lambda: None

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self._call_off()

    def on_abort(self, call_off: Callable[[], None]) -> None:
        """Registers a function that is called on abort, immediately if already aborted. It must not
        block."""
        self._call_off = call_off
        if self.aborted:
            call_off()

    @asynccontextmanager
    async def interrupting(self) -> AsyncIterator[None]:
        """An abort cancels what is awaited within the block, and raises Aborted."""
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self.on_abort(lambda: scope.reschedule(loop.time()))
                try:
                    yield
                finally:
                    self._call_off = lambda: None
        except TimeoutError:
            if scope.expired():
                raise Aborted from None
            raise


class RunningCalls:
    """The running requests by the ids that their callers gave them.

    Ids are scoped by tenant, so a tenant cannot abort another's request. Several requests may share
    an id; an abort ends all of them.
    """

    def __init__(self) -> None:
        self._handles: dict[tuple[str, str], set[CallHandle]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._handles.values()))

    @contextmanager
    def entered(self, tenant: str, request_id: str) -> Iterator[CallHandle]:
        """Registers a request for the duration of the block."""
        key, handle = (tenant, request_id), CallHandle()
        self._handles.setdefault(key, set()).add(handle)
        try:
            yield handle
        finally:
            named = self._handles[key]
            named.discard(handle)
            if not named:
                del self._handles[key]

    def abort(self, tenant: str, request_ids: Iterable[str]) -> None:
        """Aborts requests. Unknown ids belong to requests that have ended."""
        for request_id in request_ids:
            for handle in list(self._handles.get((tenant, request_id), ())):
                handle.abort()


MORE_FILES = ("config.json", "generation_config.json", "added_tokens.json", "chat_template.json")
"""Files that a gateway needs in addition to those that Baton's tokenizers read."""

CHUNK_BYTES = 1 << 16


class TokenizerArchive:
    """A zip archive of a tokenizer's files in one folder, created when first needed."""

    def __init__(self, folder: Path, model_config: dict[str, Any]) -> None:
        self.model_config = model_config
        """The content of config.json."""
        self._folder = folder
        self._packed: tuple[bytes, str, str] | None = None
        """The archive, its sha256 in hex, and the tokenizer's digest; None before it is created."""
        self._reading = asyncio.Lock()

    @classmethod
    def of(cls, folder: str) -> TokenizerArchive:
        """Raises InvalidArgument naming `vllm_tokenizer`. Blocks for a moment."""
        path = Path(folder).expanduser()
        if not (path / FILES[0]).is_file():
            raise InvalidArgument(f"there is no {FILES[0]} in {path}", field="vllm_tokenizer")
        try:
            return cls(path, read_json(path / "config.json"))
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field="vllm_tokenizer") from None

    async def read(self, digest: str) -> tuple[bytes, str]:
        """Returns the archive and its sha256 in hex.

        digest: of the tokenizer that is served. Raises Unavailable when the folder has another
        tokenizer, whose ids would have other meanings.
        """
        async with self._reading:
            if self._packed is None or self._packed[-1] != digest:
                self._packed = await asyncio.to_thread(_pack, self._folder)
            data, sha256, packed_digest = self._packed
            if packed_digest != digest:
                raise Unavailable("This router's copy of the tokenizer is not the one in use.")
            return data, sha256


def _pack(folder: Path) -> tuple[bytes, str, str]:
    """Packs the files; equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*FILES, *MORE_FILES):
            path = folder / name
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest(), tokenizer_digest(folder)
