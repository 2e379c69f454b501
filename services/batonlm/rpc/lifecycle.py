"""A process from start to exit: signals, drain, crash, and the death of its parent.

Exit codes: 0 drained; 1 crashed or not drained in time; 2 wrong configuration; 3 another expected
start-up failure; 4 exhausted (drained because only a new process helps); 128 + signal after a
second signal, or one before the process serves. If the process has not ended EXIT_S after the end
of its drain, it prints the tracebacks to stderr and exits with 1.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from batonlm.core.errors import BatonError, InvalidArgument
from batonlm.rpc.loop import Loop
from batonlm.rpc.server import PARENT_VARIABLE, ProcessServer

log = logging.getLogger(__name__)

EXHAUSTED = 4
EXIT_S = 20.0
STOP_GRACE_S = 1.0
"""The time that calls get to end after the drain; endless streams take all of it."""

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def new_instance_id() -> str:
    """A random id of this process start, 32 hex digits."""
    return secrets.token_hex(16)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs a process's main on a `Loop` and returns its exit code.

    A BatonError that `main` raises becomes one line on stderr. With BATON_PARENT_PID set, the
    process does not outlive that parent.
    """
    die_with_parent()
    # PID 1 of a container ignores signals without a handler. The handler exits without teardown,
    # which would wait for a thread that reads gigabytes.
    signal.signal(signal.SIGTERM, lambda number, _: exit_at_once(128 + number))
    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(main)
    except BatonError as error:
        text = f"{error.field}: {error.message}" if error.field else error.message
        print(f"error: {text}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 3
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def run_until_stopped(
    server: ProcessServer,
    drain: Callable[[], Awaitable[None]],
    *,
    drain_timeout_s: float,
    cut: Callable[[], None] = lambda: None,
    fatal: asyncio.Future[None] | None = None,
    exhausted: asyncio.Future[str] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, drains, stops the server and returns the exit code.

    On a signal the server first turns not ready for good, then `drain` is awaited for at most
    drain_timeout_s. Then `cut` fails the remaining work, and calls get STOP_GRACE_S to deliver
    that. A second signal ends the drain at once.

    fatal: done when an essential part has ended, such as an engine thread; it ends the process at
    once, and its exception is logged. exhausted: done, with the reason, when the process still
    works but should be replaced; it drains as on a signal, and the first signal afterwards has no
    effect.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in _SIGNALS:
        loop.add_signal_handler(number, received.put_nowait, number)
    crash = fatal if fatal is not None else loop.create_future()
    worn = exhausted if exhausted is not None else loop.create_future()
    try:
        first = await _first(received, crash, worn)
        if first is None:
            return _crashed(crash)
        server.leave()
        ending = worn.done()
        level = logging.WARNING if ending else logging.INFO
        log.log(level, "%s: draining for at most %g s", first, drain_timeout_s)
        code = await _drain(drain, drain_timeout_s, received, crash, signals=2 if ending else 1)
        return EXHAUSTED if ending and code < 128 and not crash.done() else code
    finally:
        faulthandler.dump_traceback_later(EXIT_S, exit=True)
        cut()
        await server.stop(STOP_GRACE_S)
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def exit_at_once(code: int) -> None:
    """Ends the process without teardown: it runs no destructor and waits for no thread.

    For a process whose memory a transfer may still write to: the transport's destructors would free
    that memory, or close the peer's connection, during the write.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(code)


async def _first(
    received: asyncio.Queue[signal.Signals], crash: asyncio.Future[None], worn: asyncio.Future[str]
) -> str | None:
    """The reason to drain, or None when `crash` is done first."""
    getter = asyncio.ensure_future(received.get())
    try:
        await asyncio.wait((getter, crash, worn), return_when=asyncio.FIRST_COMPLETED)
        if crash.done():
            return None
        return worn.result() if worn.done() else getter.result().name
    finally:
        getter.cancel()


async def _drain(
    drain: Callable[[], Awaitable[None]],
    timeout_s: float,
    received: asyncio.Queue[signal.Signals],
    crash: asyncio.Future[None],
    signals: int,
) -> int:
    """Drains and returns the exit code. signals: how many more signals end it at once."""
    draining = asyncio.ensure_future(drain())
    second = asyncio.ensure_future(_last_of(received, signals))
    try:
        await asyncio.wait(
            (draining, second, crash), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if crash.done():
            return _crashed(crash)
        if second.done():
            log.warning("%s again: not waiting for the drain", second.result().name)
            return 128 + second.result()
        if not draining.done():
            log.warning("not drained within %g s; what is left is cut", timeout_s)
            return 1
        if (error := draining.exception()) is not None:
            log.error("the drain failed", exc_info=error)
            return 1
        return 0
    finally:
        for task in (draining, second):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait((draining, second), timeout=STOP_GRACE_S)


async def _last_of(received: asyncio.Queue[signal.Signals], number: int) -> signal.Signals:
    for _ in range(number - 1):
        await received.get()
    return await received.get()


def _crashed(crash: asyncio.Future[None]) -> int:
    error = None if crash.cancelled() else crash.exception()
    log.critical("a part this process needs has ended", exc_info=error)
    return 1


def die_with_parent() -> None:
    """Ends this process as soon as its parent ends, if BATON_PARENT_PID names one.

    It is for the children of a supervisor, which cannot stop them when it is killed with -9. On
    Linux the kernel does it; elsewhere a thread checks twice a second. On Linux the parent must
    start its children from a thread that lives as long as the parent: the kernel watches that
    thread.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdecimal():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # prctl has no effect if the parent died before it.
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.platform != "linux":
        threading.Thread(target=_watch_parent, args=(int(parent),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
