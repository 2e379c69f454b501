"""The playground in a browser, as a person uses it."""

from __future__ import annotations

import time
from typing import Any

PATIENCE_S = 60.0

_WATCH = """
window.seen = [];
new MutationObserver(() => {
  const answers = document.querySelectorAll('.text');
  if (answers.length) window.seen.push(answers[answers.length - 1].textContent);
}).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true});
"""

_FORGET = """
const done = arguments[arguments.length - 1];
try { localStorage.clear(); sessionStorage.clear(); } catch (error) {}
const request = indexedDB.deleteDatabase('baton');
request.onsuccess = request.onerror = request.onblocked = () => done(true);
"""


class Page:
    """Finds by CSS selectors. Whatever it waits for it waits for at most PATIENCE_S."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def open(self, url: str, *, width: int = 1280, height: int = 860, phone: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.browser.get(url)
        self.browser.execute_script(_WATCH)

    def leave(self) -> None:
        """Deletes what the page has kept in the browser."""
        if self.browser.current_url.startswith("http"):
            self.browser.execute_async_script(_FORGET)
        self.browser.get("about:blank")

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def text(self, selector: str) -> str:
        """Of the last one; empty when there is none."""
        found = self.all(selector)
        return str(found[-1].text) if found else ""

    def click(self, selector: str, label: str = "") -> None:
        """The last visible one, with this text."""
        found = [one for one in self.all(selector) if one.is_displayed() and label in one.text]
        found[-1].click()

    def keys(self, *keys: str) -> None:
        """Presses keys wherever the focus is."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        """The id of the element with the focus, else its accessible name."""
        element = self.browser.switch_to.active_element
        return str(element.get_attribute("id") or element.accessible_name)

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def until(self, script: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.browser.execute_script(f"return Boolean({script})"):
            assert time.monotonic() < deadline, script
            time.sleep(0.02)

    def ready(self) -> None:
        """The models are known."""
        self.until("document.getElementById('model').value")

    def ask(self, text: str) -> None:
        """Types a message and sends it with the Enter key."""
        self.find("#prompt").send_keys(text + "\n")

    def answered(self, turns: int) -> None:
        """All turns are over, with their numbers, kept, and shown to their end."""
        self.until(
            f"document.querySelectorAll('.tiles').length === {turns}"
            f" && document.querySelectorAll('.turn[data-state]').length === {turns}"
            " && [...document.querySelectorAll('.text')].every((text) => text.dataset.shown)"
        )

    def kept(self, conversations: int) -> None:
        """The list has as many."""
        self.until(f"document.querySelectorAll('#chats-list li').length === {conversations}")

    def seen(self) -> list[str]:
        """The newest answer's text at every change of the conversation."""
        return list(self.browser.execute_script("return window.seen"))

    def fits(self) -> bool:
        """Nothing is wider than the window."""
        return bool(
            self.browser.execute_script(
                "return document.documentElement.scrollWidth <= window.innerWidth &&"
                " document.getElementById('scroller').scrollWidth <="
                " document.getElementById('scroller').clientWidth"
            )
        )

    def complaints(self) -> list[str]:
        """What the console has said since the last time."""
        return [entry["message"] for entry in self.browser.get_log("browser")]
