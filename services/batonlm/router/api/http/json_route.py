"""Routes that answer a JSON body once, without a stream of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from batonlm.core.admission.admission import Holding
from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.core.request.request import Request
from batonlm.router.api.http.access import caller
from batonlm.router.api.http.body import Bodies, while_connected
from batonlm.router.api.http.parse import listed
from batonlm.router.api.http.responses import Header
from batonlm.router.api.http.schema import client_names, decode
from batonlm.router.api.translation import in_client_words
from batonlm.router.request.pipeline import Pipeline
from batonlm.rpc.tracing import context_of

Given = TypeVar("Given", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class JsonRoute(Generic[Given]):
    """An ASGI app that answers bodies of one kind: a subclass makes requests of them, and answers.

    Raises BatonError, in the words of the body, or HttpError, only before anything is sent.
    """

    pipeline: Pipeline
    bodies: Bodies
    kind: type[Given]

    def request(self, given: Given) -> Request:
        """Raises BatonError."""
        raise NotImplementedError

    async def respond(
        self, given: Given, request: Request, holding: Holding, headers: list[Header], send: Send
    ) -> None:
        """headers: to send beside the answer's own. Is cancelled when the client leaves."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = caller(scope)
        async with self.bodies.received(scope, receive) as body:
            try:
                with self.pipeline.reading(tenant):
                    given, ignored = decode(body.raw, self.kind)
                    text = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
                    request = self.request(given).of(tenant, context_of(text))
                body.raw = b""
                headers = [(b"x-baton-ignored-params", listed(ignored))] if ignored else []
                await while_connected(
                    receive, self.respond(given, request, body.holding, headers, send)
                )
            except BatonError as error:
                raise in_client_words(error, client_names(self.kind)) from error


@dataclass(frozen=True, slots=True)
class RefusedRoute:
    """An ASGI app in place of a route that an API has and Baton does not: it says why."""

    pipeline: Pipeline
    bodies: Bodies
    name: str
    why: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.bodies.received(scope, receive):
            with self.pipeline.reading(caller(scope)):
                raise InvalidArgument(f"{self.name} is not supported: {self.why}")
