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
        self.browser.get("about:blank")

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def text(self, selector: str) -> str:
        """Of the last one; empty when there is none."""
        found = self.all(selector)
        return str(found[-1].text) if found else ""

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
        self.until(f"document.querySelectorAll('.tiles').length === {turns}")

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
