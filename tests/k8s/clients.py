"""Clients of one router over gRPC and HTTP, and how they fail."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack

import httpx

from batonlm.client import AsyncClient, Options, Retries
from batonlm.core.errors import BatonError
from batonlm.core.request.request import Delta
from tests.k8s.asks import Ask

STREAM_S = 120.0
ONCE = Retries(most=0)


class Clients:
    """Those of one router Service: host:port of its gRPC and of its HTTP.

    Each gRPC client has a connection of its own, so that several spread over several routers.
    """

    def __init__(self, grpc: str, http: str, *, count: int = 1, retries: Retries = ONCE) -> None:
        self._grpc, self._http, self._count, self._retries = grpc, http, count, retries
        self._stack = AsyncExitStack()
        self._of_grpc: Iterator[AsyncClient] = iter(())
        self._of_http = httpx.AsyncClient()

    async def __aenter__(self) -> Clients:
        made = [
            await self._stack.enter_async_context(
                AsyncClient(self._grpc, retries=self._retries, resume=False)
            )
            for _ in range(self._count)
        ]
        self._of_grpc = itertools.cycle(made)
        self._of_http = await self._stack.enter_async_context(
            # Proxies of the environment lead elsewhere.
            httpx.AsyncClient(base_url=f"http://{self._http}", timeout=STREAM_S, trust_env=False)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def tokens(self, ask: Ask, found: list[int] | None = None) -> list[int]:
        """The answer's token ids. Raises BatonError, httpx.HTTPError or Refused.

        found: gets the token ids as they come.
        """
        found = [] if found is None else found
        if ask.face == "http":
            return await self._over_http(ask, found)
        options: Options = {**ask.options, "cache_salt": _salt()}
        async for event in next(self._of_grpc).generate(ask.prompt, timeout_s=STREAM_S, **options):
            if isinstance(event, Delta):
                found.extend(event.token_ids)
        return found

    async def _over_http(self, ask: Ask, found: list[int]) -> list[int]:
        body = {"model": "", "prompt": _for_json(ask.prompt), "stream": True, **ask.options}
        body["cache_salt"] = _salt()
        done = False
        async with self._of_http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                again = answer.status_code in (429, 503)
                said = (await answer.aread()).decode()
                raise Refused(f"{answer.status_code}: {said}", retryable=again)
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: "):
                    continue
                if data == "[DONE]":
                    done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise Refused(data, retryable='"code":"unavailable"' in data)
                for choice in event["choices"]:
                    found.extend(choice.get("token_ids", ()))
        if not done:
            raise Refused("the stream broke off", retryable=True)
        return found


class Refused(Exception):
    """What HTTP said in place of an answer's end. retryable: to try again."""

    def __init__(self, said: str, *, retryable: bool = False) -> None:
        super().__init__(said)
        self.retryable = retryable


def retryable(error: Exception) -> bool:
    """What an ordinary client would ask again elsewhere: told to, or the connection broke."""
    if isinstance(error, BatonError):
        return error.retryable
    if isinstance(error, Refused):
        return error.retryable
    return isinstance(error, httpx.TransportError)


def _salt() -> str:
    """Another one each time, so that no worker is preferred for remembering a prompt."""
    return secrets.token_hex(8)


def _for_json(prompt: str | tuple[int, ...]) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)
