"""Forwards requests to another Baton over `baton.v1.Inference`, and reads its answers.

A laptop's router so asks a cluster's for what its own small model is not sure of. An upstream that
cannot be reached costs CONNECT_S once; then its breaker is open and requests stay here at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from batonlm.core.errors import BatonError, Cancelled, Internal, InvalidArgument, Unavailable
from batonlm.core.request.attempt import ChoiceTokens, SequenceKey, TokenLog
from batonlm.core.request.request import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Grammar,
    Request,
    TextPrompt,
)
from batonlm.core.routing.cascade import Upstream
from batonlm.core.routing.failures import Breaker
from batonlm.router.request.shadow import names_tokens
from batonlm.rpc.address import split
from batonlm.rpc.channels import open_client_channel
from batonlm.rpc.convert import filled, message_to_proto, sampling_to_proto, tool_to_proto
from batonlm.rpc.errors import from_rpc_error
from batonlm.rpc.inference import event_from_proto, tool_choice_to_proto
from batonlm.rpc.peers import api_key_metadata, check_api_key
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import inference_pb2_grpc
from batonlm.v1.types_pb2 import StopParams

CONNECT_S = 1.0
Connectivity = grpc.ChannelConnectivity
BEGIN_S = 30.0
"""Within so many seconds an upstream has to begin its answer."""
KEY_S = 10.0
"""Files of a key and a CA are read again when they were read so long ago."""
MAX_UPSTREAMS = 64


def can_forward(request: Request) -> bool:
    """Whether another Baton can be asked all of this request: its API has no word for the rest, and
    ids of tokens mean something else to another model."""
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        plain = prompt == ChatPrompt(
            prompt.messages, tools=prompt.tools, tool_choice=prompt.tool_choice
        )
    else:
        plain = isinstance(prompt, TextPrompt) and prompt.add_special_tokens
    return (
        plain
        and not names_tokens(request)
        and not request.echo
        and request.prompt_logprobs is None
        and request.truncate_prompt_tokens is None
        and not request.cap_max_tokens
    )


def message_of(request: Request, model: str) -> pb.ChatRequest | pb.GenerateRequest:
    """Returns the message that asks another Baton's model the same. `can_forward` must hold."""
    grammar = request.grammar
    options = filled(
        pb.GenerationOptions,
        request,
        sampling=sampling_to_proto(request.sampling),
        stop=filled(StopParams, request),
        return_token_ids=True,
        keep_special_tokens=not request.skip_special_tokens,
        cache_salt=request.cache_salt.hex(),
        structured_output=None if grammar is None else _structured(grammar),
    )
    if request.seed is None:
        options.sampling.ClearField("seed")
    else:
        options.sampling.seed = request.seed
    match request.prompt:
        case ChatPrompt() as chat:
            return pb.ChatRequest(
                model=model,
                messages=[message_to_proto(message) for message in chat.messages],
                tools=[tool_to_proto(tool) for tool in chat.tools],
                tool_choice=tool_choice_to_proto(chat.tool_choice),
                options=options,
            )
        case TextPrompt(text=text):
            return pb.GenerateRequest(model=model, text=text, options=options)
    raise AssertionError("such a prompt is not forwarded")


def _structured(grammar: Grammar) -> pb.StructuredOutput:
    form = pb.StructuredOutput()
    setattr(form, grammar.kind.name.lower(), grammar.text)
    return form


class UpstreamStream:
    """The events of one forwarded request, as an `EventStream`. Its first two are read already."""

    def __init__(self, call: Any, request: Request) -> None:
        """call: has begun. The stream ends it."""
        self.tried_tokens = 0
        self.logs = [TokenLog(choice) for choice in range(request.n)]
        for log in self.logs:
            log.attempt = 0
        self.cached_tokens = 0
        self.on_over: Callable[[BaseException | None], None] = lambda error: None
        """Called once, when the request is over: with its failure, or None."""
        self.on_first_token: Callable[[], None] = lambda: None
        self._call = call
        self._shows_ids = request.return_token_ids
        self._early: deque[Event] = deque()
        self._failure: BatonError | None = None
        self._over = False
        self._began = False

    async def begin(self) -> Accepted:
        """Reads the first events: an upstream that accepts a request may yet not answer it. Raises
        BatonError."""
        accepted = await self._read()
        if not isinstance(accepted, Accepted):
            raise Internal("The upstream's answer cannot be read.")
        self._early += (accepted, await self._read())
        return accepted

    def __aiter__(self) -> UpstreamStream:
        return self

    async def __anext__(self) -> Event:
        """Raises BatonError."""
        if not self._early and self._over:
            raise StopAsyncIteration
        try:
            event = self._early.popleft() if self._early else await self._read()
        except BaseException as error:
            self._end(error)
            raise
        if isinstance(event, Delta) and not self._began:
            self._began = True
            self.on_first_token()
        if isinstance(event, Finished):
            self._end(None)
            return replace(event, tried_tokens=event.tried_tokens + self.tried_tokens)
        return event

    def call_off(self) -> None:
        """See `EventStream.call_off`."""
        self.fail(Cancelled("The request was cancelled."))

    def fail(self, error: BatonError) -> None:
        """Ends the request: its reader gets the error."""
        self._failure = self._failure or error
        self._call.cancel()

    async def aclose(self) -> None:
        self._early.clear()
        self._end(asyncio.CancelledError())

    def _end(self, error: BaseException | None) -> None:
        if not self._over:
            self._over = True
            self._call.cancel()
            self.on_over(error)

    async def _read(self) -> Event:
        """Raises BatonError."""
        while True:
            try:
                response = await self._call.read()
            except asyncio.CancelledError:
                if self._failure is None:
                    raise
                raise self._failure from None
            except grpc.aio.AioRpcError as failure:
                raise from_rpc_error(failure) from None
            if response is grpc.aio.EOF:
                raise self._failure or Unavailable("The upstream's answer broke off.")
            event = event_from_proto(response.event)
            if isinstance(event, Accepted) and not self._shows_ids:
                return replace(event, prompt_token_ids=())
            if isinstance(event, Finished):
                self.cached_tokens = event.cached_tokens
            if isinstance(event, Delta):
                self._log(event)
            if event is not None:
                return event

    def _log(self, delta: Delta) -> None:
        """Raises Internal for a choice that was not asked for."""
        if not 0 <= delta.choice < len(self.logs):
            raise Internal("The upstream's answer cannot be read.")
        log = self.logs[delta.choice]
        key = SequenceKey("", delta.choice, 0)
        ids = tuple(delta.token_ids)
        log.accept(ChoiceTokens(key, len(log), ids, finish_reason=delta.finish_reason))


