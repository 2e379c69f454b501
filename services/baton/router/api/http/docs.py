"""GET /openapi.json and /docs: the document, and one page that shows it without anything from
elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.router.api.http.openapi import openapi_document
from baton.router.api.http.respond import encode

_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page fetches the document from here, and nothing from anywhere else."""


def document_routes() -> list[Route]:
    document = encode(openapi_document())
    page = files("baton.router.api.http").joinpath("docs.html").read_bytes()

    async def show_document(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def show_page(_: Request) -> Response:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html", headers=headers)

    return [Route("/openapi.json", show_document), Route("/docs", show_page)]
