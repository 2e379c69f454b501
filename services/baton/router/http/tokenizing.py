"""POST /tokenize and /detokenize: a prompt as tokens and back, in vLLM's words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from starlette.types import Receive, Scope, Send

from baton.core.errors import BatonError, InvalidArgument
from baton.core.request import Prompt, Request, TextPrompt, TokenPrompt
from baton.router.http.body import ClientGone, read_json_body
from baton.router.http.decode import decode
from baton.router.http.door import caller
from baton.router.http.frontend import Frontend
from baton.router.http.parse import PROMPT_NAMES, chat_prompt, listed
from baton.router.http.respond import Json, send_json
from baton.router.http.schema import ChatTemplateBody
from baton.router.http.tasks import while_connected
from baton.router.wording import in_client_words


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
    """An ASGI app. work: from a body to the answer and the names of ignored parameters; it raises
    BatonError."""

    work: Callable[[bytes, Scope], Awaitable[tuple[Json, tuple[str, ...]]]]
    names: dict[str, str] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_json_body(scope, receive)
        except ClientGone:
            return
        try:
            await while_connected(receive, self._respond(body, scope, send))
        except BatonError as error:
            raise in_client_words(error, self.names) from error

    async def _respond(self, body: bytes, scope: Scope, send: Send) -> None:
        document, ignored = await self.work(body, scope)
        headers = [(b"x-baton-ignored-params", listed(ignored))] if ignored else []
        await send_json(send, 200, document, headers)


def tokenizing_apps(frontend: Frontend) -> dict[str, Tokenizing]:
    """By path."""

    async def tokenize(raw: bytes, scope: Scope) -> tuple[Json, tuple[str, ...]]:
        body, ignored = decode(raw, TokenizeBody, {})
        request = Request(_prompt(body), model=body.model or "").of(caller(scope))
        encoded, model = await frontend.tokenize(request)
        document = {
            "count": len(encoded.token_ids),
            "max_model_len": model.max_model_len,
            "tokens": list(encoded.token_ids),
            "token_strs": list(encoded.token_strings) if body.return_token_strs else None,
        }
        return document, ignored

    async def detokenize(raw: bytes, scope: Scope) -> tuple[Json, tuple[str, ...]]:
        body, ignored = decode(raw, DetokenizeBody, {})
        prompt = TokenPrompt(tuple(body.tokens))
        request = Request(prompt, model=body.model or "").of(caller(scope))
        return {"prompt": await frontend.detokenize(request)}, ignored

    return {
        "/tokenize": Tokenizing(tokenize, PROMPT_NAMES),
        "/detokenize": Tokenizing(detokenize, {"prompt": "tokens"}),
    }


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("one of prompt and messages is required", field="prompt")
    if body.prompt is not None:
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    return chat_prompt(body)
