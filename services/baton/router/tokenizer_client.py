"""Speaks to one tokenizer; knows nothing of retries."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from baton.core.errors import Internal
from baton.core.prefix import HASH_BYTES
from baton.core.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from baton.router.unary_client import UnaryClient
from baton.rpc.convert import error_from_proto, token_ids_from_bytes, token_ids_to_bytes
from baton.v1.tokenizer_pb2 import Chat, ChatMessage, EncodeInput, EncodeRequest
from baton.v1.tokenizer_pb2_grpc import TokenizerStub

ENCODE_TIMEOUT_S = 30.0
"""Above what the largest prompt takes."""


class Encoded(NamedTuple):
    """A prompt's token ids, and the hashes of its units as `core.prefix` has them."""

    token_ids: tuple[int, ...]
    prefix_hashes: bytes


class TokenizerClient(UnaryClient):
    """`baton.v1.Tokenizer` of one incarnation."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__()
        self._stub = TokenizerStub(channel)

    async def encode(
        self, prompt: Prompt, cache_salt: bytes, request_id: str, remaining_s: float
    ) -> Encoded:
        """Raises BatonError, naming the field if the prompt is at fault."""
        request = EncodeRequest(inputs=[_input(prompt, cache_salt)])
        answer = await self.call(
            self._stub.Encode,
            request,
            request_id=request_id,
            timeout_s=max(0.0, min(remaining_s, ENCODE_TIMEOUT_S)),
        )
        if len(answer.outputs) != 1:
            raise Internal("The tokenizer answered something else.")
        output = answer.outputs[0]
        if output.HasField("error"):
            raise error_from_proto(output.error)
        if len(output.prefix_hashes) % HASH_BYTES:
            raise Internal("The tokenizer answered something else.")
        return Encoded(token_ids_from_bytes(output.token_ids, "token_ids"), output.prefix_hashes)


def _input(prompt: Prompt, cache_salt: bytes) -> EncodeInput:
    match prompt:
        case TextPrompt(text, add_special_tokens):
            return EncodeInput(
                text=text, add_special_tokens=add_special_tokens, cache_salt=cache_salt
            )
        case TokenPrompt(token_ids):
            return EncodeInput(token_ids=token_ids_to_bytes(token_ids), cache_salt=cache_salt)
        case ChatPrompt(messages, add_generation_prompt, continue_final_message):
            return EncodeInput(
                chat=Chat(
                    messages=[ChatMessage(role=m.role, content=m.content) for m in messages],
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                ),
                cache_salt=cache_salt,
            )
