"""The playground over scripted answers: settings, stop, edit, again, refusals, keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.api_keys import KeyBook, TenantLimits, render
from batonlm.core.errors import Overloaded, Unavailable
from batonlm.core.request.request import ChatPrompt
from batonlm.router.api.access import KeyAuthenticator
from tests.browser.conftest import Frontend, Line, serving
from tests.browser.page import Page
from tests.services.router_http.scripted import whole_answer

pytestmark = pytest.mark.browser
Keys = pytest.importorskip("selenium.webdriver").Keys


def test_the_settings_are_what_is_asked(page: Page, url: str, frontend: Frontend) -> None:
    page.open(url)
    page.ready()
    page.find("#toggle-settings").click()
    page.find("#system").send_keys("be brief")
    page.find("#seed").send_keys(str(2**64 - 1))
    page.find("#max_completion_tokens").send_keys("90")
    page.find("#top_k").send_keys("3")
    page.find("#stop_text").send_keys("zzz\n\nyyy")
    page.ask("hello")
    page.answered(1)
    page.ask("again")
    page.answered(2)
    first, second = frontend.seen
    assert (first.seed, first.max_tokens, first.sampling.top_k) == (2**64 - 1, 90, 3)
    assert first.stop_strings == ("zzz", "yyy")
    assert first.sampling.temperature == pytest.approx(0.7)
    assert isinstance(second.prompt, ChatPrompt)
    said = [(message.role, message.content) for message in second.prompt.messages]
    assert said == [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", whole_answer("<system>be brief<user>hello", 0)),
        ("user", "again"),
    ]


def test_a_setting_that_cannot_be_sent_is_shown(page: Page, url: str, frontend: Frontend) -> None:
    page.open(url)
    page.ready()
    page.find("#toggle-settings").click()
    page.find("#seed").send_keys("-1")
    page.find("#toggle-settings").click()
    page.ask("hello")
    page.until("document.activeElement.id === 'seed'")
    assert page.find("#prompt").get_attribute("value") == "hello"
    page.find("#seed").clear()
    page.find("#send").click()
    page.answered(1)
    assert [request.seed for request in frontend.seen] == [None]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_keeps_what_was_said(page: Page, url: str, frontend: Frontend, way: str) -> None:
    frontend.hold = True
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.text')?.textContent === '0'")
    if way == "button":
        page.find("#stop").click()
    else:
        page.keys(Keys.ESCAPE)
    page.until("document.querySelector('.notes')?.textContent === 'Stopped.'")
    assert page.find("#send").is_displayed()
    frontend.hold = False
    page.ask("and")
    page.answered(2)
    prompt = frontend.seen[1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message.content for message in prompt.messages] == ["hello", "0", "and"]


def test_an_edited_message_replaces_what_followed(page: Page, url: str, frontend: Frontend) -> None:
    page.open(url)
    page.ready()
    for turn, text in enumerate(("one", "two", "three"), 1):
        page.ask(text)
        page.answered(turn)
    page.find(".turn:nth-child(2) [aria-label='Edit this message']").click()
    page.keys(Keys.ESCAPE)
    assert [found.text for found in page.all(".prompt")] == ["one", "two", "three"]
    assert page.focused() == "Edit this message"
    page.keys(Keys.ENTER)
    page.keys(" and a half", Keys.ENTER)
    page.answered(2)
    assert [found.text for found in page.all(".prompt")] == ["one", "two and a half"]
    assert page.focused() == "prompt"
    prompt = frontend.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    said = [message.content for message in prompt.messages]
    assert (said[0], said[-1], len(said)) == ("one", "two and a half", 3)


def test_an_edit_stops_the_answer_that_runs(page: Page, url: str, frontend: Frontend) -> None:
    frontend.hold = True
    page.open(url)
    page.ready()
    page.ask("one")
    page.until("document.querySelector('.text')?.textContent === '0'")
    frontend.hold = False
    page.find("[aria-label='Edit this message']").click()
    page.keys(" more", Keys.ENTER)
    page.answered(1)
    assert page.text(".text") == whole_answer("<user>one more", 0)


def test_the_newest_answer_is_made_again(page: Page, url: str, frontend: Frontend) -> None:
    page.open(url)
    page.ready()
    page.ask("one")
    page.answered(1)
    page.ask("two")
    page.answered(2)
    again = [found for found in page.all(".again") if found.is_displayed()]
    assert [found.text for found in again] == ["Regenerate"], "only of the newest"
    frontend.text = "Something else."
    again[0].click()
    page.until("document.querySelectorAll('.text')[1]?.textContent === 'Something else.'")
    page.answered(2)
    assert frontend.seen[-1].prompt == frontend.seen[-2].prompt


def test_a_router_that_goes_away_leaves_what_was_said(
    page: Page, line: Line, frontend: Frontend
) -> None:
    frontend.hold = True
    page.open(line.url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.text')?.textContent === '0'")
    line.cut()
    page.until("document.querySelector('.failure')")
    assert page.text(".failure p") == "The connection broke."
    assert page.text(".text") == "0"
    page.click(".failure button", "Try again")
    page.until("document.querySelector('.failure p')?.textContent.includes('does not answer')")
    line.make()
    frontend.hold = False
    page.click(".failure button", "Try again")
    page.answered(1)
    assert page.text(".text") == whole_answer("<user>hello", 0)
    assert all("net::ERR_" in complaint for complaint in page.complaints())


def test_an_answer_arrives_over_a_slow_network(page: Page, line: Line, frontend: Frontend) -> None:
    line.edge.back.delay_s, line.edge.back.bytes_per_s = 0.2, 200_000
    page.open(line.url)
    page.ready()
    page.ask("hello")
    page.answered(1)
    assert page.text(".text") == whole_answer("<user>hello", 0)


def test_a_failure_in_the_middle_is_told_by_the_router(
    page: Page, url: str, frontend: Frontend
) -> None:
    frontend.failure = Unavailable("The last worker is lost.", retry_after_s=1.0)
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.failure')")
    assert page.text(".failure p") == "The last worker is lost."
    page.until("document.querySelector('.reason')")
    page.answered(1)


def test_a_model_is_waited_for(page: Page, url: str, frontend: Frontend) -> None:
    frontend.names = []
    page.open(url)
    page.until("!document.getElementById('notice').hidden")
    assert "No model is served yet" in page.text("#notice-text")
    frontend.names = ["org/scripted", "another"]
    page.ready()
    page.until("document.getElementById('notice').hidden")
    assert [option.text for option in page.all("#model option")] == frontend.names
    page.find("#model").send_keys("another")
    page.ask("hello")
    page.until("document.querySelector('.failure')")
    assert frontend.seen[0].model == "another"
    assert len(page.complaints()) == 1


def test_overload_says_when_to_come_back(page: Page, url: str, frontend: Frontend) -> None:
    frontend.refusal = Overloaded("The queue is full.", retry_after_s=1.0)
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.failure button')?.textContent.startsWith('Try again')")
    assert page.text(".failure p") == "The queue is full."
    assert not page.all(".notes .hint")
    frontend.refusal = None
    page.until("!document.querySelector('.failure button').disabled")
    page.find(".failure button").click()
    page.answered(1)
    assert page.text(".text") == whole_answer("<user>hello", 0)
    assert len(page.all(".turn")) == 1
    (complaint,) = page.complaints()
    assert "429" in complaint


def test_a_key_is_asked_for_where_one_is_needed(
    page: Page, tmp_path: Path, frontend: Frontend
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


def test_the_relay_is_explained_beside_the_answer(page: Page, url: str) -> None:
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.reason')")
    assert page.text(".reason")
    assert page.all(".bar .of-decode") and "seed 7" in page.text(".numbers")
    assert not page.all(".explained > *")
    page.find(".why summary").click()
    page.until("document.querySelectorAll('.explained h4').length === 2")
    said = page.text(".explained")
    for part in ("Attempt 0: failed", "decode dddddddd", "picked", "not serving (starting)"):
        assert part in said, said
    assert "Lost at decode after 1.00 s" in said


def test_older_answers_numbers_take_one_line(page: Page, url: str) -> None:
    page.open(url)
    page.ready()
    for turn in (1, 2):
        page.ask("hello")
        page.answered(turn)
    assert [tiles.is_displayed() for tiles in page.all(".tiles")] == [False, True]
    page.find(".beside > summary").click()
    assert [tiles.is_displayed() for tiles in page.all(".tiles")] == [True, True]


def test_a_router_without_timings_says_so(page: Page, url: str, frontend: Frontend) -> None:
    frontend.stages = None
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.beside .hint')?.textContent.includes('no timings')")
