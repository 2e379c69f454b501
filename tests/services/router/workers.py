"""Scripted workers: real gRPC servers over the made-up model. Here: what all share, and two roles.

They speak the protos on real sockets, keep what they are told, and can be told to misbehave.
Only the KV is not real: a hand-over is an entry in `KvNetwork`, gone with its sender.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.core.errors import BatonError, HandoverFailed, InvalidArgument, Unavailable
from baton.core.kvcache.cache_events import CacheBatch, CacheLog, Change
from baton.core.kvcache.prefix import HASH_BYTES, prefix_hashes
from baton.core.observe.stages import TraceContext
from baton.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, Logprobs, SequenceKey
from baton.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from baton.core.request.prompt_logprobs import packed
from baton.core.request.request import FinishReason
from baton.core.routing.load import UNMEASURED, WorkerDescription, WorkerLoad, WorkerState
from baton.rpc.convert import (
    attempt_from_proto,
    choice_tokens_to_proto,
    error_to_proto,
    identity_to_proto,
    prompt_logprobs_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from baton.rpc.lifecycle import new_instance_id
from baton.rpc.server import ProcessServer, Service
from baton.rpc.tracing import context_of
from baton.rpc.worker import worker_service
from baton.v1 import (
    prefill_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)
from tests.services.router import language

HEARTBEAT_S = 0.2
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class KvNetwork:
    """KV on offer, by hand-over id. on_collected: called when somebody has it."""

    on_collected: dict[bytes, Callable[[], None]] = field(default_factory=dict)
    given: dict[bytes, asyncio.Future[list[ChoiceTokens]]] = field(default_factory=dict)

    def offer(self, handover_id: bytes) -> asyncio.Future[list[ChoiceTokens]]:
        """Either side may come first."""
        if handover_id not in self.given:
            self.given[handover_id] = asyncio.get_running_loop().create_future()
        return self.given[handover_id]

    def collected(self, handover_id: bytes) -> None:
        self.on_collected.pop(handover_id, lambda: None)()

    def withdraw(self, handover_id: bytes) -> None:
        offer = self.offer(handover_id)
        if not offer.done():
            offer.set_exception(HandoverFailed("the sender is gone"))
        elif not offer.cancelled() and offer.exception() is None:
            self.given[handover_id] = asyncio.get_running_loop().create_future()
            self.given[handover_id].set_exception(HandoverFailed("the sender is gone"))
        self.given[handover_id].exception()


class LossyLog(CacheLog):
    """`losing`: set, the next changes that a watcher reads do not reach it."""

    losing = False

    def read(self, number: int | None) -> list[CacheBatch]:
        batches = super().read(number)
        if self.losing and batches and not batches[0].snapshot:
            self.losing = False
            return [CacheBatch(batches[-1].next_number)]
        return batches


class FakeWorker:
    """One worker of a role. `refusals`: errors that the next pieces of work meet, in order."""

    role = ""
    layout: KvLayout | None = None

    def __init__(
        self, *, model: ModelDescription = language.MODEL, layout: KvLayout | None = None
    ) -> None:
        self.model = model
        self.layout = layout if layout is not None else type(self).layout
        self.state = WorkerState.SERVING
        self.waiting_tokens = 0
        self.free_blocks = 1000
        self.max_sequences = 0
        self.standby = False
        self.speed = UNMEASURED
        self.refusals: list[BatonError] = []
        self._changes: deque[Change] = deque()
        self.cache = LossyLog(self._changes)
        self.identity = WorkerIdentity(self.role, new_instance_id(), "")
        self._server: ProcessServer | None = None

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        server = ProcessServer(
            listen=listen,
            services=[self.service(), worker_service(self.describe, self.load, self.cache)],
            reflection=False,
        )
        address = await server.start()
        self._server = server
        self.identity = WorkerIdentity(self.role, self.identity.instance_id, address)
        return address

    async def kill(self) -> None:
        """All calls break, and nobody listens any more."""
        server, self._server = self._server, None
        self.die()
        if server is not None:
            await server.stop(0)

    def die(self) -> None:
        """What a role loses when it is killed."""

    def service(self) -> Service:
        raise NotImplementedError

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            self.identity,
            self.model,
            self.layout,
            num_blocks=1000,
            block_size=16,
            max_sequences=self.max_sequences,
            standby=self.standby,
        )

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            self.state,
            waiting_tokens=self.waiting_tokens,
            free_blocks=self.free_blocks,
            speed=self.speed,
        )

    def hold(self, token_ids: Sequence[int]) -> None:
        """Its cache has the units of a prompt that it did not have."""
        joined = prefix_hashes(token_ids, b"", self.model.tokenizer_digest)
        for start in range(0, len(joined), HASH_BYTES):
            self._changes.append((joined[start : start + HASH_BYTES], True))

    def refuse(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)


class FakeTokenizer(FakeWorker, tokenizer_pb2_grpc.TokenizerServicer):
    """One token a byte. remaining_s: what each call was told it has, traces: what it was part of.
    chats, grammars: that came. begun: the bytes of each input, in the order in which they came.
    `working`: cleared, inputs of at least `slow_bytes` wait. most_at_once: that waited so."""

    role = "tokenizer"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.remaining_s: list[float | None] = []
        self.traces: list[TraceContext] = []
        self.chats: list[tokenizer_pb2.Chat] = []
        self.grammars: list[types_pb2.Grammar] = []
        self.begun: list[bytes] = []
        self.working = asyncio.Event()
        self.working.set()
        self.slow_bytes = 0
        self.num_slow = self.most_at_once = 0

    def service(self) -> Service:
        return Service(
            "baton.v1.Tokenizer",
            lambda server: tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, server),
        )

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        self.remaining_s.append(context.time_remaining())
        self.traces.append(context_of(context.invocation_metadata() or ()))
        self.refuse()
        for entry in request.inputs:
            await self._work(entry.text.encode() or entry.token_ids)
        return tokenizer_pb2.EncodeResponse(outputs=[self._encode(i) for i in request.inputs])

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        self.remaining_s.append(context.time_remaining())
        self.traces.append(context_of(context.invocation_metadata() or ()))
        self.refuse()
        for entry in request.inputs:
            await self._work(entry.token_ids)
        return tokenizer_pb2.DecodeResponse(outputs=[self._decode(i) for i in request.inputs])

    async def Describe(
        self, request: tokenizer_pb2.DescribeRequest, context: Context
    ) -> tokenizer_pb2.DescribeResponse:
        return tokenizer_pb2.DescribeResponse(
            identity=identity_to_proto(self.identity), model=self.model.name
        )

    async def _work(self, data: bytes) -> None:
        self.begun.append(data)
        if len(data) < self.slow_bytes or self.working.is_set():
            return
        self.num_slow += 1
        self.most_at_once = max(self.most_at_once, self.num_slow)
        try:
            await self.working.wait()
        finally:
            self.num_slow -= 1

    def _encode(self, entry: tokenizer_pb2.EncodeInput) -> tokenizer_pb2.EncodeOutput:
        self.grammars.append(entry.grammar)
        match entry.WhichOneof("input"):
            case "text":
                ids = tuple(entry.text.encode())
            case "chat":
                self.chats.append(entry.chat)
                ids = tuple(
                    "".join(f"{m.role}:{m.content}\n" for m in entry.chat.messages).encode()
                )
            case _:
                ids = token_ids_from_bytes(entry.token_ids, "token_ids")
        if any(token >= language.VOCAB for token in ids):
            error = InvalidArgument("a token id is too large", field="prompt")
            return tokenizer_pb2.EncodeOutput(error=error_to_proto(error))
        hashes = prefix_hashes(ids, entry.cache_salt, self.model.tokenizer_digest)
        return tokenizer_pb2.EncodeOutput(
            token_ids=token_ids_to_bytes(ids),
            prefix_hashes=hashes,
            token_strings=map(chr, ids) if entry.with_token_strings else (),
        )

    def _decode(self, entry: tokenizer_pb2.DecodeInput) -> tokenizer_pb2.DecodeOutput:
        ids = token_ids_from_bytes(entry.token_ids, "tokens")
        if any(token >= language.VOCAB for token in ids):
            error = InvalidArgument("a token id is too large", field="tokens")
            return tokenizer_pb2.DecodeOutput(error=error_to_proto(error))
        special = {language.EOS} if entry.skip_special_tokens else set()
        text = bytes(token for token in ids if token < 256 and token not in special)
        return tokenizer_pb2.DecodeOutput(text=text.decode(errors="replace"))


def sample(attempt: Attempt, choice: int, output: list[int]) -> ChoiceTokens:
    """The next token of a choice whose output since the attempt began is given."""
    so_far = [*attempt.token_ids, *output]
    position = attempt.position + len(output)
    may_end = not attempt.stop.ignore_eos and position >= attempt.stop.min_tokens
    token = language.next_token(so_far, attempt.sampling.seed, choice, may_end=may_end)
    ends = token == language.EOS or token in attempt.stop.stop_token_ids
    reason = FinishReason.STOP if ends else None
    if not ends and position + 1 >= attempt.stop.max_tokens:
        reason = FinishReason.LENGTH
    logprobs: tuple[Logprobs, ...] = ()
    if attempt.sampling.top_logprobs is not None:
        top = ((token, language.logprob(token)), (97, language.logprob(97)))
        logprobs = (Logprobs(language.logprob(token), top[: attempt.sampling.top_logprobs]),)
    return ChoiceTokens(
        SequenceKey(attempt.request_id, choice, attempt.attempt),
        position,
        (token,),
        logprobs,
        reason,
        token if ends else None,
    )


def scores(attempt: Attempt) -> types_pb2.PromptLogprobs | None:
    """Of the prompt's tokens, if the attempt asks for them; 97 is always the most likely one."""
    num_top = attempt.prompt_logprobs
    if num_top is None:
        return None
    own = [language.logprob(token) for token in attempt.token_ids[1:]]
    top_ids = [97 + i for i in range(num_top)] * len(own)
    top = [language.logprob(token) for token in top_ids]
    return prompt_logprobs_to_proto(packed(num_top, own, top_ids, top))


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """`answering`: cleared, answers wait while KV goes out; `computing`: cleared, all waits."""

    role = "prefill"
    layout = language.LAYOUT

    def __init__(self, network: KvNetwork, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = network
        self.answering = asyncio.Event()
        self.answering.set()
        self.computing = asyncio.Event()
        self.computing.set()
        self.runs: list[Attempt] = []
        self.cancelled: list[AttemptKey] = []
        self.held: dict[AttemptKey, bytes] = {}
        self.running = 0

    def service(self) -> Service:
        return Service(
            "baton.v1.Prefill",
            lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(self, server),
        )

    def die(self) -> None:
        for handover_id in self.held.values():
            self.network.withdraw(handover_id)
        self.held.clear()

    async def Run(
        self, request: prefill_pb2.RunRequest, context: Context
    ) -> prefill_pb2.RunResponse:
        if request.prefill_instance_id != self.identity.instance_id:
            raise Unavailable("another instance id lives here")
        attempt = attempt_from_proto(request.attempt)
        self.runs.append(attempt)
        self.running += 1
        try:
            self.refuse()
            if request.handover_id:
                self.held[attempt.key] = request.handover_id
                self.network.on_collected[request.handover_id] = lambda: self._collected(attempt)
            await self.computing.wait()
            tokens = [sample(attempt, choice, []) for choice in attempt.choices]
            if request.handover_id and attempt.key in self.held:
                offer = self.network.offer(request.handover_id)
                if not offer.done():
                    offer.set_result(tokens)
            await self.answering.wait()
        except BaseException:
            self._release(attempt.key)
            raise
        finally:
            self.running -= 1
        return prefill_pb2.RunResponse(
            choices=[choice_tokens_to_proto(entry) for entry in tokens],
            cached_tokens=1,
            prompt_logprobs=scores(attempt),
        )

    async def Cancel(
        self, request: prefill_pb2.CancelRequest, context: Context
    ) -> prefill_pb2.CancelResponse:
        key = AttemptKey(request.request_id, request.attempt)
        self.cancelled.append(key)
        self._release(key)
        return prefill_pb2.CancelResponse()

    def _collected(self, attempt: Attempt) -> None:
        """The KV is gone from here."""
        self.held.pop(attempt.key, None)

    def _release(self, key: AttemptKey) -> None:
        handover_id = self.held.pop(key, None)
        if handover_id is not None:
            self.network.withdraw(handover_id)
