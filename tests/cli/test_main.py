"""The `baton` command as a user types it."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from batonlm.cli.main import commands, main


@pytest.mark.parametrize("command", commands())
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"baton {command}" in capsys.readouterr().out


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from batonlm.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'grpc', 'nixl'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "/no/such/model"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("baton up: ")
    assert "/no/such/model" in said
    assert len(said.splitlines()) == 1


def test_alone_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in commands())


@pytest.mark.parametrize(
    ("argv", "command", "said"),
    (
        (["up", "--modle", "x"], "baton up", "unknown argument --modle; did you mean --model?"),
        (["plan", "memory", "--xyzzy=4"], "baton plan memory", "unknown argument --xyzzy=4"),
        (["down", "--xyzzy"], "baton down", "unknown argument --xyzzy"),
    ),
)
def test_an_unknown_flag_is_answered_with_its_commands_usage(
    argv: list[str], command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: {command} ") and shown.endswith(f"\n{command}: {said}\n")


def test_a_reader_that_closes_its_pipe_causes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "batonlm.cli.main", "simulate", "--seconds=5"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_long_message_wraps_between_words() -> None:
    said = on_a_terminal([sys.executable, "-m", "batonlm.cli.main", "up", "--prefill=-1"])
    message = "baton up: must not be negative (0 prefills on decode) (prefill)"
    assert " ".join(said.split()) == message
    assert 20 < max(map(len, said.splitlines())) < 40


def on_a_terminal(command: list[str]) -> str:
    """Runs a command on a terminal of 40 columns, and returns what it shows."""
    main_end, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 40, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    with os.fdopen(main_end, "rb", buffering=0) as shown:
        process = subprocess.Popen(
            command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment
        )
        os.close(its_end)
        found = bytearray()
        # The terminal of an ended process is at its end, or reports EIO.
        with suppress(OSError):
            while piece := shown.read(4096):
                found += piece
        process.wait()
    return found.decode()