@dataclass(slots=True)
class _Peer:
    """One upstream, as long as its CA stays the same."""

    ca: bytes
    channel: grpc.aio.Channel
    stub: Any
    num_users: int = 0
    """Requests that ask it now, and calls that run. Closing the channel would cancel them."""
    breaker: Breaker = field(default_factory=Breaker)
    key: str = ""
    key_read_at: float = float("-inf")

    def leave(self) -> None:
        self.num_users -= 1


class Upstreams:
    """The upstreams of one router. It must be closed."""

    def __init__(self) -> None:
        self._peers: OrderedDict[Upstream, _Peer] = OrderedDict()
        self._former: list[_Peer] = []
        """Those that get no more requests."""

    async def open(
        self, upstream: Upstream, model: str, request: Request, deadline: float
    ) -> tuple[Accepted, UpstreamStream]:
        """Asks a model of an upstream; returns once its answer has begun. `can_forward` must hold.
        deadline: on the running loop's clock. Raises BatonError: the request then holds nothing
        there."""
        loop = asyncio.get_running_loop()
        peer = await self._peer(upstream)
        if peer.breaker.refuses(loop.time()):
            raise Unavailable("The upstream does not answer.", retry_after_s=1.0)
        probes = peer.breaker.placed()
        peer.num_users += 1
        try:
            found = await self._ask(peer, model, request, deadline)
        except BatonError as error:
            if error.retryable:
                peer.breaker.failure(loop.time())
            raise
        else:
            peer.breaker.success(loop.time())
            return found
        finally:
            peer.leave()
            if probes:
                peer.breaker.left()

    async def close(self) -> None:
        for peer in (*self._peers.values(), *self._former):
            await peer.channel.close()

    async def _ask(
        self, peer: _Peer, model: str, request: Request, deadline: float
    ) -> tuple[Accepted, UpstreamStream]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(CONNECT_S, deadline - loop.time())):
                await _connected(peer.channel)
        except TimeoutError:
            raise _out_of_reach() from None
        message = message_of(request, model)
        method = peer.stub.Chat if isinstance(message, pb.ChatRequest) else peer.stub.Generate
        left_s = deadline - loop.time()
        call = method(message, timeout=left_s, metadata=api_key_metadata(peer.key))
        peer.num_users += 1
        call.add_done_callback(lambda _: peer.leave())
        stream = UpstreamStream(call, request)
        try:
            async with asyncio.timeout(min(BEGIN_S, left_s)):
                return await stream.begin(), stream
        except TimeoutError:
            call.cancel()
            raise Unavailable("The upstream does not answer.", retry_after_s=1.0) from None
        except BaseException:
            call.cancel()
            raise

    async def _peer(self, upstream: Upstream) -> _Peer:
        """Raises Unavailable where its files cannot be read, or its key would be sent in plain
        text."""
        now = asyncio.get_running_loop().time()
        peer = self._peers.get(upstream)
        if peer is not None and now - peer.key_read_at < KEY_S:
            self._peers.move_to_end(upstream)
            return peer
        try:
            key, ca = await asyncio.to_thread(_files, upstream)
            host, _ = split(upstream.address, "address")
            check_api_key(key, host, tls=bool(upstream.ca_file))
        except (OSError, UnicodeDecodeError, InvalidArgument):
            raise Unavailable("The upstream's key or CA cannot be used.") from None
        unused = [former for former in self._former if not former.num_users]
        self._former = [former for former in self._former if former.num_users]
        for former in unused:
            await former.channel.close()
        peer = self._peers.get(upstream)
        if peer is not None and peer.ca != ca:
            self._former.append(self._peers.pop(upstream))
            peer = None
        if peer is None:
            channel = open_client_channel(upstream.address, ca or None)
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            peer = self._peers[upstream] = _Peer(ca, channel, stub)
        peer.key, peer.key_read_at = key, now
        while len(self._peers) > MAX_UPSTREAMS:
            self._former.append(self._peers.popitem(last=False)[1])
        return peer


async def _connected(channel: grpc.aio.Channel) -> None:
    """Returns when the channel is connected. Raises Unavailable when an attempt to connect has
    failed; the channel goes on trying by itself."""
    while (state := channel.get_state(try_to_connect=True)) is not Connectivity.READY:
        if state is Connectivity.TRANSIENT_FAILURE:
            raise _out_of_reach()
        await channel.wait_for_state_change(state)


def _out_of_reach() -> Unavailable:
    return Unavailable("The upstream is out of reach.", retry_after_s=1.0)


def _files(upstream: Upstream) -> tuple[str, bytes]:
    """Returns the key and the CA. Raises OSError, UnicodeDecodeError."""
    key = Path(upstream.key_file).read_text().strip() if upstream.key_file else ""
    ca = Path(upstream.ca_file).read_bytes() if upstream.ca_file else b""
    return key, ca
