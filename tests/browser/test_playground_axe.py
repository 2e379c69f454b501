"""What a screen reader needs is there: axe-core finds no violation in any state of the page."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Frontend
from tests.browser.page import Page

pytestmark = pytest.mark.browser

VERSION = "4.14.1"
INSTALL_S = 300
_RUN = """
const done = arguments[arguments.length - 1];
const word = (one) => `${one.id}: ${one.nodes.map((node) => node.target.join(' ')).join(', ')}`;
axe.run().then((found) => done(found.violations.map(word)), (error) => done([String(error)]));
"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--silent", "--prefix", str(folder), f"axe-core@{VERSION}"]
    try:
        subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("there is no npm here, or no registry")
    return Path(folder / "node_modules/axe-core/axe.min.js").read_text()


def violations(page: Page, axe: str) -> list[str]:
    page.run(axe)
    return list(page.browser.execute_async_script(_RUN))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_missing(
    page: Page, url: str, frontend: Frontend, axe: str, scheme: str, width: int
) -> None:
    frontend.text = (
        "# A list\n\n- one\n- `two`\n\n```python\nprint('three')\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    features: list[dict[str, Any]] = [{"name": "prefers-color-scheme", "value": scheme}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.open(url, width=width, phone=width < 500)
    page.ready()
    assert violations(page, axe) == []
    page.ask("hello")
    page.answered(1)
    assert violations(page, axe) == []
    page.find("#toggle-settings").click()
    assert violations(page, axe) == []
