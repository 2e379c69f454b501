"""A headless Chromium that reaches this machine only, and a router's HTTP face to look at."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonlm.router.api.access import Authenticator
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import playground_routes
from batonlm.router.api.http.server import serve_http
from tests.browser.page import Page
from tests.services.router_http.scripted import Scripted, http_app

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


@contextmanager
def serving(frontend: Scripted, authenticator: Authenticator) -> Iterator[str]:
    """The router's HTTP face over scripted answers, on a thread of its own; gives its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    pages = playground_routes()
    http_access = HttpAccess(authenticator, pages=[page.path for page in pages])
    app = http_app(frontend, CollectorRegistry(), http_access, pages)
    try:
        server = on_loop(serve_http(app, "127.0.0.1:0"))
        try:
            yield f"http://{server.address}"
        finally:
            on_loop(server.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
