"""POST /tokenize and /detokenize: a prompt as tokens and back, in vLLM's words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from starlette.types import Receive, Scope, Send

from baton.core.admission.admission import Holding
from baton.core.errors import BatonError, InvalidArgument
from baton.core.request.request import Prompt, Request, TextPrompt, TokenPrompt
from baton.router.api.http.access import caller
from baton.router.api.http.body import Bodies, while_connected
from baton.router.api.http.parse import PROMPT_NAMES, chat_prompt, listed
from baton.router.api.http.responses import Header, encode, encode_list, send_parts
from baton.router.api.http.schema import ChatTemplateBody, decode
from baton.router.api.translation import in_client_words
from baton.router.request.pipeline import Pipeline

AT_ONCE = 4096
"""Tokens that are written together."""


class TokenizeBody(ChatTemplateBody, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """An ASGI app. read: from a body to what was asked, and the names of ignored parameters.
    work: from that to the answer, in parts for which there is room in the Holding. Both raise
    BatonError."""

    pipeline: Pipeline
    bodies: Bodies
    read: Callable[[bytes], tuple[Asked, tuple[str, ...]]]
    work: Callable[[Pipeline, Asked, Holding], Awaitable[list[bytes]]]
    names: dict[str, str] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = caller(scope)
        async with self.bodies.received(scope, receive) as body:
            try:
                with self.pipeline.reading(tenant):
                    asked, ignored = self.read(body.raw)
                body.raw = b""
                asked = replace(asked, request=asked.request.of(tenant))
                headers = [(b"x-baton-ignored-params", listed(ignored))] if ignored else []
                await while_connected(receive, self._respond(asked, body.holding, headers, send))
            except BatonError as error:
                raise in_client_words(error, self.names) from error

    async def _respond(
        self, asked: Asked, holding: Holding, headers: list[Header], send: Send
    ) -> None:
        await send_parts(send, await self.work(self.pipeline, asked, holding), headers)


@dataclass(frozen=True, slots=True)
class Asked:
    """with_names: of the tokens, in the vocabulary."""

    request: Request
    with_names: bool = False


def tokenizing_apps(pipeline: Pipeline, bodies: Bodies) -> dict[str, Tokenizing]:
    """By path."""
    return {
        "/tokenize": Tokenizing(pipeline, bodies, _read_text, _tokenize, PROMPT_NAMES),
        "/detokenize": Tokenizing(
            pipeline, bodies, _read_tokens, _detokenize, {"prompt": "tokens"}
        ),
    }


def _read_text(raw: bytes) -> tuple[Asked, tuple[str, ...]]:
    body, ignored = decode(raw, TokenizeBody, {})
    request = Request(_prompt(body), model=body.model or "")
    return Asked(request, bool(body.return_token_strs)), ignored


def _read_tokens(raw: bytes) -> tuple[Asked, tuple[str, ...]]:
    body, ignored = decode(raw, DetokenizeBody, {})
    return Asked(Request(TokenPrompt(tuple(body.tokens)), model=body.model or "")), ignored


async def _tokenize(pipeline: Pipeline, asked: Asked, holding: Holding) -> list[bytes]:
    """In parts, between which others get their turn: a long text has megabytes of answer."""
    strings = _List(holding)
    on_names = strings.add if asked.with_names else None
    encoded, model = await pipeline.tokenize(asked.request, holding, on_names)
    ids, tokens = encoded.token_ids, _List(holding)
    for start in range(0, len(ids), AT_ONCE):
        tokens.add(ids[start : start + AT_ONCE])
        await asyncio.sleep(0)
    return [
        b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(ids), model.max_model_len),
        *tokens.parts,
        b'],"token_strs":',
        *((b"[", *strings.parts, b"]") if asked.with_names else (b"null",)),
        b"}",
    ]


async def _detokenize(pipeline: Pipeline, asked: Asked, holding: Holding) -> list[bytes]:
    return [encode({"prompt": await pipeline.detokenize(asked.request, holding)})]


class _List:
    """The members of a JSON list, written some at a time. holding: what they are held by."""

    def __init__(self, holding: Holding) -> None:
        self.parts: list[bytes] = []
        self._holding = holding

    def add(self, values: Sequence[int] | Sequence[str]) -> None:
        """Raises Refusal when there is no room for so much of an answer."""
        part = (b"," if self.parts else b"") + encode_list(values)[1:-1]
        self._holding.grow(len(part))
        self.parts.append(part)


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("one of prompt and messages is required", field="prompt")
    if body.prompt is not None:
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    return chat_prompt(body)
