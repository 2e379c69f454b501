"""What the playground keeps in the browser; the page by keyboard and for screen readers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from batonlm.core.request.request import ChatPrompt
from tests.browser.conftest import Frontend
from tests.browser.page import PATIENCE_S, Page

pytestmark = pytest.mark.browser
Keys = pytest.importorskip("selenium.webdriver").Keys


def titles(page: Page) -> list[str]:
    return [title.text for title in page.all("#chats-list .title")]


def with_store(page: Page, script: str) -> Any:
    """Runs a script that has `store`, the page's own conversations; returns its result."""
    return page.browser.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "import('/playground/store.js').then(async ({ Store, newRow }) => {"
        f" const store = new Store(); done(await (async () => {{ {script} }})());"
        "}).catch((error) => done(`failed: ${error.message}`));"
    )


def test_conversations_are_kept_chosen_and_continued(
    page: Page, url: str, frontend: Frontend
) -> None:
    page.open(url)
    page.ready()
    page.find("#toggle-settings").click()
    page.find("#system").send_keys("be brief")
    page.ask("first")
    page.answered(1)
    page.find("#new").click()
    page.find("#system").clear()
    page.ask("second")
    page.answered(1)
    assert titles(page) == ["second", "first"]
    page.open(url)
    page.ready()
    page.kept(2)
    assert not page.all(".turn")
    page.click(".choose", "first")
    page.answered(1)
    assert page.text(".prompt") == "first"
    assert page.text(".reason"), "with what the relay did"
    page.ask("third")
    page.answered(2)
    assert titles(page) == ["first", "second"]
    prompt = frontend.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    contents = [message.content for message in prompt.messages]
    assert contents[:2] == ["be brief", "first"] and contents[-1] == "third"


def test_an_answer_that_the_page_did_not_see_the_end_of_is_kept(
    page: Page, url: str, frontend: Frontend
) -> None:
    frontend.hold = True
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.text')?.textContent === '0'")
    page.kept(1)
    page.open(url)
    page.ready()
    page.kept(1)
    page.find(".choose").click()
    page.until("document.querySelector('.notes')?.textContent.includes('closed')")
    assert page.text(".prompt") == "hello"


def test_a_conversation_is_renamed_exported_and_deleted(
    page: Page, url: str, tmp_path: Path
) -> None:
    page.browser.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    page.open(url)
    page.ready()
    page.ask("hello")
    page.answered(1)
    page.click(".current button", "Rename")
    page.keys("A title <b>of mine</b>", Keys.ENTER)
    page.until("document.querySelector('.title')?.textContent === 'A title <b>of mine</b>'")
    page.until("document.title.startsWith('A title <b>')")
    page.click(".current button", "Rename")
    page.keys("not this one", Keys.ESCAPE)
    page.until("document.querySelector('.title')?.textContent === 'A title <b>of mine</b>'")
    page.click(".current button", "Export")
    exported = tmp_path / "A-title-b-of-mine-b-.json"
    deadline = time.monotonic() + PATIENCE_S
    while not exported.exists():
        assert time.monotonic() < deadline, list(tmp_path.iterdir())
        time.sleep(0.05)
    document = json.loads(exported.read_text())
    assert document["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": page.text(".text")},
    ]
    page.ask("more")
    page.answered(2)
    assert titles(page) == ["A title <b>of mine</b>"], "a new title is no other conversation"
    page.click(".current button", "Delete")
    assert "A title" in page.text("#confirm p")
    page.keys(Keys.ESCAPE)
    page.kept(1)
    page.click(".current button", "Delete")
    page.click("#confirm button", "Delete")
    page.kept(0)
    assert not page.all(".turn")


def test_a_deleted_conversation_does_not_come_back_with_its_answer(
    page: Page, url: str, frontend: Frontend
) -> None:
    frontend.hold = True
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.text')?.textContent === '0'")
    page.kept(1)
    page.find("#delete-all").click()
    page.click("#confirm button", "Delete")
    page.kept(0)
    frontend.hold = False
    page.ask("another")
    page.answered(1)
    page.kept(1)
    assert titles(page) == ["another"]


def test_the_oldest_of_too_many_conversations_goes(page: Page, url: str) -> None:
    page.open(url)
    page.ready()
    made = with_store(
        page,
        "for (let n = 0; n < 200; n += 1)"
        " await store.save({ ...newRow(`old ${n}`), usedAt: 1000 + n }, { turns: [] });"
        "return (await store.list()).length;",
    )
    assert made == 200
    page.ask("new")
    page.answered(1)
    page.kept(200)
    assert titles(page)[:2] == ["new", "old 199"]
    assert "old 0" not in titles(page) and "old 1" in titles(page)
    assert page.fits()


def test_what_two_tabs_saved_is_kept_twice(page: Page, url: str) -> None:
    page.open(url)
    saved = with_store(
        page,
        "const row = newRow('one');"
        "const first = await store.save(row, { turns: [1] });"
        "const other = await store.save(row, { turns: [2] });"
        "const again = await store.save(first, { turns: [3] });"
        "return [first, other, again].map(({ id, revision }) => [id === row.id, revision])"
        " .concat([(await store.list()).length]);",
    )
    assert saved == [[True, 1], [False, 1], [True, 2], 2]


def test_full_storage_is_told_and_the_conversation_goes_on(
    page: Page, url: str, frontend: Frontend
) -> None:
    page.open(url)
    page.ready()
    quota = {"origin": url, "quotaSize": 1}
    page.browser.execute_cdp_cmd("Storage.overrideQuotaForOrigin", quota)
    frontend.text = "many words " * 100
    page.ask("hello")
    page.answered(1)
    page.until("!document.getElementById('notice').hidden")
    assert "storage is full" in page.text("#notice-text")
    page.browser.execute_cdp_cmd("Storage.overrideQuotaForOrigin", {"origin": url})
    frontend.text = "short"
    page.ask("and now")
    page.answered(2)
    page.kept(1)


