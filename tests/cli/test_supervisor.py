"""The supervisor of `baton up`, with small children in place of Baton's own processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from batonlm.cli import state
from batonlm.cli.layout import Layout, ProcessSpec
from batonlm.cli.supervisor import LogFile, StartFailed, Supervisor

PATIENCE_S = 120.0
"""A bound for liveness, not a measurement."""

NOWHERE = "127.0.0.1:1"

SERVES = 'print(\'{"role": "tokenizer"}\', flush=True)\n'
SLEEPS = SERVES + "import time\ntime.sleep(600)"

# Answers each connection, after it logged so many bytes as it was asked for.
LOGS = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print('{"role": "tokenizer"}', flush=True)
number = 0
while True:
    connection, _ = server.accept()
    wanted = int(connection.makefile().readline())
    while wanted > 0:
        number += 1
        line = f"line {number:012d} {'.' * 80}\\n".encode()
        os.write(2, line)
        wanted -= len(line)
    connection.sendall(b"%d\\n" % number)
    connection.close()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state is on a file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system that is full takes a mount, which is not allowed here")
    monkeypatch.setenv("XDG_STATE_HOME", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def layout_of(*scripts: str, words: tuple[str, ...] = ()) -> Layout:
    processes = tuple(
        ProcessSpec(
            "tokenizer", index, (sys.executable, "-u", "-c", script, *words), NOWHERE, NOWHERE
        )
        for index, script in enumerate(scripts)
    )
    return Layout(processes, f"http://{NOWHERE}", NOWHERE, 1)


@asynccontextmanager
async def running(layout: Layout, **options: float) -> AsyncIterator[Supervisor]:
    """Ready; whatever is left of the children is killed afterwards."""
    ready = asyncio.Event()
    pids: list[int] = []

    def notify(what: str, *details: object) -> None:
        if what == "ready":
            ready.set()
        if what == "started":
            pids.append(int(str(details[1])))

    supervisor = Supervisor(layout, notify, **options)
    run = asyncio.create_task(supervisor.run())
    waits = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({run, waits}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        assert ready.is_set()
        yield supervisor
        supervisor.stop()
        await asyncio.wait_for(run, PATIENCE_S)
        assert not any(map(psutil.pid_exists, pids))
    finally:
        waits.cancel()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.cancel()
        await asyncio.gather(run, waits, return_exceptions=True)


async def eventually(check: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert check(), what


async def asked(door: Path, wanted: int) -> int:
    """Has the child log so many bytes; how many lines it logged so far."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_unix_connection(str(door))
        writer.write(b"%d\n" % wanted)
        answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
    return int(answer)


def logged() -> str:
    file = state.log_file()
    return file.read_text(errors="replace") if file.exists() else ""


async def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(
    small_disk: Path, tmp_path: Path
) -> None:
    door = tmp_path / "door"
    ballast = small_disk / "ballast"
    async with running(layout_of(LOGS, words=(str(door),))):
        await asked(door, 1)
        await eventually(lambda: "line 000000000001" in logged(), "it logs")
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        # More than pipes and buffers hold.
        for _ in range(4):
            await asked(door, 1 << 20)
        ballast.unlink()
        for part in state.folder().glob("up.log.*"):
            part.unlink()

        number = 0

        async def goes_on() -> bool:
            nonlocal number
            number = await asked(door, 1)
            return "No space left on device" in logged()

        async with asyncio.timeout(PATIENCE_S):
            while not await goes_on():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await eventually(lambda: f"line {number:012d}" in logged(), "new lines are there")
        said = [line for line in logged().splitlines() if "missing" in line]
        assert said
        assert 0 < int(said[0].split()[2]) <= 5 << 20
        assert all(len(line) == 98 for line in logged().splitlines() if line.startswith("line "))


async def test_a_disk_stays_full_and_everything_ends(small_disk: Path, tmp_path: Path) -> None:
    door = tmp_path / "door"
    async with running(layout_of(LOGS, words=(str(door),))):
        with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        await asked(door, 2 << 20)


async def test_lines_of_any_length_are_read(tmp_path: Path) -> None:
    script = """
import os, sys
for pipe in (1, 2):
    for _ in range(100):
        rest = memoryview(b"x" * (1 << 20))
        while rest:
            rest = rest[os.write(pipe, rest):]
    os.write(pipe, b"\\n")
print('{"role": "tokenizer"}', flush=True)
os.write(2, b"and then\\n")
import time
time.sleep(600)
"""
    before = psutil.Process().memory_info().rss
    async with running(layout_of(script)):
        await eventually(lambda: logged().endswith("and then\n"), "what comes after it is logged")
        assert psutil.Process().memory_info().rss - before < 30 << 20
        assert len(logged()) < 1 << 20
        assert "more bytes]" in logged()


