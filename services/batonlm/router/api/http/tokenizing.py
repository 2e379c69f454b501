"""POST /tokenize and /detokenize, as in vLLM's API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Send

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import Prompt, Request, TextPrompt, TokenPrompt
from batonlm.router.api.http.json_route import JsonRoute
from batonlm.router.api.http.parse import chat_prompt
from batonlm.router.api.http.responses import Header, encode, send_parts
from batonlm.router.api.http.schema import DetokenizeBody, TokenizeBody

AT_ONCE = 4096
"""Tokens that are written at once."""


class Tokenizing(JsonRoute[TokenizeBody]):
    """Answers with the tokens of a text or conversation."""

    def request(self, given: TokenizeBody) -> Request:
        if (given.prompt is None) == (given.messages is None):
            raise InvalidArgument("one of prompt and messages is required", field="prompt")
        prompt: Prompt
        if given.prompt is not None:
            prompt = TextPrompt(given.prompt, given.add_special_tokens is not False)
        else:
            prompt = chat_prompt(given)
        return Request(prompt, model=given.model or "")

    async def respond(
        self,
        given: TokenizeBody,
        request: Request,
        holding: Holding,
        headers: list[Header],
        send: Send,
    ) -> None:
        parts = await self._tokens(request, holding, bool(given.return_token_strs))
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


class Detokenizing(JsonRoute[DetokenizeBody]):
    """Answers with the text of token ids."""

    def request(self, given: DetokenizeBody) -> Request:
        return Request(TokenPrompt(given.prompt), model=given.model or "")

    async def respond(
        self,
        given: DetokenizeBody,
        request: Request,
        holding: Holding,
        headers: list[Header],
        send: Send,
    ) -> None:
        text = await self.pipeline.detokenize(request, holding)
        await send_parts(send, [encode({"prompt": text})], headers)
