"""Engines of `baton up` that are forks of one process: they start, end and come back as others do.

All with real workers: what a fork shares with its process is what could go wrong.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from batonlm.cli import state
from batonlm.cli.forks import ForksEnded, ForkServer
from batonlm.cli.layout import Layout, UpOptions, plan
from batonlm.cli.supervisor import ChildProcess, Supervisor
from batonlm.rpc.server import PARENT_VARIABLE
from tests.cli.test_supervisor import PATIENCE_S, eventually, running
from tests.cli.test_up import check_nothing_is_left, read_until, starting

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked"),
]

FORKS = "batonlm.cli.forks"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def layout() -> Layout:
    return plan(UpOptions(kv_memory_mib=16, http_port=0, grpc_port=0, transport="loopback"))


def is_fork(pid: int) -> bool:
    return FORKS in psutil.Process(pid).cmdline()


def forking() -> psutil.Process:
    """The process that forks: the one that is called like its forks and has one thread."""
    (found,) = (
        child
        for child in psutil.Process().children()
        if FORKS in child.cmdline() and child.num_threads() == 1
    )
    return found


async def killed(supervisor: Supervisor, name: str) -> ChildProcess:
    """Kills a process; returns the one that serves in its place."""
    before = supervisor.child(name)
    os.kill(before.pid, signal.SIGKILL)
    assert await before.wait() == -signal.SIGKILL
    await eventually(lambda: supervisor.child(name) is not before, f"{name} started again")
    after = supervisor.child(name)
    async with asyncio.timeout(PATIENCE_S):
        await after.serving.wait()
    return after


async def test_a_fork_is_restarted_as_one_and_without_its_process_as_any_other() -> None:
    async with running(layout()) as supervisor:
        prefill, decode = supervisor.child("prefill-0"), supervisor.child("decode-0")
        assert is_fork(prefill.pid) and is_fork(decode.pid)
        assert not is_fork(supervisor.child("router-0").pid)
        assert psutil.Process(decode.pid).ppid() == os.getpid()
        assert is_fork((await killed(supervisor, "decode-0")).pid)
        forking().kill()
        assert not is_fork((await killed(supervisor, "decode-0")).pid)
        assert supervisor.child("prefill-0") is prefill, "it has not noticed"
    assert "decode-0 is no fork" in state.log_file().read_text()


async def test_a_stop_before_the_first_fork_leaves_nothing() -> None:
    begun, before = asyncio.Event(), psutil.Process().children(recursive=True)

    def notify(what: str, *details: object) -> None:
        if what == "part" and "fork" in details:
            begun.set()

    supervisor = Supervisor(layout(), notify)
    run = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        supervisor.stop()
        await run
    assert set(psutil.Process().children(recursive=True)) <= set(before)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("waits for torch", signal.SIGINT),
        ("waits for torch", signal.SIGKILL),
        ("Ready", signal.SIGKILL),
    ],
    ids=["Ctrl-C at once", "kill -9 at once", "kill -9"],
)
def test_nothing_outlives_baton_up(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    small = ("--runner", "torch", "--transport", "loopback", "--kv-memory-mib", "16")
    with starting(tmp_path, *small) as process:
        read_until(process, moment)
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        assert process.stderr is not None
        words = process.stderr.read()
        process.wait(PATIENCE_S)
        if number == signal.SIGKILL:
            (tmp_path / "baton" / "up.json").unlink(missing_ok=True)
        check_nothing_is_left(tmp_path)
    assert "Traceback" not in words


class Noted(asyncio.SubprocessProtocol):
    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.errors = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.errors += data if fd == 2 else b""

    def process_exited(self) -> None:
        self.ended.set()


@pytest.fixture
def words() -> tuple[str, ...]:
    """Of a worker that serves."""
    (spec,) = (spec for spec in layout().processes if spec.role == "decode")
    return spec.module


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getpid()))


async def started(forks: ForkServer) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", FORKS, stdin=forks.stdin.fileno(), stderr=asyncio.subprocess.DEVNULL
    )
    forks.stdin.close()
    return process


@pytest.mark.usefixtures("environment")
async def test_a_start_that_is_cancelled_leaves_no_process(words: tuple[str, ...]) -> None:
    others = set(psutil.Process().children(recursive=True))
    forks = ForkServer()
    process = await started(forks)
    first = await forks.start(words, Noted())
    # Before it is sent, while it is answered, and once it was.
    for turns in (0, 1, 2, 3, 5, 8):
        start = asyncio.create_task(forks.start(words, Noted()))
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    waits = asyncio.create_task(forks.start(words, Noted()))
    await asyncio.sleep(0)
    process.kill()
    await process.wait()
    first.close()
    await first.reaped.wait()
    for result in await asyncio.gather(waits, return_exceptions=True):
        if not isinstance(result, ForksEnded):
            result.close()  # type: ignore[union-attr]
    await forks.close()
    await eventually(lambda: set(psutil.Process().children(recursive=True)) <= others, "all ended")


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("delay_s", [0.006, 0.009, 0.012])
async def test_an_end_amid_a_fork_leaves_no_process(words: tuple[str, ...], delay_s: float) -> None:
    """When these delays were chosen, a fork was on its way at each of them."""
    others = set(psutil.Process().children(recursive=True))
    forks = ForkServer()
    process = await started(forks)
    first = await forks.start(words, Noted())
    first.close()
    await first.reaped.wait()
    start = asyncio.create_task(forks.start(words, Noted()))
    await asyncio.sleep(delay_s)
    process.kill()
    await process.wait()
    await asyncio.gather(start, return_exceptions=True)
    if start.exception() is None:
        start.result().close()
        await start.result().reaped.wait()
    await forks.close()
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.usefixtures("environment")
async def test_a_fork_reports_what_is_wrong_itself(words: tuple[str, ...], tmp_path: Path) -> None:
    forks = ForkServer()
    process = await started(forks)
    try:
        model = words.index("--model") + 1
        noted = Noted()
        wrong = (*words[:model], str(tmp_path), *words[model + 1 :])
        fork = await forks.start(wrong, noted)
        async with asyncio.timeout(PATIENCE_S):
            await noted.ended.wait()
        assert fork.get_returncode() == 2
        await eventually(lambda: b"error: " in noted.errors, "its words were read")
        fork.close()
        with pytest.raises(ProcessLookupError):
            fork.kill()
    finally:
        process.kill()
        await process.wait()
        await forks.close()
    with pytest.raises(ForksEnded):
        await forks.start(words, Noted())
