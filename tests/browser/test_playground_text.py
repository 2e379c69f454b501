"""Text in the playground: Markdown, the same however it arrives, and attacks that stay text."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Frontend
from tests.browser.page import Page

pytestmark = pytest.mark.browser

TOUR = """\
# Title *one*

A **bold** word, `code`, ~~gone~~, [a link](https://example.com/a?b=1&c=2), a\\*b
and 1 &lt; 2 &#169;.
A second line, and <https://example.org/>.

1. one
   - nested
     ```sh
     ls -l
     ```
2. two

- [x] done
- [ ] open

| left | middle | right |
|:-----|:------:|------:|
| 1 | `2` | **3** |

> quoted
> > twice

~~~python x
def f():
    return "```"

~~~

---

    indented

See [the reference][r] and ![an image](https://example.com/i.png).

[r]: https://example.com/reference

```
never closed
"""

ATTACKS = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked=1'>",
    "<svg/onload=window.hacked=1>",
    "[a](javascript:window.hacked=1)",
    "[a](JaVaScRiPt:window.hacked=1)",
    "[a](java\tscript:window.hacked=1)",
    "[a](&#106;avascript:window.hacked=1)",
    "[a](data:text/html,<script>window.hacked=1</script>)",
    "[a](vbscript:x) [b](file:///etc/passwd) [c](//evil.example/x) [d](../requests/1)",
    '[a](https://example.com/"onmouseover="window.hacked=1)',
    "![a](javascript:window.hacked=1)",
    "![a](https://evil.example/pixel.png)",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<a href='javascript:window.hacked=1'>x</a>",
    "<style>body{display:none}</style>",
    '```"><img src=x onerror=window.hacked=1>\nx\n```',
    "[x]: javascript:window.hacked=1\n\n[x]",
    "[__proto__]\n\n[__proto__]: https://example.com\n\n[constructor] [toString]",
    "<javascript:window.hacked=1>",
    "| <img src=x onerror=window.hacked=1> |\n|-|\n| <script>window.hacked=1</script> |",
    "\u202egnp.exe \u2066 \x00 \ufeff",
    "<base href='https://evil.example/'><form action='https://evil.example'><input></form>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=window.hacked=1>",
)

MARKUP = "document.querySelector('.turn:last-child .text').innerHTML"
STRANGE = (
    "document.querySelectorAll('#log :is(script,img,svg,iframe,style,base,form,object,math,link),"
    " #log [onerror], #log [onclick], #chats-list :is(img,script,svg)').length"
)
ADDRESSES = "return [...document.querySelectorAll('#log a')].map((link) => link.href)"


def answer(page: Page, frontend: Frontend, text: str, pieces: int) -> str:
    """Returns the markup of an answer that arrives in pieces."""
    frontend.text, frontend.pieces = text, pieces
    page.find("#new").click()
    page.ask("go")
    page.answered(1)
    return str(page.run(f"return {MARKUP}"))


def test_markdown_is_shown_as_such(page: Page, url: str, frontend: Frontend) -> None:
    page.open(url)
    page.ready()
    answer(page, frontend, TOUR, 7)
    for selector in (
        "h3 em", "strong", "p > code", "del", "ol > li > ul .code pre", "li.task input:checked",
        "th.to-right", "td.to-center code", "blockquote blockquote", "hr", ".code pre",
    ):  # fmt: skip
        assert page.all(f".text {selector}"), selector
    codes = page.run("return [...document.querySelectorAll('.text pre')].map((p) => p.textContent)")
    assert codes[1:] == ['def f():\n    return "```"\n\n', "indented", "never closed\n"]
    assert "a*b\nand 1 < 2 ©." in page.text(".text")
    assert page.run(ADDRESSES) == [
        "https://example.com/a?b=1&c=2",
        "https://example.org/",
        "https://example.com/reference",
        "https://example.com/i.png",
    ]
    for link in page.all(".text a"):
        assert link.get_attribute("target") == "_blank"
        assert set(str(link.get_attribute("rel")).split()) >= {"noopener", "noreferrer"}


LONG = "\n\n".join(
    [
        "- item with *words*\n" * 1500,
        "```\n" + "a line of code\n\n" * 3000 + "```",
        "word " * 8000,
        *[f"## Part {number}\n\nSome **text** of it." for number in range(400)],
    ]
)


@pytest.mark.parametrize("text", [TOUR, LONG], ids=["tour", "long"])
def test_it_does_not_matter_how_an_answer_arrives(
    page: Page, url: str, frontend: Frontend, text: str
) -> None:
    page.open(url)
    page.ready()
    pieces = (1, 7, 1 << 20) if text is TOUR else (1009, 1 << 20)
    shown = {answer(page, frontend, text, size) for size in pieces}
    assert len(shown) == 1
    page.kept(len(pieces))
    page.open(url)
    page.ready()
    page.until("document.querySelector('#chats-list .choose')")
    page.find("#chats-list .choose").click()
    page.answered(1)
    assert page.run(f"return {MARKUP}") in shown, "nor whether it is opened again"


def test_attacks_are_text(page: Page, url: str, frontend: Frontend) -> None:
    """As answers, as messages, and as titles of conversations."""
    page.open(url)
    page.ready()
    for count, attack in enumerate(ATTACKS, 1):
        frontend.text, frontend.pieces = f"\n\n{attack}\n\nThe end.", 1 << 20
        page.find("#new").click()
        page.run(f"document.getElementById('prompt').value = {attack!r}.trim() || 'x'")
        page.find("#send").click()
        page.answered(1)
        page.kept(count)
        assert page.text(".text").endswith("The end."), attack
        assert page.run(f"return {STRANGE}") == 0, attack
        for address in page.run(ADDRESSES):
            assert address.startswith(("https://example.com/", "https://evil.example/pixel.png"))
    assert page.run("return window.hacked") is None
    titles = [title.text for title in page.all("#chats-list .title")]
    assert "<script>window.hacked = 1</script>" in titles


@pytest.mark.parametrize(
    "text",
    [
        ">" * 20_000,
        "> " * 10_000,
        "1. " * 8_000,
        "*a **b " * 5_000,
        "[" * 20_000,
        "`a" * 10_000,
        "a." * 10_000 + "@",
        "_a" * 10_000,
        "\n" * 40_000,
        "|a" * 10_000 + "\n" + "|-" * 10_000,
    ],
    ids=["quotes", "spaced quotes", "lists", "stars", "brackets", "ticks", "mail", "underscores",
         "lines", "table"],
)  # fmt: skip
def test_text_that_is_hard_to_parse_is_shown(
    page: Page, url: str, frontend: Frontend, text: str
) -> None:
    page.open(url)
    page.ready()
    answer(page, frontend, f"\n\n{text}\n\nThe end.", 1 << 20)
    assert page.text(".text").endswith("The end.")


def test_a_long_answer_is_shown_and_kept(page: Page, url: str, frontend: Frontend) -> None:
    page.open(url)
    page.ready()
    text = "".join(f"Line {number} of *many* lines.\n\n" for number in range(36_000))
    assert len(text) > 1_000_000
    answer(page, frontend, text, 5003)
    assert page.run("return document.querySelectorAll('.text p').length") >= 36_000
    assert page.fits()
    page.kept(1)
    page.open(url)
    page.ready()
    page.until("document.querySelector('#chats-list .choose')")
    page.find("#chats-list .choose").click()
    page.answered(1)
    assert "Line 35999 of many lines." in page.text(".text p:last-child")
