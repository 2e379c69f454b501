"""A child answers or is over, and is started without a fork of what the process holds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from batonlm.rpc.loop import Loop
from batonlm.tokenizer.child import Child

MODULE, ARGUMENTS = "batonlm.tokenizer.render_process", ("60", "9", str(1 << 29))
LINE = b'{"setup": {"source": "%s"}, "chat": {"messages": [{"role": "user", "content": ""}]}}\n'
ENDLESS = LINE % b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child(MODULE, *ARGUMENTS)
    assert made.ready(30)
    yield made
    made.end()
    made.end()
    assert made.code is not None


def test_it_answers_each_line(child: Child) -> None:
    answers = [json.loads(child.ask(LINE % text, 30) or b"") for text in (b"a", b"{{")]
    assert [(answer["text"], answer["field"]) for answer in answers] == [
        ("a", ""),
        ("", "template"),
    ]
    assert child.code is None and not child.late


def test_it_is_over_when_its_time_is_up(child: Child) -> None:
    assert child.ask(ENDLESS, 0.1) is None
    assert child.code == -signal.SIGKILL and child.late
    assert child.ask(LINE % b"a", 30) is None


def test_a_line_and_an_answer_may_be_longer_than_a_pipe_holds(child: Child) -> None:
    text = b"a" * (1 << 21)
    assert child.ask(
        LINE.replace(b'""', b'"%s"') % (b"{{ messages[0].content | length }}", text), 30
    )
    long = Child(MODULE, "60", str(1 << 22), str(1 << 30), max_answer_bytes=3 << 20)
    try:
        assert long.ready(30)
        for _ in range(2):
            answer = long.ask(
                LINE.replace(b'""', b'"%s"') % (b"{{ messages[0].content }}", text), 30
            )
            assert answer is not None and json.loads(answer)["text"] == text.decode()
        assert long.ask(LINE % (b"{{ 'a' * 3500000 }}"), 30) is None
        assert long.over
    finally:
        long.end()


def test_one_that_reads_nothing_is_over_in_time_too(child: Child) -> None:
    psutil.Process(child.pid).suspend()
    assert child.ask(LINE % (b"a" * (1 << 21)), 0.2) is None
    assert child.late


def test_another_thread_may_end_it(child: Child) -> None:
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(child.ask, ENDLESS, 60)
        child.kill()
        assert answer.result() is None


def test_one_that_says_nothing_is_not_ready() -> None:
    silent = Child("batonlm.tokenizer.no_such_module")
    assert not silent.ready(30)
    assert silent.code == 1


def test_no_fork_handler_runs_and_no_secret_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop forks, handlers and all: beside gRPC's threads its children die of it."""
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))
    monkeypatch.setenv("BATON_SECRET", "1")

    async def start() -> None:
        child = Child(MODULE, *ARGUMENTS)
        assert await asyncio.to_thread(child.ready, 30)
        try:
            running = psutil.Process(child.pid)
            assert MODULE in running.cmdline()
            assert "BATON_SECRET" not in running.environ()
        finally:
            await asyncio.to_thread(child.end)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(start())
    assert not forks
