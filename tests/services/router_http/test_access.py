"""What a web page of another site, and a tenant, can do over HTTP; spoken as ASGI, on no socket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from batonlm.router.api.access import Authenticator, OpenAuthenticator
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import playground_routes
from batonlm.rpc.address import AllowedHosts
from tests.services.router.test_keys import Kept
from tests.services.router_http.scripted import Scripted, http_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
JSON = {"content-type": "application/json"}
PAGE = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
LOCAL = AllowedHosts("127.0.0.1:8000")


class App:
    """A router's HTTP over scripted answers."""

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        hosts: AllowedHosts | None = None,
        token: str = "",
    ) -> None:
        self.frontend = Scripted()
        registry = CollectorRegistry()
        Counter("baton_work", "Any", registry=registry).inc()
        Counter("baton_tenant_work", "Any", ["tenant"], registry=registry).labels("acme").inc()
        pages = playground_routes()
        self._app = http_app(
            self.frontend,
            registry,
            HttpAccess(
                authenticator,
                token=token,
                pages=[page.path for page in pages],
                hosts=hosts,
            ),
            pages,
        )

    async def ask(
        self,
        method: str,
        path: str,
        *,
        host: str = "127.0.0.1:8000",
        headers: Mapping[str, str] | None = None,
        body: dict[str, Any] | None = None,
    ) -> httpx.Response:
        """Nothing is sent that is not said here: httpx names a content type of its own for JSON."""
        content = None if body is None else httpx.Request("POST", "http://x", json=body).content
        transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(
                method, path, headers={"host": host, **(headers or {})}, content=content
            )


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "keys.json")


@pytest.fixture
def app() -> App:
    return App(OpenAuthenticator(), hosts=LOCAL)


READS = ("/", "/v1/models", "/requests/abc", "/metrics", "/version", "/docs", "/openapi.json", "/x")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.7", "[fd00::7]"])
async def test_without_keys_a_strangers_name_reaches_nothing_but_readiness(
    app: App, host: str
) -> None:
    for path in READS:
        answer = await app.ask("GET", path, host=host)
        assert answer.status_code == 421, path
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "allowed_hosts" in answer.json()["error"]["message"]
        assert "evil" not in answer.text
    for path, body in BODIES.items():
        answer = await app.ask("POST", path, host=host, headers=JSON, body=body)
        assert answer.status_code == 421, path
    for path in ("/health", "/ping"):
        assert (await app.ask("GET", path, host=host)).status_code == 200
        assert (await app.ask("POST", path, host=host)).status_code == 421
    assert not app.frontend.seen and not app.frontend.asked


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "baton.localhost"])
async def test_this_machines_own_names_are_answered(app: App, host: str) -> None:
    for path in ("/", "/v1/models", "/metrics", "/docs"):
        assert (await app.ask("GET", path, host=host)).status_code == 200, path
    for path, body in BODIES.items():
        answer = await app.ask("POST", path, host=host, headers=JSON, body=body)
        assert answer.status_code == 200, path


async def test_with_keys_any_name_will_do(kept: Kept) -> None:
    key = kept.new("acme")
    app = App(kept.authenticator())
    shown = {"authorization": f"Bearer {key}"}
    assert (
        await app.ask("GET", "/v1/models", host="any.example", headers=shown)
    ).status_code == 200
    assert (await app.ask("GET", "/v1/models", host="any.example")).status_code == 401


