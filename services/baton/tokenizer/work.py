"""Groups of inputs to groups of outputs, as messages, on a thread. Knows no RPC and no queue, and
not whose an input is."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import BatonError, InvalidArgument
from baton.core.request.request import Prompt, TextPrompt, TokenPrompt
from baton.rpc.chat_messages import chat_from_proto
from baton.rpc.convert import token_ids_from_bytes, token_ids_to_bytes
from baton.rpc.metrics import ENCODED_TOKENS, counter
from baton.tokenizer.encoder import Asked, Encoded, Encoder
from baton.v1 import tokenizer_pb2 as pb

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
