"""`baton top` shows what a real Baton does, also where one of its processes does not answer."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.relay import PATIENCE_S, Relay, options, until_it_comes_about

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    made = Relay(tmp_path_factory.mktemp("relay"), "--runner", "fake", "--transport", "loopback")
    yield made
    made.close()


def top(running: Relay, *words: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batonlm.cli.main", "top", *words],
        env=running.environment,
        text=True,
        **more,
    )


def told(running: Relay, *words: str) -> dict[str, Any]:
    done = running.baton("top", "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pools(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {pool["role"]: pool for pool in found["pools"]}


def test_it_tells_what_was_done_meanwhile(running: Relay) -> None:
    number, interval_s = 0, 3
    found: dict[str, Any] = {}

    def it_saw_a_request() -> bool:
        """Whether one ran in its interval from end to end, and all processes found the time to
        say so; each computes and hands over a prompt of its own."""
        nonlocal number, found
        watching = top(running, "--json", "--interval", f"{interval_s}", stdout=subprocess.PIPE)
        while watching.poll() is None:
            number += 1
            running.generate(f"{number} " + "word " * 200, options(max_tokens=16))
        output, _ = watching.communicate(timeout=PATIENCE_S)
        assert watching.returncode == 0
        found = json.loads(output)
        # Of those that ended in it, the first may have begun before.
        return not found["away"] and found["overall"]["requests_per_s"] * interval_s > 2.5

    until_it_comes_about(it_saw_a_request, "a request while `baton top` looks")
    overall = found["overall"]
    assert overall["output_tokens_per_s"] > 0
    assert 0 < overall["first_token_p50_s"] <= overall["first_token_p99_s"] < PATIENCE_S
    assert 0 < overall["inter_token_p50_s"] <= overall["inter_token_p99_s"] < PATIENCE_S
    assert overall["handover_bytes_per_s"] > 0
    assert 0 <= overall["prefix_hit_rate"] <= 1
    every = pools(found)
    assert all(pool["workers"] == {"serving": 1} and pool["asked"] for pool in every.values())
    assert all(every[role]["tokens_per_s"] > 0 for role in ("tokenizer", "prefill", "decode"))
    assert every["decode"]["step_s"] > 0 and every["decode"]["kv_use"] is not None


def test_a_router_alone_tells_what_it_knows(running: Relay) -> None:
    found: dict[str, dict[str, Any]] = {}

    def it_answers() -> bool:
        nonlocal found
        words = ("--http", running.http.partition("//")[2], "--interval", "0.2")
        found = pools(told(running, *words))
        return bool(found["router"]["asked"])

    until_it_comes_about(it_answers, "a router that answers in time")
    assert found["router"]["asked"] == 1
    assert (found["decode"]["workers"], found["decode"]["asked"]) == ({"serving": 1}, 0)
    assert found["decode"]["kv_use"] is None


def test_a_process_that_does_not_answer_is_named_and_hides_no_other(running: Relay) -> None:
    (frozen,) = running.processes("detokenizer")
    found: dict[str, Any] = {}

    def only_it_is_away() -> bool:
        """On a busy machine another process may not answer in time, either."""
        nonlocal found
        found = told(running, "--interval", "0.2")
        return set(found["away"]) == {frozen["metrics"]}

    os.kill(frozen["pid"], signal.SIGSTOP)
    try:
        until_it_comes_about(only_it_is_away, "one process that does not answer")
    finally:
        os.kill(frozen["pid"], signal.SIGCONT)
    assert found["away"] == {frozen["metrics"]: "does not answer"}
    assert pools(found)["detokenizer"]["asked"] == 0
    assert pools(found)["decode"]["asked"] == 1


def test_nobody_at_all(running: Relay) -> None:
    done = running.baton("top", "--workers", "127.0.0.1:1", "--interval", "0.2")
    assert done.returncode == 1
    assert "127.0.0.1:1/metrics does not answer" in done.stdout


def test_on_a_terminal_it_goes_on_until_ctrl_c(running: Relay) -> None:
    ours, theirs = pty.openpty()
    resize(theirs, 24, 100)
    watching = top(running, "--interval", "0.2", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        shown = read_until(ours, b"", b"detokenizer")
        resize(ours, 24, 40)
        read_until(ours, shown[-1:], b"detokenizer")
        watching.send_signal(signal.SIGINT)
        read_until(ours, b"", b"\x1b[?1049l")  # the screen from before is back
        assert watching.wait(PATIENCE_S) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_until(terminal: int, seen: bytes, wanted: bytes) -> bytes:
    """All that was shown until something was there. Fails when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, seen[-2000:]
        try:
            seen += os.read(terminal, 1 << 16)
        except OSError:  # whoever wrote has ended
            raise AssertionError(seen[-2000:]) from None
    return seen
