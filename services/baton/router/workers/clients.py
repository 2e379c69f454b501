"""Unary calls to prefill workers and tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from baton.core.errors import BatonError, Internal, WorkerLost
from baton.core.kvcache.prefix import HASH_BYTES
from baton.core.observe.stages import UNTRACED, TraceContext
from baton.core.request.attempt import Attempt, AttemptKey
from baton.core.request.model import AnswerFormat, WorkerIdentity
from baton.core.request.request import ChatPrompt, Grammar, Prompt, TextPrompt, TokenPrompt
from baton.rpc.calls import cancelled_here
from baton.rpc.convert import (
    attempt_to_proto,
    chat_to_proto,
    error_from_proto,
    grammar_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from baton.rpc.errors import REQUEST_ID_KEY, from_rpc_error
from baton.rpc.tracing import metadata_of
from baton.v1.prefill_pb2 import CancelRequest, RunRequest, RunResponse
from baton.v1.prefill_pb2_grpc import PrefillStub
from baton.v1.tokenizer_pb2 import (
    DecodeInput,
    DecodeRequest,
    EncodeInput,
    EncodeRequest,
)
from baton.v1.tokenizer_pb2_grpc import TokenizerStub

# Calls to one worker that has no stream of its own to tell when it is gone.
#
# A call ends when its answer comes, when its caller is cancelled, or when the worker is given up by
# whoever watches it.


class UnaryClient:
    """The pool runs `run` while the worker's instance id lives and cancels it afterwards."""

    ready = True

    def __init__(self) -> None:
        self._running: set[Any] = set()

    async def run(self) -> None:
        """Returns never; on the way out all running calls end with WorkerLost."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for call in list(self._running):
                call.cancel()

    async def call(
        self,
        method: Callable[..., Any],
        request: Any,
        *,
        request_id: str,
        timeout_s: float | None,
        trace: TraceContext = UNTRACED,
    ) -> Any:
        """The answer, or a BatonError. The worker's log names the request and its trace."""
        metadata = ((REQUEST_ID_KEY, request_id), *metadata_of(trace))
        call = method(request, timeout=timeout_s, metadata=metadata)
        self._running.add(call)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if cancelled_here():
                raise
            raise WorkerLost("A worker of this request was lost.") from None
        finally:
            self._running.discard(call)
            call.cancel()


# Speaks to one prefill worker.


CANCEL_TIMEOUT_S = 2.0


class PrefillClient(UnaryClient):
    """`baton.v1.Prefill` of one instance id."""

    def __init__(
        self, channel: grpc.aio.Channel, worker: WorkerIdentity, router: WorkerIdentity
    ) -> None:
        super().__init__()
        self._router = router
        self._stub = PrefillStub(channel)
        self._worker = worker

    async def prefill(
        self, attempt: Attempt, *, handover_id: bytes, decode_instance_id: str
    ) -> RunResponse:
        """Raises BatonError. Without a handover_id nothing is handed over."""
        answer: RunResponse = await self.call(
            self._stub.Run,
            RunRequest(
                attempt=attempt_to_proto(attempt),
                handover_id=handover_id,
                decode_instance_id=decode_instance_id,
                prefill_instance_id=self._worker.instance_id,
                router_instance_id=self._router.instance_id,
            ),
            request_id=attempt.request_id,
            timeout_s=attempt.remaining_s,
            trace=TraceContext(attempt.traceparent),
        )
        return answer

    async def cancel(self, key: AttemptKey) -> None:
        """Frees what the worker holds for an attempt. A worker that cannot be told is gone, and its
        blocks with it; one that only missed the message frees them by the attempt's deadline.
        """
        request = CancelRequest(request_id=key.request_id, attempt=key.attempt)
        try:
            await self.call(
                self._stub.Cancel,
                request,
                request_id=key.request_id,
                timeout_s=CANCEL_TIMEOUT_S,
            )
        except BatonError:
            return


# Speaks to one tokenizer.


CALL_TIMEOUT_S = 30.0
"""Above what the largest prompt takes."""

TOKEN_ID_BYTES = 4
"""On the wire."""

AT_ONCE_BYTES = 1 << 16
"""Of packed ids that are unpacked without a pause: half a millisecond's."""

_UNTOLD = AnswerFormat()


