"""Scripted workers: real gRPC servers of every role over the made-up model of `language`.

They serve the protos on real sockets, record the requests they receive, and can be made to
misbehave. Only the KV is simulated: a hand-over is an entry in `ScriptedKv` that disappears with
its sender.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc

from batonlm.core.errors import BatonError, Cancelled, HandoverFailed, InvalidArgument, Unavailable
from batonlm.core.kvcache.cache_events import TIERS, CacheBatch, CacheLog, Change
from batonlm.core.kvcache.prefix import HASH_BYTES, prefix_hashes
from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.attempt import Attempt, AttemptKey, ChoiceTokens, Logprobs, SequenceKey
from batonlm.core.request.model import (
    AdapterDescription,
    KvLayout,
    ModelDescription,
    WorkerIdentity,
)
from batonlm.core.request.prompt_logprobs import packed
from batonlm.core.request.request import FinishReason
from batonlm.core.routing.load import (
    NO_ADAPTERS,
    UNMEASURED,
    AdapterList,
    WorkerDescription,
    WorkerLoad,
    WorkerState,
)
from batonlm.rpc.convert import (
    attempt_from_proto,
    choice_tokens_to_proto,
    error_to_proto,
    identity_to_proto,
    prompt_logprobs_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from batonlm.rpc.lifecycle import new_instance_id
from batonlm.rpc.server import ProcessServer, Service
from batonlm.rpc.tracing import context_of
from batonlm.rpc.worker import worker_service
from batonlm.testing import language
from batonlm.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)

HEARTBEAT_S = 0.2
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class ScriptedKv:
    """The pending hand-overs of KV, by hand-over id."""

    on_collected: dict[bytes, Callable[[], None]] = field(default_factory=dict)
    """Called when a receiver has the KV."""
    given: dict[bytes, asyncio.Future[list[ChoiceTokens]]] = field(default_factory=dict)

    def offer(self, handover_id: bytes) -> asyncio.Future[list[ChoiceTokens]]:
        """Returns the future of a hand-over. Sender and receiver may call this in any order."""
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
    """A cache log that loses changes: if `losing` is set, the next changes are skipped once."""

    losing = False

    def read(self, number: int | None) -> list[CacheBatch]:
        batches = super().read(number)
        if self.losing and batches and not batches[0].snapshot:
            self.losing = False
            return [CacheBatch(batches[-1].next_number)]
        return batches


class ScriptedWorker:
    """A scripted worker of one role."""

    role = ""
    layout: KvLayout | None = None

    def __init__(
        self, *, model: ModelDescription = language.MODEL, layout: KvLayout | None = None
    ) -> None:
        self.model = model
        self.layout = layout if layout is not None else type(self).layout
        self.state = WorkerState.SERVING
        self.waiting_tokens = 0
        self.num_blocks = self.free_blocks = 1000
        self.max_sequences = 0
        self.standby = False
        self.speed = UNMEASURED
        self.refusals: list[BatonError] = []
        """Errors with which the next pieces of work fail, in order."""
        self.adapters = NO_ADAPTERS
        """Its LoRA adapters; its tokens are the same with all of them."""
        self._changes: deque[Change] = deque()
        self.cache = LossyLog(self._changes)
        self._tier_changes: dict[str, deque[Change]] = {tier: deque() for tier in TIERS}
        self._tiers = {tier: CacheLog(changes) for tier, changes in self._tier_changes.items()}
        self.identity = WorkerIdentity(self.role, new_instance_id(), "")
        self._server: ProcessServer | None = None

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        server = ProcessServer(
            listen=listen,
            services=[
                self.service(),
                worker_service(
                    self.describe,
                    self.load,
                    self.cache,
                    adapters=lambda: self.adapters,
                    tiers=self._tiers,
                ),
            ],
            reflection=False,
        )
        address = await server.start()
        self._server = server
        self.identity = WorkerIdentity(self.role, self.identity.instance_id, address)
        return address

    async def kill(self) -> None:
        """Breaks all calls and closes the listening socket."""
        server, self._server = self._server, None
        self.die()
        if server is not None:
            await server.stop(0)

    def die(self) -> None:
        """Drops the state that this role loses when it is killed."""

    def service(self) -> Service:
        raise NotImplementedError

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            self.identity,
            self.model,
            self.layout,
            num_blocks=self.num_blocks,
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

    def change_adapters(self, *adapters: AdapterDescription) -> None:
        """They are all that it has from now on."""
        now = self.adapters
        self.adapters = AdapterList(now.version + 1, adapters, now.loads_on_use)

    def hold(self, token_ids: Sequence[int], adapter: str = "", tier: str = "") -> None:
        """Adds the prefix hashes of a prompt to its cache, or to a tier. adapter: the digest of the
        one that computed it."""
        changes = self._tier_changes[tier] if tier else self._changes
        joined = prefix_hashes(token_ids, b"", self.model.tokenizer_digest, adapter)
        for start in range(0, len(joined), HASH_BYTES):
            changes.append((joined[start : start + HASH_BYTES], True))

    def refuse(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)


class ScriptedTokenizer(ScriptedWorker, tokenizer_pb2_grpc.TokenizerServicer):
    """A tokenizer that encodes one byte as one token."""

    role = "tokenizer"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.remaining_s: list[float | None] = []
        """The remaining deadline of each call."""
        self.traces: list[TraceContext] = []
        """The trace context of each call."""
        self.chats: list[tokenizer_pb2.Chat] = []
        self.grammars: list[types_pb2.Grammar] = []
        self.begun: list[bytes] = []
        """The bytes of each input, in order of arrival."""
        self.working = asyncio.Event()
        """While cleared, inputs of at least `slow_bytes` wait."""
        self.working.set()
        self.slow_bytes = 0
        self.num_slow = self.most_at_once = 0
        """most_at_once: the largest number of inputs that waited at the same time."""

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
        hashes = prefix_hashes(ids, entry.cache_salt, self.model.tokenizer_digest, entry.adapter)
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
    """Returns the next token of a choice. output: its tokens since the attempt began."""
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
    """Returns log-probabilities of the prompt's tokens, if the attempt requests them. Token 97 is
    always the most likely one."""
    num_top = attempt.prompt_logprobs
    if num_top is None:
        return None
    own = [language.logprob(token) for token in attempt.token_ids[1:]]
    top_ids = [97 + i for i in range(num_top)] * len(own)
    top = [language.logprob(token) for token in top_ids]
    return prompt_logprobs_to_proto(packed(num_top, own, top_ids, top))


class ScriptedPrefill(ScriptedWorker, prefill_pb2_grpc.PrefillServicer):
    """A scripted prefill worker."""

    role = "prefill"
    layout = language.LAYOUT

    def __init__(self, network: ScriptedKv, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = network
        self.answering = asyncio.Event()
        """While cleared, responses wait although KV is sent."""
        self.answering.set()
        self.computing = asyncio.Event()
        """While cleared, both responses and KV wait."""
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
        """Releases the KV of an attempt that a receiver has collected."""
        self.held.pop(attempt.key, None)

    def _release(self, key: AttemptKey) -> None:
        handover_id = self.held.pop(key, None)
        if handover_id is not None:
            self.network.withdraw(handover_id)


@dataclass
class _Running:
    """One attempt at the scripted decode worker."""

    router: str
    """The instance id of whoever started it."""
    attempt: Attempt
    handover_id: bytes
    max_unconfirmed: int
    choices: set[int]
    outputs: dict[int, list[ChoiceTokens]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    confirmed: dict[int, int] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    ready: bool = False
    reported: bool = False
    prefix: types_pb2.PrefixCollected | None = None


Tamper = Callable[[list[ChoiceTokens]], Iterable[ChoiceTokens]]


class ScriptedDecode(ScriptedWorker, decode_pb2_grpc.DecodeServicer):
    """A scripted decode worker."""

    role = "decode"
    layout = language.LAYOUT

    def __init__(self, network: ScriptedKv, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = network
        self.keeping = False
        """If set, it hands no sequence over to another worker."""
        self.wishes: list[decode_pb2.HandOverSequence] = []
        self.giving: dict[SequenceKey, bytes] = {}
        self.running: dict[AttemptKey, _Running] = {}
        self.starts: list[Attempt] = []
        self.prefix_senders: list[str] = []
        """For each of them, the instance id of the worker whose prefix it is to collect, or ""."""
        self.prefix_outcome = "completed"
        """Empty: it answers none, like a version that collects no prefixes."""
        self.taken_back: list[Attempt] = []
        """Those of them that go on with KV that no other worker collected."""
        self.cancels: list[tuple[AttemptKey, tuple[int, ...]]] = []
        self.furthest_ahead = 0
        self.stepping = asyncio.Event()
        """While cleared, no step runs."""
        self.stepping.set()
        self.collecting = asyncio.Event()
        """While cleared, no KV is received."""
        self.collecting.set()
        self.silent = False
        """If set, nothing is sent, not even heartbeats."""
        self.scoring = True
        """If cleared, log-probabilities of prompts are never sent."""
        self.tamper: Tamper = lambda tokens: tokens
        """Changes a frame's tokens before they are sent."""
        self.step_s = 0.001
        self.last_position: int | None = None
        """If set, steps generate no token of an output beyond this position."""
        self.break_stream = asyncio.Event()
        self.hellos: list[decode_pb2.SessionHello] = []
        self._frames: defaultdict[str, decode_pb2.StepFrame] = defaultdict(decode_pb2.StepFrame)
        """The next frame to each router, without its tokens."""
        self._tasks: set[asyncio.Task[None]] = set()

    def service(self) -> Service:
        return Service(
            "baton.v1.Decode",
            lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(self, server),
        )

    def holds(self) -> list[SequenceKey]:
        """Returns the sequences that have not ended: a real worker would hold blocks for them."""
        return [
            SequenceKey(key.request_id, choice, key.attempt)
            for key, running in self.running.items()
            for choice in running.choices
            if not running.outputs[choice] or running.outputs[choice][-1].finish_reason is None
        ]

    def die(self) -> None:
        for task in self._tasks:
            task.cancel()
        for handover_id in self.giving.values():
            self.network.withdraw(handover_id)
        self.giving.clear()
        self.running.clear()

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        hello = (await anext(request_iterator)).hello
        if hello.decode_instance_id != self.identity.instance_id:
            raise Unavailable("another instance id lives here")
        self.hellos.append(hello)
        self.break_stream.clear()
        router = hello.router.instance_id
        yield decode_pb2.SessionResponse(welcome=self._resume(hello))
        reader = asyncio.create_task(self._read(request_iterator, router))
        clock = asyncio.get_running_loop().time
        silent_since = clock()
        try:
            while not reader.done():
                await self._until_step()
                if self.break_stream.is_set():
                    raise Unavailable("the stream is broken on purpose")
                frame = self._step(router)
                now = clock()
                if self.silent:
                    continue
                if frame.tokens or frame.failures or frame.started or frame.handed_over:
                    silent_since = now
                    yield decode_pb2.SessionResponse(frame=frame)
                elif now - silent_since > HEARTBEAT_S:
                    silent_since = now
                    yield decode_pb2.SessionResponse(heartbeat=decode_pb2.Heartbeat())
        finally:
            reader.cancel()

    async def _until_step(self) -> None:
        """Waits until the next step is due."""
        await asyncio.sleep(self.step_s)

    def _resume(self, hello: decode_pb2.SessionHello) -> decode_pb2.SessionWelcome:
        lost, kept = [], defaultdict(set)
        for entry in hello.resume:
            key = AttemptKey(entry.request_id, entry.attempt)
            running = self.running.get(key)
            if running is None or entry.choice not in running.attempt.choices:
                lost.append(entry)
            else:
                kept[key].add(entry.choice)
                running.sent[entry.choice] = entry.position - running.attempt.position
        for key, running in list(self.running.items()):
            if key not in kept and running.router == hello.router.instance_id:
                del self.running[key]
        return decode_pb2.SessionWelcome(decode=identity_to_proto(self.identity), lost=lost)

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest], router: str) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "start":
                    self.begin(request.start, router)
                case "cancel":
                    key = AttemptKey(request.cancel.request_id, request.cancel.attempt)
                    self.cancels.append((key, tuple(request.cancel.choices)))
                    self._cancel(key, tuple(request.cancel.choices))
                case "hand_over":
                    self._hand_over(request.hand_over, router)
                case "confirm":
                    for entry in request.confirm.sequences:
                        running = self.running.get(AttemptKey(entry.request_id, entry.attempt))
                        if running is not None:
                            running.confirmed[entry.choice] = entry.position

    def begin(self, start: decode_pb2.StartSequence, router: str) -> None:
        attempt = attempt_from_proto(start.attempt)
        self.starts.append(attempt)
        self.prefix_senders.append(start.prefix_sender.instance_id)
        try:
            self.refuse()
        except BatonError as error:
            self._fail(attempt.key, error, router)
            return
        if start.held_handover_id:
            self._take_back(attempt, start, router)
            return
        running = self.running[attempt.key] = _Running(
            router, attempt, start.source.handover_id, start.max_unconfirmed, set(attempt.choices)
        )
        if start.HasField("prefix_sender") and self.prefix_outcome:
            running.prefix = types_pb2.PrefixCollected(num_tokens=64, outcome=self.prefix_outcome)
        if running.handover_id:
            task = asyncio.create_task(self._collect(running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            running.ready = True

    def _hand_over(self, wish: decode_pb2.HandOverSequence, router: str) -> None:
        self.wishes.append(wish)
        key = SequenceKey(wish.request_id, wish.choice, wish.attempt)
        answer = self._frames[router].handed_over.add(
            request_id=key.request_id,
            attempt=key.attempt,
            choice=key.choice,
            handover_id=wish.handover_id,
        )
        running = self.running.get(AttemptKey(key.request_id, key.attempt))
        if running is None or key.choice not in running.choices or self.keeping:
            return
        made = running.outputs[key.choice]
        if not made or made[-1].finish_reason is not None:
            return
        answer.position = running.attempt.position + len(made)
        running.leaving.add(key.choice)
        self.giving[key] = wish.handover_id
        self.network.offer(wish.handover_id).set_result([made[-1]])
        self.network.on_collected[wish.handover_id] = lambda: self._gone(key)

    def _take_back(self, attempt: Attempt, start: decode_pb2.StartSequence, router: str) -> None:
        """Goes on with a sequence that no other worker has collected."""
        held_id = start.held_handover_id
        key = next((key for key, given in self.giving.items() if given == held_id), None)
        if key is None:
            self._fail(attempt.key, HandoverFailed("it is not here any more"), router)
            return
        made = self.running[AttemptKey(key.request_id, key.attempt)].outputs[key.choice]
        self.network.on_collected.pop(held_id, None)
        self._gone(key)
        running = self.running[attempt.key] = _Running(
            router, attempt, b"", start.max_unconfirmed, set(attempt.choices), ready=True
        )
        renamed = key._replace(attempt=attempt.attempt)
        running.outputs[key.choice].append(made[-1]._replace(key=renamed))
        self.taken_back.append(attempt)

    def _gone(self, key: SequenceKey) -> None:
        """Ends a sequence that another worker has taken over."""
        self._cancel(AttemptKey(key.request_id, key.attempt), (key.choice,))

    def _cancel(self, key: AttemptKey, choices: tuple[int, ...]) -> None:
        running = self.running.get(key)
        if running is not None:
            for choice in choices or running.choices:
                given = SequenceKey(key.request_id, choice, key.attempt)
                if (handover_id := self.giving.pop(given, None)) is not None:
                    self.network.withdraw(handover_id)
            running.choices -= set(choices or running.choices)
            if not running.choices:
                del self.running[key]

    def _fail(self, key: AttemptKey, error: BatonError, router: str) -> None:
        self.running.pop(key, None)
        self._frames[router].failures.add(
            request_id=key.request_id, attempt=key.attempt, error=error_to_proto(error)
        )

    async def _collect(self, running: _Running) -> None:
        await self.collecting.wait()
        try:
            first = await asyncio.shield(self.network.offer(running.handover_id))
        except BatonError as error:
            if running.attempt.key in self.running:
                self._fail(running.attempt.key, error, running.router)
            return
        self.network.collected(running.handover_id)
        for entry in first:
            if entry.key.choice in running.choices:
                # A decode worker hands sequences over under its own number of the attempt.
                key = entry.key._replace(attempt=running.attempt.attempt)
                running.outputs[key.choice].append(entry._replace(key=key))
        running.ready = True

    def _step(self, router: str) -> decode_pb2.StepFrame:
        frame = self._frames.pop(router, None) or decode_pb2.StepFrame()
        tokens: list[ChoiceTokens] = []
        for key, running in list(self.running.items()):
            if not running.ready or running.router != router:
                continue
            if not running.reported:
                running.reported = True
                frame.started.add(
                    request_id=key.request_id,
                    attempt=key.attempt,
                    cached_tokens=2,
                    received_bytes=1000 if running.handover_id else 0,
                    prompt_logprobs=scores(running.attempt) if self.scoring else None,
                    prefix=running.prefix,
                )
            for choice in sorted(running.choices):
                if self.stepping.is_set() and choice not in running.leaving:
                    self._advance(running, choice)
                fresh = running.outputs[choice][running.sent[choice] :]
                running.sent[choice] = len(running.outputs[choice])
                tokens += fresh
        frame.tokens.extend(choice_tokens_to_proto(entry) for entry in self.tamper(tokens))
        return frame

    def _advance(self, running: _Running, choice: int) -> None:
        made = running.outputs[choice]
        if made and made[-1].finish_reason is not None:
            return
        position = running.attempt.position + len(made)
        ahead = position - running.confirmed.get(choice, running.attempt.position)
        if running.max_unconfirmed and ahead >= running.max_unconfirmed:
            return
        if self.last_position is not None and position > self.last_position:
            return
        self.furthest_ahead = max(self.furthest_ahead, ahead + 1)
        output = [entry.token_ids[0] for entry in made]
        made.append(sample(running.attempt, choice, output))


@dataclass
class _Text:
    """One text at the scripted detokenizer, and how much of it was sent."""

    opening: detokenizer_pb2.OpenText
    token_ids: list[int] = field(default_factory=list)
    sent: int = 0
    spelled: list[bytes] = field(default_factory=list)
    last: bool = False


class ScriptedDetokenizer(ScriptedWorker, detokenizer_pb2_grpc.DetokenizerServicer):
    """A scripted detokenizer."""

    role = "detokenizer"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.talking = asyncio.Event()
        """While cleared, tokens are received but no text is sent."""
        self.talking.set()
        self.texts: dict[tuple[int, int], _Text] = {}
        """By session, as counted here, and the router's number."""
        self._sessions = count()
        self.openings: list[detokenizer_pb2.OpenText] = []
        self.fail_next: list[BatonError] = []

    def service(self) -> Service:
        return Service(
            "baton.v1.Detokenizer",
            lambda server: detokenizer_pb2_grpc.add_DetokenizerServicer_to_server(self, server),
        )

    async def Session(
        self,
        request_iterator: AsyncIterator[detokenizer_pb2.DetokenizerSessionRequest],
        context: Context,
    ) -> AsyncIterator[detokenizer_pb2.DetokenizerSessionResponse]:
        session = next(self._sessions)
        dirty: dict[int, None] = {}
        woken = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, session, dirty, woken))
        reader.add_done_callback(lambda _: woken.set())
        yield detokenizer_pb2.DetokenizerSessionResponse(heartbeat=True)
        try:
            while not reader.done():
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await woken.wait()
                        await self.talking.wait()
                        woken.clear()
                if not (dirty and self.talking.is_set()):
                    yield detokenizer_pb2.DetokenizerSessionResponse(heartbeat=True)
                    continue
                taken = [text_id for text_id in dirty if (session, text_id) in self.texts]
                dirty.clear()
                await self._serve([(session, text_id) for text_id in taken])
                yield detokenizer_pb2.DetokenizerSessionResponse(
                    deltas=[
                        self._delta(session, text_id)
                        for text_id in taken
                        if (session, text_id) in self.texts
                    ]
                )
            reader.result()
        finally:
            reader.cancel()
            for key in [key for key in self.texts if key[0] == session]:
                del self.texts[key]

    async def _serve(self, keys: Sequence[tuple[int, int]]) -> None:
        """Waits as long as new tokens of these texts take."""

    async def _read(
        self,
        requests: AsyncIterator[detokenizer_pb2.DetokenizerSessionRequest],
        session: int,
        dirty: dict[int, None],
        woken: asyncio.Event,
    ) -> None:
        async for request in requests:
            woken.set()
            for operation in request.operations:
                text_id = operation.text_id
                key = session, text_id
                match operation.WhichOneof("operation"):
                    case "open":
                        self.openings.append(operation.open)
                        ids = token_ids_from_bytes(operation.open.token_ids, "open.token_ids")
                        self.texts[key] = _Text(operation.open, list(ids))
                        dirty[text_id] = None
                    case "append" if key in self.texts:
                        self._append(self.texts[key], operation.append)
                        dirty[text_id] = None
                    case "close":
                        self.texts.pop(key, None)

    def _append(self, text: _Text, append: detokenizer_pb2.AppendTokens) -> None:
        if append.position != len(text.token_ids):
            raise Cancelled("tokens do not follow those so far")
        ids = token_ids_from_bytes(append.token_ids, "append.token_ids")
        text.token_ids += ids
        text.last = append.last
        for token in token_ids_from_bytes(append.spell_token_ids, "append.spell_token_ids"):
            text.spelled.append(bytes([token]) if token < 256 else b"<end>")

    def _delta(self, session: int, text_id: int) -> detokenizer_pb2.TextDelta:
        key = session, text_id
        if self.fail_next:
            del self.texts[key]
            error = error_to_proto(self.fail_next.pop(0))
            return detokenizer_pb2.TextDelta(text_id=text_id, error=error)
        text = self.texts[key]
        spelled, text.spelled = text.spelled, []
        whole = language.text_of(text.token_ids)
        delta = detokenizer_pb2.TextDelta(text_id=text_id, spelled_texts=spelled)
        end = len(whole)
        found = _first_stop(whole, text.opening.stop_strings)
        if found is not None:
            stop, start = found
            delta.stop.stop_string = stop
            delta.stop.position = start + len(stop) - 1
            end = start + len(stop) if text.opening.include_stop_string else start
        elif not text.last:
            end -= _held_back(whole, text.opening.stop_strings)
        delta.end = text.last or found is not None
        start = max(text.sent, text.opening.delivered_bytes)
        delta.text = whole[start:end]
        text.sent = max(start, end)
        delta.num_tokens = len(text.token_ids) if delta.end else min(end, len(text.token_ids))
        delta.searched_tokens = len(text.token_ids)
        if delta.end:
            del self.texts[key]
        return delta


def _first_stop(text: str, stops: Iterable[str]) -> tuple[str, int] | None:
    """Returns the stop string that is complete first, and its position."""
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, stop = min(found)
    return stop, end - len(stop)


def _held_back(text: str, stops: Iterable[str]) -> int:
    """Returns the length of the longest end of the text that may begin a stop string."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )
