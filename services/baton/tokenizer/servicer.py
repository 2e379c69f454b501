"""The gRPC face of the tokenizer. Converts, calls, converts; each input fails by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

import grpc

from baton.core.errors import BatonError, InvalidArgument, Overloaded
from baton.core.model import ModelDescription, WorkerIdentity
from baton.core.request import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from baton.rpc.convert import (
    error_to_proto,
    identity_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from baton.rpc.metrics import PROMPT_TOKENS, counter
from baton.tokenizer.encoder import Encoder
from baton.v1 import tokenizer_pb2 as pb
from baton.v1 import tokenizer_pb2_grpc

log = logging.getLogger(__name__)

MAX_INPUTS = 256
MAX_SALT_BYTES = 1024
RETRY_AFTER_S = 0.5

_Context = grpc.aio.ServicerContext


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """Serves `baton.v1.Tokenizer`. executor: the threads that encode."""

    def __init__(
        self,
        encoder: Encoder,
        model: ModelDescription,
        identity: Callable[[], WorkerIdentity],
        executor: Executor,
        *,
        max_waiting_bytes: int,
    ) -> None:
        self._encoder = encoder
        self._model = model
        self._identity = identity
        self._executor = executor
        self._max_waiting_bytes = max_waiting_bytes
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
        if len(request.inputs) > MAX_INPUTS:
            raise InvalidArgument(f"must be at most {MAX_INPUTS}", field="inputs")
        outputs = await asyncio.gather(*map(self._encode, request.inputs))
        return pb.EncodeResponse(outputs=outputs)

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

    async def _encode(self, item: pb.EncodeInput) -> pb.EncodeOutput:
        size = item.ByteSize()
        if self._waiting_bytes + size > self._max_waiting_bytes and self.num_inputs:
            error = Overloaded("the tokenizer has too much to do", retry_after_s=RETRY_AFTER_S)
            return pb.EncodeOutput(error=error_to_proto(error))
        self._waiting_bytes += size
        self.num_inputs += 1
        self._idle.clear()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, self._encode_now, item
            )
        except BatonError as error:
            if not isinstance(error, InvalidArgument):
                log.error("an input could not be encoded", exc_info=error)
            return pb.EncodeOutput(error=error_to_proto(error))
        finally:
            self._waiting_bytes -= size
            self.num_inputs -= 1
            if not self.num_inputs:
                self._idle.set()

    def _encode_now(self, item: pb.EncodeInput) -> pb.EncodeOutput:
        """Runs on one of the executor's threads."""
        if len(item.cache_salt) > MAX_SALT_BYTES:
            raise InvalidArgument(f"must have at most {MAX_SALT_BYTES} bytes", field="cache_salt")
        encoded = self._encoder.encode(_prompt(item), item.cache_salt)
        counter(PROMPT_TOKENS).inc(len(encoded.token_ids))
        return pb.EncodeOutput(
            token_ids=token_ids_to_bytes(encoded.token_ids), prefix_hashes=encoded.prefix_hashes
        )


def _prompt(item: pb.EncodeInput) -> Prompt:
    match item.WhichOneof("input"):
        case "text":
            return TextPrompt(item.text, item.add_special_tokens)
        case "chat":
            return ChatPrompt(
                tuple(Message(m.role, m.content) for m in item.chat.messages),
                add_generation_prompt=item.chat.add_generation_prompt,
                continue_final_message=item.chat.continue_final_message,
            )
        case "token_ids":
            return TokenPrompt(token_ids_from_bytes(item.token_ids, "prompt"))
        case _:
            raise InvalidArgument("must be text, a chat or token ids", field="input")
