"""Tokenizer work for this router's requests, and its results."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from batonlm.core.request.model import AnswerFormat, ModelDescription, WorkerIdentity
from batonlm.core.request.request import ChatPrompt, Grammar, Prompt, TextPrompt, TokenPrompt
from batonlm.core.routing.failures import RetryBudget
from batonlm.router.config import RouterConfig
from batonlm.router.workers.clients import TOKEN_ID_BYTES
from batonlm.router.workers.fleet import Fleet, Worker
from batonlm.router.workers.work_queue import LONG_BYTES, AskedBy, Lane, WorkQueue
from batonlm.rpc.convert import (
    chat_to_proto,
    grammar_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from batonlm.v1.tokenizer_pb2 import DecodeInput, EncodeInput

MAX_KNOWN_GRAMMARS = 4096

AT_ONCE_BYTES = 1 << 16
"""Bytes of packed ids that are unpacked without yielding: about half a millisecond."""


class EncodedPrompt(NamedTuple):
    """A prompt as a tokenizer returns it."""

    token_ids: tuple[int, ...]
    prefix_hashes: bytes
    """Hashes of its units, as `core.kvcache.prefix` computes them."""
    reasoning_open: bool = False
    """Whether it is a chat's and ends within reasoning."""
    answer_format: AnswerFormat = AnswerFormat()
    """The answer format of the model."""
    too_many: int = 0
    """The number of tokens, when there are too many to unpack; otherwise 0."""


class Tokenizers:
    """Runs tokenizer work for this router's requests, each in its tenant's turn, and retries it on
    another tokenizer when one fails.

    All methods raise BatonError, naming the field when the input is invalid; that is not retried.
    on_turn: called each time that the work is sent to a tokenizer.
    """

    def __init__(self, fleet: Fleet, config: RouterConfig, budget: RetryBudget) -> None:
        self._queue = WorkQueue(
            fleet.tokenizers, fleet.changed, config, budget, fits=Worker.has_tokenizer
        )
        self._known_grammars: OrderedDict[bytes, None] = OrderedDict()
        """Digests of grammars that a tokenizer has compiled: it caches the result."""

    async def encode(
        self,
        prompt: Prompt,
        cache_salt: bytes,
        model: ModelDescription,
        asked_by: AskedBy,
        *,
        size: int,
        grammar: Grammar | None = None,
        adapter: str = "",
        most_tokens: int | None = None,
        on_turn: Callable[[], None] = lambda: None,
        on_served: Callable[[WorkerIdentity], None] = lambda _: None,
    ) -> EncodedPrompt:
        """Encodes a prompt. size: in bytes. grammar: compiled first. adapter: the digest of
        the one that will compute it. most_tokens: if there are
        more, only their number is returned, because unpacking a million would block the event loop.
        on_served: called with the tokenizer that did it."""
        item = _encode_input(prompt, cache_salt, grammar)
        item.adapter = adapter
        digest = grammar.digest if grammar is not None else b""
        if grammar is not None and digest not in self._known_grammars:
            lane = Lane.GRAMMAR
        elif size >= LONG_BYTES or (isinstance(prompt, ChatPrompt) and prompt.template):
            # An untrusted template may take long over any input.
            lane = Lane.LONG
        else:
            lane = Lane.SHORT
        output, worker = await self._queue.run(
            model.tokenizer_digest,
            asked_by,
            lane,
            size,
            lambda client: partial(client.encode, item),
            on_turn,
        )
        on_served(worker.identity)
        if grammar is not None:
            self._known_grammars[digest] = None
            self._known_grammars.move_to_end(digest)
            if len(self._known_grammars) > MAX_KNOWN_GRAMMARS:
                self._known_grammars.popitem(last=False)
        num_tokens = len(output.token_ids) // TOKEN_ID_BYTES
        if most_tokens is not None and num_tokens > most_tokens:
            return EncodedPrompt((), b"", too_many=num_tokens)
        return EncodedPrompt(
            await _unpack(output.token_ids),
            output.prefix_hashes,
            output.reasoning_open,
            worker.model.answer_format,
        )

    async def names(
        self, token_ids: tuple[int, ...], model: ModelDescription, asked_by: AskedBy
    ) -> tuple[str, ...]:
        """Returns the names of these tokens in the vocabulary."""
        item = _encode_input(TokenPrompt(token_ids), b"")
        item.with_token_strings = True
        output, _ = await self._queue.run(
            model.tokenizer_digest,
            asked_by,
            *_lane_of_ids(token_ids),
            lambda client: partial(client.encode, item),
        )
        return tuple(output.token_strings)

    async def decode(
        self,
        token_ids: tuple[int, ...],
        model: ModelDescription,
        asked_by: AskedBy,
        *,
        skip_special_tokens: bool,
        on_turn: Callable[[], None] = lambda: None,
    ) -> str:
        """Returns the whole text of these ids."""
        item = DecodeInput(
            token_ids=token_ids_to_bytes(token_ids), skip_special_tokens=skip_special_tokens
        )
        text, _ = await self._queue.run(
            model.tokenizer_digest,
            asked_by,
            *_lane_of_ids(token_ids),
            lambda client: partial(client.decode, item),
            on_turn,
        )
        return text

    async def close(self) -> None:
        """Stops the queue. Waiting inputs are ended by their own requests."""
        await self._queue.close()


def _lane_of_ids(token_ids: tuple[int, ...]) -> tuple[Lane, int]:
    size = TOKEN_ID_BYTES * len(token_ids)
    return (Lane.LONG if size >= LONG_BYTES else Lane.SHORT), size


def _encode_input(prompt: Prompt, cache_salt: bytes, grammar: Grammar | None = None) -> EncodeInput:
    item = EncodeInput(cache_salt=cache_salt)
    match prompt:
        case TextPrompt(text, add_special_tokens):
            item.text, item.add_special_tokens = text, add_special_tokens
        case TokenPrompt(token_ids):
            item.token_ids = token_ids_to_bytes(token_ids)
        case ChatPrompt():
            item.chat.CopyFrom(chat_to_proto(prompt))
    if grammar is not None:
        item.grammar.CopyFrom(grammar_to_proto(grammar))
    return item


async def _unpack(packed: bytes) -> tuple[int, ...]:
    """Unpacks token ids in parts, so that other tasks on this loop do not wait for all of them."""
    if len(packed) <= AT_ONCE_BYTES:
        return token_ids_from_bytes(packed, "token_ids")
    found: list[int] = []
    for start in range(0, len(packed), AT_ONCE_BYTES):
        found += token_ids_from_bytes(packed[start : start + AT_ONCE_BYTES], "token_ids")
        await asyncio.sleep(0)
    return tuple(found)
