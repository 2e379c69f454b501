"""GET /: the playground, one static page with its scripts and styles.

What the page may do is said to the browser: run these scripts, and speak to this router.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = "page"
_INDEX = "index.html"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # A router that was replaced by a newer one has other files.
    "cache-control": "no-cache",
}


def playground_routes() -> list[Route]:
    """Reads the files once."""
    folder = files("baton.router.api.http") / _FOLDER
    found = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    pages = {"/" if name == _INDEX else f"/playground/{name}": name for name in sorted(found)}

    def route(path: str, name: str) -> Route:
        kind = _KINDS[name.rpartition(".")[2]]

        async def show(_: Request) -> Response:
            return Response(found[name], headers=_HEADERS, media_type=kind)

        return Route(path, show)

    return [route(path, name) for path, name in pages.items()]