async def test_a_key_in_a_header_of_its_own(kept: Kept) -> None:
    """Where there are two, they are one: a proxy in front may look at the other one."""
    key, other = kept.new("acme"), kept.new("other")
    app = App(kept.authenticator())
    for headers, status in (
        ({"x-api-key": key}, 200),
        ({"x-api-key": "baton-wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": key, "authorization": f"Bearer {key}"}, 200),
        ({"x-api-key": key, "authorization": f"Bearer {other}"}, 401),
    ):
        answer = await app.ask("POST", CHAT, headers=headers, body=BODIES[CHAT])
        assert answer.status_code == status, headers
    assert [request.tenant.name for request in app.frontend.seen] == ["acme"] * 2


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # A program may leave the type out; a browser would, for a body that a page gives none.
        ({}, 200),
        ({"user-agent": "Mozilla/5.0 (Windows NT 10.0; Trident/7.0; rv:11.0) like Gecko"}, 415),
        ({"origin": "http://evil.example"}, 415),
        ({"origin": "null"}, 415),
        ({"origin": "http://127.0.0.1:8000"}, 415),
        ({"sec-fetch-site": "cross-site"}, 415),
        ({"sec-fetch-site": "same-site"}, 415),
        # The three types that browsers send for any page without asking.
        ({**PAGE, "content-type": "application/x-www-form-urlencoded"}, 415),
        ({**PAGE, "content-type": "text/plain"}, 415),
        ({**PAGE, "content-type": "text/plain; +json"}, 415),
        ({**PAGE, "content-type": "multipart/form-data; boundary=application/json"}, 415),
        ({**PAGE, "content-type": ""}, 415),
        ({**PAGE, "content-type": "text/plain, application/json"}, 415),
        # Browsers ask before they send this, and get no leave. The playground's are of this kind.
        ({**PAGE, **JSON}, 200),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin", **JSON}, 200),
    ],
)
async def test_what_a_page_sends_unasked_is_no_request(
    app: App, path: str, headers: dict[str, str], status: int
) -> None:
    answer = await app.ask("POST", path, headers=headers, body=BODIES[path])
    assert answer.status_code == status
    assert bool(app.frontend.seen) == (status == 200)
    if status == 415:
        assert "application/json" in answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_wrong_type_is_refused_but_by_ollamas_routes(app: App, path: str) -> None:
    """The type is what `curl -d` sends, as in Ollama's own documentation."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = await app.ask("POST", path, headers=form, body=BODIES[path])
    assert answer.status_code == (200 if path == "/api/chat" else 415)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "a/b", ""])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "none"}, 200),
        (PAGE, 415),
        ({"origin": "null"}, 415),
        ({"sec-fetch-site": "same-site"}, 415),
        ({"sec-fetch-site": "same-origin"}, 415),
        ({"user-agent": "Mozilla/5.0"}, 415),
    ],
)
async def test_ollama_reads_any_type_of_programs_and_none_of_pages(
    app: App, kind: str, headers: dict[str, str], status: int
) -> None:
    sent: Any = {"messages": [{"role": "user", "content": "hi"}], "stream": False}
    types = {"content-type": kind}
    answer = await app.ask("POST", "/api/chat", headers=headers | types, body=sent)
    assert answer.status_code == status
    assert bool(app.frontend.seen) == (status == 200)
    refused = await app.ask("POST", "/api/pull", headers=headers | types, body={"model": "x"})
    assert refused.status_code == (415 if status == 415 else 400)


@pytest.mark.parametrize("keyed", [False, True])
async def test_no_answer_lets_another_site_read_it(kept: Kept, keyed: bool) -> None:
    key = kept.new("acme", operator=True)
    app = App(kept.authenticator()) if keyed else App(OpenAuthenticator(), hosts=LOCAL)
    shown = {"authorization": f"Bearer {key}"} if keyed else {}
    asked = {
        **PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization",
        "access-control-request-private-network": "true",
    }
    answers = [await app.ask("OPTIONS", path, headers=asked) for path in (*READS, *BODIES)]
    assert not any(answer.is_success for answer in answers)
    answers += [await app.ask("GET", path, headers={**PAGE, **shown}) for path in READS]
    for path, body in BODIES.items():
        headers = {**PAGE, **shown, **JSON}
        answers.append(await app.ask("POST", path, headers=headers, body=body))
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_metrics_are_an_operators(kept: Kept) -> None:
    keys = {"tenant": kept.new("acme"), "operator": kept.new("staff", operator=True)}
    shown = {who: {"authorization": f"Bearer {key}"} for who, key in keys.items()}
    app = App(kept.authenticator())
    for method in ("GET", "HEAD"):
        assert (await app.ask(method, "/metrics")).status_code == 401
        refused = await app.ask(method, "/metrics", headers=shown["tenant"])
        assert refused.status_code == 403
    assert (await app.ask("GET", "/metrics", headers=shown["tenant"])).json()["error"]["code"] == (
        "operator_key_required"
    )
    whole = await app.ask("GET", "/metrics", headers=shown["operator"])
    assert whole.status_code == 200 and 'baton_tenant_work_total{tenant="acme"}' in whole.text
    assert whole.headers["x-content-type-options"] == "nosniff"


async def test_metrics_name_tenants_to_an_operator_alone(kept: Kept) -> None:
    staff = kept.new("staff", operator=True)
    app = App(kept.authenticator(), token="t0ken")
    answer = await app.ask("GET", "/metrics", headers={"authorization": "Bearer t0ken"})
    assert answer.status_code == 200 and "baton_work_total" in answer.text
    assert "acme" not in answer.text
    answer = await app.ask("GET", "/metrics", headers={"authorization": f"Bearer {staff}"})
    assert "acme" in answer.text


async def test_without_keys_there_are_no_other_tenants() -> None:
    app = App(OpenAuthenticator(public=True), hosts=AllowedHosts("0.0.0.0:8000"))
    answer = await app.ask("GET", "/metrics", host="10.0.0.7:8000")
    assert answer.status_code == 200 and "baton_tenant_work_total" in answer.text
