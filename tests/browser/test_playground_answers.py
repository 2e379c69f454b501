"""The playground over scripted answers: stop, refusals, keys, and text that looks like markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.api_keys import KeyBook, TenantLimits, render
from batonlm.core.errors import Overloaded
from batonlm.core.request.request import ChatPrompt
from batonlm.router.api.access import KeyAuthenticator, OpenAuthenticator
from tests.browser.conftest import serving
from tests.browser.page import Page
from tests.cli.test_explain import disturbed
from tests.services.router_http.scripted import Scripted, whole_answer
from tests.services.router_http.test_timings import TIMES

pytestmark = pytest.mark.browser


@pytest.fixture
def frontend() -> Scripted:
    return Scripted(stages=TIMES)


@pytest.fixture
def url(frontend: Scripted) -> Iterator[str]:
    with serving(frontend, OpenAuthenticator()) as url:
        yield url


def test_the_settings_are_what_is_asked(page: Page, url: str, frontend: Scripted) -> None:
    page.open(url)
    page.ready()
    page.find("#toggle").click()
    page.find("#system").send_keys("be brief")
    page.find("#seed").send_keys("7")
    page.find("#max_completion_tokens").send_keys("90")
    page.find("#top_k").send_keys("3")
    page.find("#stop_text").send_keys("zzz")
    page.ask("hello")
    page.answered(1)
    page.ask("again")
    page.answered(2)
    first, second = frontend.seen
    assert (first.seed, first.max_tokens, first.sampling.top_k) == (7, 90, 3)
    assert first.stop_strings == ("zzz",)
    assert first.sampling.temperature == pytest.approx(0.7)
    assert isinstance(second.prompt, ChatPrompt)
    said = [(message.role, message.content) for message in second.prompt.messages]
    assert said == [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", whole_answer("<system>be brief<user>hello", 0)),
        ("user", "again"),
    ]


def test_markup_is_shown_as_text(page: Page, url: str) -> None:
    page.open(url)
    page.ready()
    asked = '<img src="x" onerror="document.title = 1">'
    page.ask(asked[::-1])
    page.answered(1)
    assert asked in page.text(".text")
    assert page.text(".asked") == asked[::-1]
    assert page.all("#log img") == []


def test_stop_keeps_what_was_said(page: Page, url: str, frontend: Scripted) -> None:
    frontend.hold = True
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.text')?.textContent === '0'")
    page.find("#stop").click()
    page.until("document.querySelector('.notes')?.textContent === 'Stopped.'")
    assert page.find("#send").is_displayed()
    frontend.hold = False
    page.ask("and")
    page.answered(1)
    prompt = frontend.seen[1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message.content for message in prompt.messages] == ["hello", "0", "and"]


def test_overload_says_when_to_come_back(page: Page, url: str, frontend: Scripted) -> None:
    frontend.refusal = Overloaded("The queue is full.", retry_after_s=1.0)
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.failure button')?.textContent.startsWith('Try again')")
    assert page.text(".failure p") == "The queue is full."
    frontend.refusal = None
    page.until("!document.querySelector('.failure button').disabled")
    page.find(".failure button").click()
    page.answered(1)
    assert page.text(".text") == whole_answer("<user>hello", 0)
    assert len(page.all(".turn")) == 1
    (complaint,) = page.complaints()
    assert "429" in complaint


def test_a_key_is_asked_for_where_one_is_needed(
    page: Page, tmp_path: Path, frontend: Scripted
) -> None:
    book, key = KeyBook().with_key("alice", TenantLimits(), "")
    (tmp_path / "keys.json").write_text(render(book))
    with serving(
        frontend, KeyAuthenticator(str(tmp_path / "keys.json"), CollectorRegistry())
    ) as url:
        page.open(url)
        page.until("document.activeElement.id === 'key'")
        page.find("#key").send_keys(key + "\n")
        page.ready()
        page.ask("hello")
        page.answered(1)
        assert frontend.seen[0].tenant.name == "alice"
        page.open(url)
        page.ready()
        (complaint,) = page.complaints()
        assert "401" in complaint


def test_why_it_ran_there_is_asked_for_when_it_is_opened(
    page: Page, url: str, frontend: Scripted
) -> None:
    told = disturbed()
    told.request_id = "00000001"
    frontend.record = told
    page.open(url)
    page.ready()
    page.ask("hello")
    page.answered(1)
    assert not page.all(".explained > *")
    page.find(".why summary").click()
    page.until("document.querySelectorAll('.explained h4').length === 2")
    said = page.text(".explained")
    for part in ("Attempt 0: failed", "decode dddddddd", "picked", "not serving (starting)"):
        assert part in said, said
    assert "Lost at decode after 1.00 s" in said
