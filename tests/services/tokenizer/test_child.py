"""A child answers or is over, and is started without a fork of what the process holds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from baton.rpc.loop import Loop
from baton.tokenizer.child import Child

LINE = b'{"source": "%s", "variables": {}, "cpu_s": 60, "max_characters": 9}\n'
ENDLESS = LINE % b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child("baton.tokenizer.client_template_process")
    assert made.ready(30)
    yield made
    made.end()
    made.end()
    assert made.code is not None


def test_it_answers_each_line(child: Child) -> None:
    assert [child.ask(LINE % text, 30) for text in (b"a", b"{{")] == [
        b'{"text": "a"}\n',
        b'{"line": 1}\n',
    ]
    assert child.code is None


def test_it_is_over_when_its_time_is_up(child: Child) -> None:
    assert child.ask(ENDLESS, 0.1) is None
    assert child.code == -signal.SIGKILL
    assert child.ask(LINE % b"a", 30) is None


def test_another_thread_may_end_it(child: Child) -> None:
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(child.ask, ENDLESS, 60)
        child.kill()
        assert answer.result() is None


def test_one_that_says_nothing_is_not_ready() -> None:
    silent = Child("baton.tokenizer.no_such_module")
    assert not silent.ready(30)
    assert silent.code == 1


def test_no_fork_handler_runs_and_no_secret_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop forks, handlers and all: beside gRPC's threads its children die of it."""
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))
    monkeypatch.setenv("BATON_SECRET", "1")

    async def start() -> None:
        child = Child("baton.tokenizer.client_template_process")
        assert await asyncio.to_thread(child.ready, 30)
        (running,) = (
            one
            for one in psutil.Process().children()
            if "client_template_process" in " ".join(one.cmdline())
        )
        assert "BATON_SECRET" not in running.environ()
        await asyncio.to_thread(child.end)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(start())
    assert not forks