class EncodedPrompt(NamedTuple):
    """A prompt's token ids, the hashes of its units as `core.prefix` has them, and, when asked for,
    each token's name in the vocabulary.

    reasoning_open: it is a chat's and ends within reasoning. answer_format: of the model.
    too_many: how many tokens there are, where they were too many to be looked at; else 0.
    """

    token_ids: tuple[int, ...]
    prefix_hashes: bytes
    token_strings: tuple[str, ...] = ()
    reasoning_open: bool = False
    answer_format: AnswerFormat = _UNTOLD
    too_many: int = 0


class TokenizerClient(UnaryClient):
    """`baton.v1.Tokenizer` of one instance id. answer_format: of its model."""

    def __init__(self, channel: grpc.aio.Channel, answer_format: AnswerFormat = _UNTOLD) -> None:
        super().__init__()
        self._answer_format = answer_format
        self._stub = TokenizerStub(channel)

    async def encode(
        self,
        prompt: Prompt,
        cache_salt: bytes,
        request_id: str,
        remaining_s: float,
        *,
        grammar: Grammar | None = None,
        most_tokens: int | None = None,
        with_token_strings: bool = False,
        trace: TraceContext = UNTRACED,
    ) -> EncodedPrompt:
        """most_tokens: of more only the number is told: to look at a million of them would keep
        the event loop. Raises BatonError, naming the field if the prompt or the grammar is at
        fault."""
        item = _input(prompt, cache_salt)
        item.with_token_strings = with_token_strings
        if grammar is not None:
            item.grammar.CopyFrom(grammar_to_proto(grammar))
        output = await self._ask(
            self._stub.Encode, EncodeRequest(inputs=[item]), request_id, remaining_s, trace
        )
        num_tokens = len(output.token_ids) // TOKEN_ID_BYTES
        if most_tokens is not None and num_tokens > most_tokens:
            return EncodedPrompt((), b"", too_many=num_tokens)
        token_ids = await _in_turns(output.token_ids)
        strings = tuple(output.token_strings)
        if len(output.prefix_hashes) % HASH_BYTES or len(strings) != (
            len(token_ids) if with_token_strings else 0
        ):
            raise _astray()
        return EncodedPrompt(
            token_ids, output.prefix_hashes, strings, output.reasoning_open, self._answer_format
        )

    async def decode(
        self,
        token_ids: Sequence[int],
        request_id: str,
        remaining_s: float,
        *,
        skip_special_tokens: bool,
        trace: TraceContext = UNTRACED,
    ) -> str:
        """The text of a whole list of ids. Raises BatonError; `tokens` if they are at fault."""
        item = DecodeInput(
            token_ids=token_ids_to_bytes(token_ids), skip_special_tokens=skip_special_tokens
        )
        output = await self._ask(
            self._stub.Decode, DecodeRequest(inputs=[item]), request_id, remaining_s, trace
        )
        return str(output.text)

    async def _ask(
        self,
        method: Callable[..., Any],
        request: Any,
        request_id: str,
        remaining_s: float,
        trace: TraceContext,
    ) -> Any:
        """The one output."""
        answer = await self.call(
            method,
            request,
            request_id=request_id,
            timeout_s=max(0.0, min(remaining_s, CALL_TIMEOUT_S)),
            trace=trace,
        )
        if len(answer.outputs) != 1:
            raise _astray()
        output = answer.outputs[0]
        if output.HasField("error"):
            raise error_from_proto(output.error)
        return output


async def _in_turns(packed: bytes) -> tuple[int, ...]:
    """Token ids, some at a time: others on this loop do not wait for all of them."""
    if len(packed) <= AT_ONCE_BYTES:
        return token_ids_from_bytes(packed, "token_ids")
    found: list[int] = []
    for start in range(0, len(packed), AT_ONCE_BYTES):
        found += token_ids_from_bytes(packed[start : start + AT_ONCE_BYTES], "token_ids")
        await asyncio.sleep(0)
    return tuple(found)


def _astray() -> Internal:
    return Internal("The tokenizer answered something else.")


def _input(prompt: Prompt, cache_salt: bytes) -> EncodeInput:
    match prompt:
        case TextPrompt(text, add_special_tokens):
            return EncodeInput(
                text=text, add_special_tokens=add_special_tokens, cache_salt=cache_salt
            )
        case TokenPrompt(token_ids):
            return EncodeInput(token_ids=token_ids_to_bytes(token_ids), cache_salt=cache_salt)
        case ChatPrompt():
            return EncodeInput(chat=chat_to_proto(prompt), cache_salt=cache_salt)
