"""The gRPC face of the tokenizer: what may wait, and how much."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import grpc

from baton.core.errors import BatonError, InvalidArgument, Overloaded
from baton.core.request.model import ModelDescription, WorkerIdentity
from baton.core.request.request import Prompt, TextPrompt, TokenPrompt
from baton.rpc import tracing
from baton.rpc.convert import (
    chat_from_proto,
    error_to_proto,
    grammar_from_proto,
    identity_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from baton.rpc.errors import about_call
from baton.rpc.metrics import ENCODED_TOKENS, counter
from baton.rpc.tracing import OFF, Span, Tracer, context_of, ending
from baton.tokenizer.encoder import Asked, Encoded, Encoder
from baton.tokenizer.grammar_checker import Checker
from baton.tokenizer.lanes import BATCH_BYTES, LONG_BYTES, BatchExecutor
from baton.v1 import tokenizer_pb2 as pb
from baton.v1 import tokenizer_pb2_grpc
from baton.v1.types_pb2 import Error

# Groups of inputs to groups of outputs, as messages, on a thread.

MAX_SALT_BYTES = 1024


class EncodeJob:
    """What lanes are given to do. An input that fails has its error instead of an output."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encode(
        self, groups: Sequence[Sequence[pb.EncodeInput]]
    ) -> list[list[pb.EncodeOutput | BatonError]]:
        asked = [_asked(item) for group in groups for item in group]
        answers = iter(self._encoder.encode([ask for ask in asked if isinstance(ask, Asked)]))
        results = iter(next(answers) if isinstance(ask, Asked) else ask for ask in asked)
        return [[self._encoded(item, next(results)) for item in group] for group in groups]

    def decode(
        self, groups: Sequence[Sequence[pb.DecodeInput]]
    ) -> list[list[pb.DecodeOutput | BatonError]]:
        return [[self._decoded(item) for item in group] for group in groups]

    def _encoded(
        self, item: pb.EncodeInput, result: Encoded | BatonError
    ) -> pb.EncodeOutput | BatonError:
        if isinstance(result, BatonError):
            return result
        counter(ENCODED_TOKENS).inc(len(result.token_ids))
        return pb.EncodeOutput(
            token_ids=token_ids_to_bytes(result.token_ids),
            prefix_hashes=result.prefix_hashes,
            reasoning_open=result.reasoning_open,
            token_strings=self._encoder.names(result.token_ids) if item.with_token_strings else (),
        )

    def _decoded(self, item: pb.DecodeInput) -> pb.DecodeOutput | BatonError:
        try:
            ids = token_ids_from_bytes(item.token_ids, "tokens")
            return pb.DecodeOutput(text=self._encoder.decode(ids, item.skip_special_tokens))
        except BatonError as error:
            return error


def _asked(item: pb.EncodeInput) -> Asked | BatonError:
    try:
        if len(item.cache_salt) > MAX_SALT_BYTES:
            raise InvalidArgument(f"must have at most {MAX_SALT_BYTES} bytes", field="cache_salt")
        return Asked(_prompt(item), item.cache_salt)
    except BatonError as error:
        return error


def _prompt(item: pb.EncodeInput) -> Prompt:
    match item.WhichOneof("input"):
        case "text":
            return TextPrompt(item.text, item.add_special_tokens)
        case "chat":
            return chat_from_proto(item.chat)
        case "token_ids":
            return TokenPrompt(token_ids_from_bytes(item.token_ids, "prompt"))
        case _:
            raise InvalidArgument("must be text, a chat or token ids", field="input")


log = logging.getLogger(__name__)

MAX_INPUTS = 256
RETRY_AFTER_S = 0.5

