"""The playground on a real Baton: text as it comes, where the time went, who served."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.browser.page import Page
from tests.e2e.relay import Relay

pytestmark = pytest.mark.browser

STORY = "Tell me a long story."


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    running = Relay(tmp_path_factory.mktemp("playground"))
    yield running
    running.close()


def numbers(page: Page, selector: str) -> list[float]:
    """Of the newest turn."""
    found = [element.text for element in page.all(f".turn:last-child {selector}")]
    return [float(number) for text in found for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_an_answer_streams_and_is_explained(relay: Relay, page: Page) -> None:
    page.open(relay.http)
    page.ready()
    page.ask(STORY)
    page.answered(1)
    story = page.text(".text")
    lengths = [len(text) for text in page.seen()]
    assert len(story) > 200
    assert len({length for length in lengths if 0 < length < len(story)}) >= 3, "piece by piece"
    first_ms, speed, tokens = numbers(page, ".tile dd")
    assert first_ms > 0 and speed > 0 and tokens > 40
    roles = [item.text.split()[0] for item in page.all(".workers li")]
    assert set(roles) >= {"tokenizer", "decode", "detokenizer"}
    places = {process["grpc"] for process in relay.processes() if process["role"] in roles}
    shown = {item.text.split()[1] for item in page.all(".workers li")}
    assert shown <= places
    page.until("document.querySelector('.reason')")
    assert page.text(".reason").endswith(".")
    for bar in page.all(".turn .bar"):
        parts = [part.size["width"] for part in bar.find_elements("css selector", ".part")]
        assert sum(parts) > 0.9 * bar.size["width"]


def test_a_conversation_shows_its_growing_cache(relay: Relay, page: Page) -> None:
    page.open(relay.http)
    page.ready()
    found = []
    for turn in range(1, 4):
        page.ask(STORY)
        page.answered(turn)
        found.append(numbers(page, ".meter.decode .number")[0])
    assert found[0] < found[1] < found[2]
    page.find("#new").click()
    assert page.all(".turn") == []
    page.find("#chats-list .choose").click()
    page.answered(3)
    assert numbers(page, ".meter.decode .number")[0] == found[2]


def test_a_phone_scrolls_in_one_direction(relay: Relay, page: Page) -> None:
    page.open(relay.http, width=360, height=740, phone=True)
    page.ready()
    assert page.fits()
    page.ask(STORY)
    page.answered(1)
    assert page.fits()
    assert not page.find(".tiles").is_displayed()
    page.find(".beside > summary").click()
    assert page.find(".tiles").is_displayed() and page.find(".workers").is_displayed()
    assert page.fits()
    for panel in ("settings", "chats"):
        page.find(f"#toggle-{panel}").click()
        assert page.find(f"#{panel}").is_displayed()
        assert page.fits()
