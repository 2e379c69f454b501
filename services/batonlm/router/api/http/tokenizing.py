"""POST /tokenize and /detokenize, as in vLLM's API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.request.request import Prompt, Request, TextPrompt, TokenPrompt
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.body import Bodies, while_connected
from batonlm.router.api.http.parse import chat_prompt, listed
from batonlm.router.api.http.responses import Header, encode, send_parts
from batonlm.router.api.http.schema import DetokenizeBody, TokenizeBody, client_names, decode
from batonlm.router.api.translation import in_client_words
from batonlm.router.request.pipeline import Pipeline

AT_ONCE = 4096
"""Tokens that are written at once."""


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """An ASGI app that answers bodies of one kind."""

    pipeline: Pipeline
    bodies: Bodies
    kind: type[TokenizeBody] | type[DetokenizeBody]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = caller(scope)
        async with self.bodies.received(scope, receive) as body:
            try:
                with self.pipeline.reading(tenant):
                    given, ignored = decode(body.raw, self.kind)
                    request = Request(_prompt(given), model=given.model or "").of(tenant)
                body.raw = b""
                headers = [(b"x-baton-ignored-params", listed(ignored))] if ignored else []
                with_names = isinstance(given, TokenizeBody) and bool(given.return_token_strs)
                await while_connected(
                    receive, self._respond(request, body.holding, with_names, headers, send)
                )
            except BatonError as error:
                raise in_client_words(error, client_names(self.kind)) from error

    async def _respond(
        self,
        request: Request,
        holding: Holding,
        with_names: bool,
        headers: list[Header],
        send: Send,
    ) -> None:
        if self.kind is DetokenizeBody:
            text = await self.pipeline.detokenize(request, holding)
            parts = [encode({"prompt": text})]
        else:
            parts = await self._tokens(request, holding, with_names)
        await send_parts(send, parts, headers)

    async def _tokens(self, request: Request, holding: Holding, with_names: bool) -> list[bytes]:
        """Returns an answer in parts, between which other tasks run, because a long text yields
        megabytes.

        with_names: also returns the names of the tokens in the vocabulary.
        """
        tokens, names = _JsonList(holding), _JsonList(holding)
        encoded, model = await self.pipeline.tokenize(
            request, holding, names.add if with_names else None
        )
        ids = encoded.token_ids
        for start in range(0, len(ids), AT_ONCE):
            tokens.add(ids[start : start + AT_ONCE])
            await asyncio.sleep(0)
        return [
            b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(ids), model.max_model_len),
            *tokens.parts,
            b'],"token_strs":',
            *((b"[", *names.parts, b"]") if with_names else (b"null",)),
            b"}",
        ]


class _JsonList:
    """The members of a JSON list, written part by part into room of `holding`."""

    def __init__(self, holding: Holding) -> None:
        self.parts: list[bytes] = []
        self._holding = holding

    def add(self, values: Sequence[int] | Sequence[str]) -> None:
        """Raises Refusal when there is no room for the answer."""
        part = (b"," if self.parts else b"") + encode(values)[1:-1]
        self._holding.grow(len(part))
        self.parts.append(part)


def _prompt(body: TokenizeBody | DetokenizeBody) -> Prompt:
    if isinstance(body, DetokenizeBody):
        return TokenPrompt(body.prompt)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("one of prompt and messages is required", field="prompt")
    if body.prompt is not None:
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    return chat_prompt(body)
