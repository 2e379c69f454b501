"""A grammar that explodes ends its own process, within its limits, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from batonlm.core.errors import Internal, InvalidArgument, Overloaded
from batonlm.core.request.request import Grammar, GrammarKind
from batonlm.tokenizer import grammar_checker
from batonlm.tokenizer.grammar_checker import Checker
from tests.grammar.answering import BUNDLED

GOOD = Grammar(GrammarKind.REGEX, "[a-z]+")
MANY = {f"p{i}": {"type": "string"} for i in range(5000)}
EXPLODES = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": MANY}))


@pytest.fixture
async def checker() -> AsyncIterator[Checker]:
    made = Checker(BUNDLED, (), cpu_s=0.3, num_processes=2)
    yield made
    await made.close()
    assert children() == set()


def children() -> set[int]:
    me = psutil.Process()
    return {
        child.pid
        for child in me.children()
        if any("grammar_process" in word for word in child.cmdline())
    }


async def test_good_ones_pass_and_keep_their_process(checker: Checker) -> None:
    await checker.check(GOOD)
    one = children()
    assert len(one) == 1
    await checker.check(Grammar(GrammarKind.LARK, 'start: "a"'))
    await checker.check(GOOD)
    assert children() == one


def _until_dead(process: psutil.Process) -> None:
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


async def test_one_that_died_idle_is_replaced(checker: Checker) -> None:
    await checker.check(GOOD)
    (one,) = children()
    died = psutil.Process(one)
    died.kill()
    await asyncio.to_thread(_until_dead, died)
    await checker.check(Grammar(GrammarKind.LARK, 'start: "a"'))
    assert len(children()) == 1


async def test_a_process_that_never_begins_is_no_fault_of_a_grammar(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Internal):
        await checker.check(GOOD)
    monkeypatch.undo()
    await checker.check(GOOD)


async def test_a_bad_one_is_named_every_time(checker: Checker) -> None:
    bad = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"thing"}')
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="thing") as refused:
            await checker.check(bad)
        assert refused.value.field == "grammar"


async def test_one_that_explodes_is_refused_while_others_pass(checker: Checker) -> None:
    await checker.check(GOOD)
    exploding = asyncio.create_task(checker.check(EXPLODES))
    for number in range(20):
        await checker.check(Grammar(GrammarKind.REGEX, f"[a-z]{{{number + 1}}}"))
    with pytest.raises(InvalidArgument, match="takes more than 0"):
        await exploding
    before = children()
    with pytest.raises(InvalidArgument, match="takes more than 0"):
        await checker.check(EXPLODES)
    assert children() == before, "what is known to explode is not tried again"


@pytest.mark.deep
async def test_memory_has_a_limit_too() -> None:
    small = Checker(BUNDLED, (), cpu_s=20.0, num_processes=1, memory_bytes=64 << 20)
    with pytest.raises(InvalidArgument, match="too much memory"):
        await small.check(EXPLODES)
    await small.check(GOOD)
    await small.close()


async def test_whoever_leaves_takes_the_process_along() -> None:
    patient = Checker(BUNDLED, (), cpu_s=60.0, num_processes=1)
    await patient.check(GOOD)
    (before,) = children()
    leaving = asyncio.create_task(patient.check(EXPLODES))
    spent = psutil.Process(before).cpu_times().user
    async with asyncio.timeout(120):
        # Its line has arrived, and it is at work.
        while psutil.Process(before).cpu_times().user < spent + 0.05:  # noqa: ASYNC110 (a process)
            await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await patient.check(Grammar(GrammarKind.REGEX, "b"))
    (after,) = children()
    assert after != before
    await patient.close()


async def test_too_many_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 0)
    checker = Checker(BUNDLED, (), cpu_s=0.3, num_processes=1)
    first = asyncio.create_task(checker.check(GOOD))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checker.check(Grammar(GrammarKind.REGEX, "b"))
    await first
    await checker.close()
