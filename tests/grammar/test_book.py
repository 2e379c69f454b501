"""Compiled grammars are kept as long as they fit, by what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from batonlm.core.request.request import Grammar, GrammarKind
from batonlm.grammar.book import MAX_KEPT_BYTES, GrammarBook
from batonlm.grammar.compiler import load_vocabulary
from tests.grammar.answering import BUNDLED

NUM_SCHEMAS = 160
SLACK_BYTES = 64 << 20
"""For holes in the heap, and for the process itself."""


def large(number: int) -> Grammar:
    """A schema that is like no other, of about 1.5 MB when it is compiled."""
    values = [f"{index * 7919 % 100_000} is some value {number}" for index in range(3000)]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": values}))


BOUNDED = """
import asyncio, sys
from batonlm.grammar.book import GrammarBook
from batonlm.grammar.compiler import load_vocabulary
from tests.grammar.answering import BUNDLED
from tests.grammar.test_book import NUM_SCHEMAS, large

def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096

async def main() -> None:
    book = GrammarBook(load_vocabulary(BUNDLED, special=(), eos_token_ids=(2,)))
    await book.compiled(large(0))
    before = resident()
    for number in range(NUM_SCHEMAS):
        compiled = await book.compiled(large(number))
        matcher = compiled.matcher()
        matcher.allowed([], 0)
    print(resident() - before)
    book.close()

asyncio.run(main())
"""


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_many_large_schemas_take_no_more_than_they_may() -> None:
    ran = subprocess.run([sys.executable, "-c", BOUNDED], check=True, capture_output=True)
    assert int(ran.stdout) < MAX_KEPT_BYTES + SLACK_BYTES


@pytest.fixture
async def book() -> AsyncIterator[GrammarBook]:
    made = GrammarBook(load_vocabulary(BUNDLED, special=(), eos_token_ids=(2,)), max_bytes=8 << 20)
    yield made
    made.close()


async def test_the_least_lately_used_goes_first(book: GrammarBook) -> None:
    first, small = large(0), Grammar(GrammarKind.REGEX, "[a-z]{1,9}")
    kept, often = await book.compiled(first), await book.compiled(small)
    for number in range(1, 12):
        await book.compiled(large(number))
        assert await book.compiled(small) is often
        assert book.num_bytes <= 8 << 20
    assert await book.compiled(first) is not kept
    assert kept is not None and any(kept.matcher().allowed([], 0))


async def test_hundreds_of_ordinary_ones_are_kept() -> None:
    book = GrammarBook(load_vocabulary(BUNDLED, special=(), eos_token_ids=(2,)))
    try:
        ordinary = [
            Grammar(
                GrammarKind.JSON_SCHEMA,
                json.dumps({"type": "object", "properties": {f"a{n}": {"type": "integer"}}}),
            )
            for n in range(300)
        ]
        kept = [await book.compiled(grammar) for grammar in ordinary]
        assert [await book.compiled(grammar) for grammar in ordinary] == kept
    finally:
        book.close()


async def test_what_is_found_out_in_use_counts(book: GrammarBook) -> None:
    """Of a grammar of 30 characters megabytes may come, as states of an automaton."""
    grammar = Grammar(GrammarKind.REGEX, "(?s:.*)a(?s:.{60})c")
    compiled = await book.compiled(grammar)
    assert compiled is not None
    before = compiled.num_bytes
    matcher, tokens = compiled.matcher(), list[int]()
    while compiled.num_bytes < 9 << 20:
        mask = matcher.allowed(tokens, 0)
        allowed = [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]
        tokens.append(allowed[7 * len(tokens) % len(allowed)])
        assert len(tokens) < 5000 and not matcher.stuck
    assert before < 1 << 20
    assert await book.compiled(grammar) is compiled
    # Too large by itself to be kept any longer, and followed to its end by who has it.
    assert await book.compiled(grammar) is not compiled
    assert any(matcher.allowed(tokens, 0))