async def test_the_log_has_a_bound_and_older_ones_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = tmp_path / "door"
    monkeypatch.setattr("batonlm.cli.supervisor.LogFile", small_log)
    async with running(layout_of(LOGS, words=(str(door),))):
        number = await asked(door, 1 << 20)
        await eventually(lambda: f"line {number:012d}" in logged(), "all is read")
    files = {path.name: path.stat() for path in state.folder().glob("up.log*")}
    assert sorted(files) == ["up.log", "up.log.1", "up.log.2"]
    assert all(file.st_size <= 128 << 10 for file in files.values())
    assert all(file.st_mode & 0o777 == 0o600 for file in files.values())


def small_log(path: Path) -> object:
    return LogFile(path, file_bytes=128 << 10, old_files=2)


async def test_nobody_else_can_read_what_is_written() -> None:
    state.folder().mkdir(parents=True)
    state.folder().chmod(0o755)
    before = os.umask(0o022)
    try:
        async with running(layout_of(SLEEPS)):
            modes = {path.name: path.stat().st_mode & 0o777 for path in state.folder().iterdir()}
            assert state.folder().stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert modes.keys() >= {"up.json"}
    assert set(modes.values()) == {0o600}


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS
    async with running(layout_of(ignores, SLEEPS), stop_timeout_s=0.5):
        pass


async def test_a_child_that_is_stopped_ends_as_the_others_do(tmp_path: Path) -> None:
    script = f"""
import signal, sys
def leave(*_):
    open({str(tmp_path / "left")!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
"""
    async with running(layout_of(script + SLEEPS)) as supervisor:
        stopped = psutil.Process(supervisor.child("tokenizer-0").pid)
        stopped.send_signal(signal.SIGSTOP)
        await eventually(lambda: stopped.status() == psutil.STATUS_STOPPED, "it is stopped")
    assert (tmp_path / "left").exists()


async def test_a_second_stop_waits_for_nobody() -> None:
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS
    async with running(layout_of(ignores)) as supervisor:
        supervisor.stop()


async def test_the_end_of_a_child_is_seen_though_another_holds_its_pipes(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(heir.pid))
sys.exit("no such option")
"""
    supervisor = Supervisor(layout_of(script), lambda *_: None)
    try:
        with pytest.raises(StartFailed, match="no such option"):
            await asyncio.wait_for(supervisor.run(), PATIENCE_S)
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


async def test_what_cannot_be_started_is_told() -> None:
    spec = ProcessSpec("tokenizer", 0, ("/nonexistent/program",), NOWHERE, NOWHERE)
    supervisor = Supervisor(Layout((spec,), "", "", 1), lambda *_: None)
    with pytest.raises(StartFailed, match="tokenizer-0 did not start"):
        await asyncio.wait_for(supervisor.run(), PATIENCE_S)


@pytest.mark.deep
async def test_it_can_be_stopped_while_a_router_answers_nothing() -> None:
    """No thread is left that would keep the process from ending."""
    (worker,) = layout_of(SLEEPS).processes
    # It accepts connections, and that is all.
    with socket.create_server(("127.0.0.1", 0)) as face:
        face.setblocking(False)
        metrics = f"127.0.0.1:{face.getsockname()[1]}"
        spec = ProcessSpec("router", 0, worker.command, NOWHERE, metrics)
        supervisor = Supervisor(Layout((worker, spec), "", "", 1), lambda *_: None)
        run = asyncio.create_task(supervisor.run())
        loop = asyncio.get_running_loop()
        connection, _ = await asyncio.wait_for(loop.sock_accept(face), PATIENCE_S)
        with connection:
            supervisor.stop()
            await asyncio.wait_for(run, PATIENCE_S)
            await asyncio.wait_for(loop.shutdown_default_executor(), PATIENCE_S)


async def test_there_is_one_at_a_time() -> None:
    async with running(layout_of(SLEEPS)) as first:
        second = Supervisor(layout_of(SLEEPS), lambda *_: None)
        with pytest.raises(StartFailed, match=rf"process {os.getpid()}.*'baton down' stops it"):
            await asyncio.wait_for(second.run(), PATIENCE_S)
        found = state.read()
        assert found is not None
        assert found["processes"][0]["pid"] == first.child("tokenizer-0").pid
    async with running(layout_of(SLEEPS)):
        assert state.read() is not None
    assert state.read() is None
    assert json.loads(state.lock_file().read_text())["pid"] == os.getpid()
