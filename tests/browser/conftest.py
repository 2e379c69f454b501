"""A headless Chromium that reaches this machine only, and a router's HTTP face to look at."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_loadtest.chaos.streams.network import Edge, Proxy
from batonlm.cli.ports import free_ports
from batonlm.core.admission.tenants import Tenant
from batonlm.core.observe.request_record import RequestRecord
from batonlm.core.observe.stages import StageTimes
from batonlm.core.request.model import ModelDescription
from batonlm.core.request.request import Delta, Event, Request
from batonlm.router.api.access import Authenticator, OpenAuthenticator
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import playground_routes
from batonlm.router.api.http.server import serve_http
from tests.browser.page import Page
from tests.cli.test_explain import disturbed
from tests.services.router_http.scripted import MODEL, Scripted, http_app
from tests.services.router_http.test_timings import TIMES

PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Debian's own, by its own driver: nothing is downloaded."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("there is no chromium and chromedriver here")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "disable-component-update",
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    """Without any error on the console at the end but those that the test took."""
    opened = Page(chromium)
    yield opened
    complaints = opened.complaints()
    opened.leave()
    assert complaints == []


@dataclass
class Frontend(Scripted):
    """Scripted answers whose requests are all recorded."""

    stages: StageTimes | None = TIMES
    text: str | None = None
    """Answered instead of the scripted text."""
    pieces: int = 7
    """Characters of `text` a piece."""
    names: list[str] = field(default_factory=lambda: [MODEL.name])
    """Of the models served."""

    def models(self) -> list[ModelDescription]:
        return [replace(MODEL, name=name) for name in self.names]

    def explain(self, request_id: str, tenant: Tenant) -> RequestRecord:
        if self.record is None:
            self.record = disturbed()
        self.record.request_id = request_id
        return self.record

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        async for event in super()._events(request):
            if self.text is None or not isinstance(event, Delta):
                yield event
            elif event.finish_reason is not None:
                for at in range(0, len(self.text), self.pieces):
                    yield Delta(0, self.text[at : at + self.pieces], (65,))
                yield event


@pytest.fixture
def frontend() -> Frontend:
    return Frontend()


@pytest.fixture
def url(frontend: Frontend) -> Iterator[str]:
    with serving(frontend, OpenAuthenticator()) as url:
        yield url


Call = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def on_a_loop() -> Iterator[Call]:
    """Runs coroutines on an event loop of its own, on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    try:
        yield call
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def serving(frontend: Scripted, authenticator: Authenticator) -> Iterator[str]:
    """The router's HTTP face over scripted answers; gives its URL."""
    pages = playground_routes()
    http_access = HttpAccess(authenticator, pages=[page.path for page in pages])
    app = http_app(frontend, CollectorRegistry(), http_access, pages)
    with on_a_loop() as call:
        server = call(serve_http(app, "127.0.0.1:0"))
        try:
            yield f"http://{server.address}"
        finally:
            call(server.close())


class Line:
    """A network between the browser and a router: it can be cut, and made again."""

    def __init__(self, call: Call, url: str) -> None:
        (port,) = free_ports(1)
        self.edge = Edge()
        self.url = f"http://127.0.0.1:{port}"
        self._call = call
        self._proxy = Proxy(f"127.0.0.1:{port}", url.removeprefix("http://"), lambda _: self.edge)

    def make(self) -> None:
        self._call(self._proxy.start())

    def cut(self) -> None:
        """Ends all connections, and refuses others."""
        self._call(self._proxy.close())


@pytest.fixture
def line(url: str) -> Iterator[Line]:
    with on_a_loop() as call:
        line = Line(call, url)
        line.make()
        try:
            yield line
        finally:
            line.cut()
