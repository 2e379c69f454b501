"""The playground's files as a browser is given them; what it does with them, tests/browser says."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry

from batonlm.core.admission.api_keys import KeyBook, TenantLimits, render
from batonlm.router.api.access import KeyAuthenticator
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import playground_routes
from batonlm.router.api.http.server import serve_http
from tests.services.router_http.scripted import ANYONE, Scripted, http_app

PAGES = playground_routes()


async def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """All it links to is there, under a policy that allows no inline script and no other host; it
    is open where everything else needs a key."""
    book, _ = KeyBook().with_key("alice", TenantLimits(), "")
    keys = tmp_path / "keys.json"
    keys.write_text(render(book))
    keyed = KeyAuthenticator(str(keys), CollectorRegistry())
    authenticator = HttpAccess(keyed, pages=[page.path for page in PAGES])
    app = http_app(Scripted(), CollectorRegistry(), authenticator, PAGES)
    server = await serve_http(app, "127.0.0.1:0")
    base = f"http://{server.address}"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as http:
            index = await http.get("/")
            assert index.headers["content-type"] == "text/html; charset=utf-8"
            policy = index.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
            linked = re.findall(r'(?:href|src)="(?!data:|#)([^"]+)"', index.text)
            pending, seen = [f"/{path}" for path in linked], {"/"}
            while pending:
                path = pending.pop()
                seen.add(path)
                found = await http.get(path)
                assert found.status_code == 200, path
                imported = re.findall(r'\bfrom ?"([^"]*)"', found.text)
                assert all(name.startswith("./") for name in imported), "nothing from elsewhere"
                pending += [f"/playground/{name[2:]}" for name in imported]
                # Comments and patterns of the library have addresses. No module makes markup or
                # code of text, and the policy would not let it.
                assert "/vendor/" in path or "://" not in found.text, path
                assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\beval\(", found.text)
            assert seen == {page.path for page in PAGES}, "and nothing is served in vain"
            assert not re.search(r"<script>|<style| on\w+=|style=", index.text)
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.post("/", content=b"")).status_code == 401
            assert (await http.get("/playground/none.js")).status_code == 401
    finally:
        await server.close()


async def test_where_it_is_not_wanted_there_is_nothing() -> None:
    server = await serve_http(http_app(Scripted(), CollectorRegistry(), ANYONE), "127.0.0.1:0")
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{server.address}", timeout=120, trust_env=False
        ) as http:
            for page in PAGES:
                assert (await http.get(page.path)).status_code == 404
    finally:
        await server.close()
