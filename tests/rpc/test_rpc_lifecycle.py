"""A real process: drains on a signal, ends at once on a second, and never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from batonlm.rpc.lifecycle import new_instance_id
from batonlm.rpc.server import PARENT_VARIABLE

WITHIN_S = 120.0

PROGRAM = """
import asyncio, sys, time
from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.rpc import lifecycle, logs
from batonlm.rpc.server import ProcessServer, Service

async def main():
    kind, listen = sys.argv[1], sys.argv[2]
    if kind == "foreseen":
        raise Unavailable("no model yet")
    server = ProcessServer(listen=listen, services=[Service("test.Nothing", lambda server: None)])
    address = await server.start()
    server.set_serving(True)
    fatal = asyncio.get_running_loop().create_future()
    exhausted = asyncio.get_running_loop().create_future()
    if kind.startswith("worn"):
        asyncio.get_running_loop().call_later(0.1, exhausted.set_result, "too much orphaned")
    if kind == "hangs":
        lifecycle.EXIT_S = 0.5
    if kind == "crash":
        asyncio.get_running_loop().call_later(0.1, fatal.set_exception, RuntimeError("engine"))

    async def drain():
        print("draining", flush=True)
        if kind == "broken":
            raise RuntimeError("cannot drain")
        await asyncio.sleep(0.1 if kind in ("ends", "worn", "hangs") else 60)
        print("drained", flush=True)

    # Once run_until_stopped waits: signals before that end the process as they always do.
    asyncio.get_running_loop().call_soon(print, address)
    timeout = {"late": 0.2, "worn, late": 1.0}.get(kind, 60)
    code = await lifecycle.run_until_stopped(
        server,
        drain,
        drain_timeout_s=timeout,
        cut=lambda: print("cut", flush=True) if kind == "late" else None,
        fatal=fatal,
        exhausted=exhausted,
    )
    if kind == "hangs":
        time.sleep(600)
    if kind.startswith("worn"):
        lifecycle.exit_at_once(code)
    return code

logs.setup("test", "info")
sys.exit(lifecycle.run(main()))
"""

PARENT = f"""
import os, subprocess, sys, time
environment = {{**os.environ, "{PARENT_VARIABLE}": str(os.getpid())}}
command = [sys.executable, "-c", sys.argv[1], "ends", "127.0.0.1:0"]
child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python programs; kills what a failed test leaves."""
    with ExitStack() as stack:

        def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WITHIN_S)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(start: Start, number: signal.Signals) -> None:
    process = start(PROGRAM, "ends", "127.0.0.1:0")
    assert line(process)
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (0, "draining\ndrained\n"), err
    assert "Traceback" not in err


def test_a_drain_is_bounded(start: Start) -> None:
    process = start(PROGRAM, "late", "127.0.0.1:0")
    assert line(process)
    process.terminate()
    code, out, err = finish(process)
    assert (code, out) == (1, "draining\ncut\n")
    assert "not drained within 0.2 s" in err


def test_a_second_signal_ends_the_drain(start: Start) -> None:
    process = start(PROGRAM, "stuck", "127.0.0.1:0")
    assert line(process)
    process.terminate()
    assert line(process) == "draining"
    process.terminate()
    assert finish(process)[0] == 128 + signal.SIGTERM


def test_a_drain_that_fails_is_told(start: Start) -> None:
    process = start(PROGRAM, "broken", "127.0.0.1:0")
    assert line(process)
    process.terminate()
    code, _, err = finish(process)
    assert code == 1
    assert "cannot drain" in err


def test_a_crash_ends_the_process_with_1(start: Start) -> None:
    code, out, err = finish(start(PROGRAM, "crash", "127.0.0.1:0"))
    assert code == 1
    assert "draining" not in out
    assert "RuntimeError: engine" in err


def test_exhausted_drains_and_exits_with_a_code_of_its_own(start: Start) -> None:
    process = start(PROGRAM, "worn", "127.0.0.1:0")
    assert line(process)
    code, out, err = finish(process)
    assert (code, out) == (4, "draining\ndrained\n"), err
    assert "too much orphaned: draining" in err


@pytest.mark.deep
def test_a_signal_does_not_cut_the_drain_of_one_that_is_exhausted(start: Start) -> None:
    process = start(PROGRAM, "worn, late", "127.0.0.1:0")
    assert line(process) and line(process) == "draining"
    process.terminate()
    code, _, err = finish(process)
    assert code == 4
    assert "not drained within 1 s" in err


def test_an_exit_that_hangs_is_bounded_and_says_where(start: Start) -> None:
    process = start(PROGRAM, "hangs", "127.0.0.1:0")
    assert line(process)
    process.terminate()
    code, _, err = finish(process)
    assert code == 1
    assert "Timeout (0:00:00.500000)!" in err


def test_failures_of_start_up_are_one_line(start: Start) -> None:
    first = start(PROGRAM, "ends", "127.0.0.1:0")
    address = line(first)
    code, _, err = finish(start(PROGRAM, "ends", address))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: listen: {address} is already in use")
    code, _, err = finish(start(PROGRAM, "foreseen", "127.0.0.1:0"))
    assert (code, err) == (3, "error: no model yet\n")


def test_a_child_ends_with_its_parent(start: Start) -> None:
    parent = start(PARENT, PROGRAM)
    child = int(line(parent))
    os.kill(child, 0)
    parent.kill()
    parent.wait(WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    try:
        while _lives(child):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_child_whose_parent_is_gone_already_ends_at_once(start: Start) -> None:
    gone = start("pass")
    finish(gone)
    process = start(PROGRAM, "ends", "127.0.0.1:0", **{PARENT_VARIABLE: str(gone.pid)})
    assert finish(process)[0] == -signal.SIGKILL


def test_instance_ids() -> None:
    made = {new_instance_id() for _ in range(100)}
    assert len(made) == 100
    assert all(len(i) == 32 and int(i, 16) >= 0 for i in made)


def _lives(pid: int) -> bool:
    """Whether the process runs; one that ended but that nobody has waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