_Context = grpc.aio.ServicerContext
_Item = TypeVar("_Item", pb.EncodeInput, pb.DecodeInput)
_Output = TypeVar("_Output", pb.EncodeOutput, pb.DecodeOutput)
_Work = Callable[[Sequence[Sequence[_Item]]], Sequence[list[_Output | BatonError]]]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """Serves `baton.v1.Tokenizer`. lanes: where it encodes and decodes. checker: tries grammars."""

    def __init__(
        self,
        encoder: Encoder,
        model: ModelDescription,
        identity: Callable[[], WorkerIdentity],
        lanes: BatchExecutor,
        checker: Checker,
        *,
        max_waiting_bytes: int,
        tracer: Tracer = OFF,
    ) -> None:
        self._encoder = encoder
        self._work = EncodeJob(encoder)
        self._model = model
        self._identity = identity
        self._lanes = lanes
        self._checker = checker
        self._max_waiting_bytes = max_waiting_bytes
        self._tracer = tracer
        self._waiting_bytes = 0
        self.num_inputs = 0
        """Inputs accepted and not answered."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def drain(self) -> None:
        """Returns when every accepted input is answered."""
        self.draining = True
        await self._idle.wait()

    async def Encode(
        self,
        request: pb.EncodeRequest,
        context: _Context[pb.EncodeRequest, pb.EncodeResponse],
    ) -> pb.EncodeResponse:
        with self._traced(tracing.ENCODE, context):
            return pb.EncodeResponse(
                outputs=await self._all(
                    self._work.encode, request.inputs, pb.EncodeOutput, about_call(context)
                )
            )

    async def Decode(
        self,
        request: pb.DecodeRequest,
        context: _Context[pb.DecodeRequest, pb.DecodeResponse],
    ) -> pb.DecodeResponse:
        with self._traced(tracing.TO_TEXT, context):
            return pb.DecodeResponse(
                outputs=await self._all(
                    self._work.decode, request.inputs, pb.DecodeOutput, about_call(context)
                )
            )

    async def Describe(
        self,
        request: pb.DescribeRequest,
        context: _Context[pb.DescribeRequest, pb.DescribeResponse],
    ) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            identity=identity_to_proto(self._identity()),
            model=self._model.name,
            tokenizer_digest=self._model.tokenizer_digest,
            vocab_size=self._encoder.vocab_size,
            has_chat_template=self._encoder.has_chat_template,
        )

    def _traced(self, name: str, context: _Context[Any, Any]) -> AbstractContextManager[Span]:
        parent = context_of(context.invocation_metadata() or ())
        return ending(self._tracer.go_on(name, parent=parent))

    async def _all(
        self,
        work: _Work[_Item, _Output],
        inputs: Sequence[_Item],
        output: type[_Output],
        about: Mapping[str, str],
    ) -> list[_Output]:
        """An output for each input, in order. about: the call, for log lines."""
        if len(inputs) > MAX_INPUTS:
            raise InvalidArgument(f"must be at most {MAX_INPUTS}", field="inputs")
        outputs = await asyncio.gather(
            *(self._some(work, group, size) for group, size in _groups(inputs))
        )
        return [
            output(error=_told(one, about)) if isinstance(one, BatonError) else one
            for some in outputs
            for one in some
        ]

    async def _some(
        self,
        work: _Work[_Item, _Output],
        items: list[_Item],
        size: int,
    ) -> list[_Output | BatonError]:
        """Of inputs that a thread takes together."""
        if self._waiting_bytes + size > self._max_waiting_bytes and self.num_inputs:
            error = Overloaded("the tokenizer has too much to do", retry_after_s=RETRY_AFTER_S)
            return [error] * len(items)
        self._waiting_bytes += size
        self.num_inputs += len(items)
        self._idle.clear()
        try:
            refusals = [await self._refusal(item) for item in items]
            sound = [item for item, error in zip(items, refusals, strict=True) if error is None]
            done = iter(await self._lanes.run(work, sound, size) if sound else ())
            return [next(done) if error is None else error for error in refusals]
        finally:
            self._waiting_bytes -= size
            self.num_inputs -= len(items)
            if not self.num_inputs:
                self._idle.set()

    async def _refusal(self, item: pb.EncodeInput | pb.DecodeInput) -> BatonError | None:
        """What is wrong with an input's grammar, if it has one and anything is."""
        if not isinstance(item, pb.EncodeInput) or not item.HasField("grammar"):
            return None
        try:
            await self._checker.check(grammar_from_proto(item.grammar, "grammar"))
        except BatonError as error:
            return error
        return None


def _told(error: BatonError, about: Mapping[str, str]) -> Error:
    """What the caller gets. Faults of our own are logged, and why a template took no chat."""
    if not isinstance(error, InvalidArgument | Overloaded):
        log.error("an input could not be worked on", exc_info=error, extra=about)
    elif error.__cause__ is not None:
        log.debug("an input is refused", exc_info=error, extra=about)
    return error_to_proto(error)


def _groups(inputs: Sequence[_Item]) -> Iterator[tuple[list[_Item], int]]:
    """Neighbours that make a batch, with their bytes; a long one is a group of its own."""
    group: list[_Item] = []
    total = 0
    for item in inputs:
        size = item.ByteSize()
        if isinstance(item, pb.EncodeInput) and item.chat.template:
            size = max(size, LONG_BYTES)  # a stranger's program may take long over any input
        if group and total + size > BATCH_BYTES:
            yield group, total
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group, total