def test_a_browser_that_keeps_nothing_says_so(page: Page, url: str) -> None:
    """Such as one in its private mode, or with storage forbidden for this page."""
    refuse = (
        "indexedDB.open = () => { throw new DOMException('no', 'SecurityError'); };"
        "Storage.prototype.getItem = Storage.prototype.setItem = indexedDB.open;"
    )
    added = page.browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": refuse}
    )
    try:
        page.open(url)
        page.ready()
        page.ask("hello")
        page.answered(1)
        page.ask("and")
        page.answered(2)
        assert "keeps no conversations" in page.text("#notice-text")
        page.click("#notice-close")
        assert not page.find("#notice").is_displayed()
    finally:
        page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_the_list_keeps_focus_and_typing_while_it_changes(page: Page, url: str) -> None:
    page.open(url)
    page.ready()
    page.ask("hello")
    page.answered(1)
    page.run("document.querySelector(`[aria-label='Export hello']`).focus()")
    with_store(page, "await store.save(newRow('of another tab'), { turns: [] });")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.kept(2)
    assert page.focused() == "Export hello"
    page.click(".current button", "Rename")
    page.keys("half a ti")
    with_store(page, "await store.save(newRow('one more'), { turns: [] });")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.keys("tle", Keys.ENTER)
    page.kept(3)
    assert "half a title" in titles(page)


def test_a_message_and_a_code_block_are_copied(page: Page, url: str, frontend: Frontend) -> None:
    page.browser.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    frontend.text = "Some *text*.\n\n```py\nprint(1)\n```\n"
    page.open(url)
    page.ready()
    page.ask("hello")
    page.answered(1)
    for label, copied in (
        ("Copy the code", "print(1)\n"),
        ("Copy the answer", frontend.text),
        ("Copy this message", "hello"),
    ):
        page.find(f"[aria-label='{label}']").click()
        page.until(f"document.querySelector(`[aria-label='{label}']`).textContent === 'Copied'")
        read = page.browser.execute_async_script(
            "navigator.clipboard.readText().then(arguments[arguments.length - 1])"
        )
        assert read == copied


def test_everything_is_reached_by_the_keyboard(page: Page, url: str) -> None:
    page.open(url)
    page.ready()
    assert page.focused() == "prompt"
    page.keys("hello", Keys.ENTER)
    page.answered(1)
    assert page.focused() == "prompt", "the focus stays where the next message is typed"
    page.run("document.querySelector('a, button, input, select, textarea').focus()")
    met = [page.focused()]
    while met[-1] != "prompt" and len(met) < 40:
        page.keys(Keys.TAB)
        met.append(page.focused())
    assert met[0] == "To the message box"
    wanted = ["toggle-chats", "new", "toggle-settings", "hello", "Rename hello", "Export hello"]
    wanted += ["Delete hello", "delete-all", "Edit this message", "Copy the answer", "Regenerate"]
    assert [name for name in met if name in wanted] == wanted
    page.run("document.querySelector('.skip').focus()")
    page.keys(Keys.ENTER)
    assert page.focused() == "prompt"


def test_a_panel_over_a_phones_page_takes_the_focus_and_gives_it_back(page: Page, url: str) -> None:
    page.open(url, width=375, height=740, phone=True)
    page.ready()
    page.ask("hello")
    page.answered(1)
    page.find("#toggle-settings").click()
    assert page.run("return document.querySelector('main').inert")
    page.find("#toggle-chats").click()
    assert not page.find("#settings").is_displayed() and page.find("#chats").is_displayed()
    page.keys(Keys.ESCAPE)
    assert not page.find("#chats").is_displayed()
    assert not page.run("return document.querySelector('main').inert")
    assert page.focused() == "toggle-chats"
    page.find("#toggle-chats").click()
    page.find("#chats-list .choose").click()
    assert not page.find("#chats").is_displayed(), "the chosen one is seen"


def test_all_controls_have_names_and_roles(page: Page, url: str, frontend: Frontend) -> None:
    frontend.text = "```py\nx\n```\n\n| a |\n|-|\n| b |\n\n- [ ] c\n"
    page.open(url)
    page.ready()
    page.ask("hello")
    page.answered(1)
    page.find("#toggle-settings").click()
    for element in page.all("button, input, textarea, select, summary, [tabindex='0']"):
        if element.is_displayed() and element.get_attribute("type") != "checkbox":
            assert element.accessible_name, element.get_attribute("outerHTML")
    roles = {one.aria_role for one in page.all("header, nav, main, aside, [role=log], #status")}
    assert roles >= {"banner", "navigation", "main", "complementary", "log", "status"}
    assert page.find("#status").get_attribute("aria-live") == "polite"
    page.until("document.getElementById('status').textContent.startsWith('Answer: ')")


def test_reduced_motion_is_respected(page: Page, url: str, frontend: Frontend) -> None:
    frontend.hold = True
    page.open(url)
    page.ready()
    page.ask("hello")
    page.until("document.querySelector('.text')?.textContent === '0'")
    blinking = (
        "return getComputedStyle(document.querySelector('.text > :last-child'), '::after')"
        ".animationName"
    )
    assert page.run(blinking) == "blink"
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    assert page.run(blinking) == "none"
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.keys(Keys.ESCAPE)
    page.until("document.querySelector('.turn[data-state]')")
