"""`baton chat` against the router's gRPC service over a real socket, answers scripted."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli import chat, state
from batonlm.cli.access import access_of
from batonlm.core.errors import (
    ContextLengthExceeded,
    Internal,
    InvalidArgument,
    ModelNotFound,
    Unavailable,
)
from batonlm.core.request.request import ChatPrompt
from batonlm.rpc.server import ProcessServer
from tests.nobody import nobody
from tests.services.router_http.scripted import Scripted, grpc_server, whole_answer

PATIENCE_S = 120.0
ANSWER = whole_answer("<user>hello", 0)


@contextmanager
def serving(frontend: Scripted, *, ready: bool = True) -> Iterator[str]:
    """The router's servicer on an event loop of its own thread; gives its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    async def start() -> tuple[ProcessServer, str]:
        server = grpc_server(frontend)
        address = await server.start()
        server.set_serving(ready)
        return server, address

    try:
        server, address = on_loop(start())
        try:
            yield address
        finally:
            on_loop(server.stop(0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def frontend() -> Scripted:
    return Scripted()


@pytest.fixture
def address(frontend: Scripted) -> Iterator[str]:
    with serving(frontend) as address:
        yield address


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.add_parser(parser.add_subparsers())
    return parser.parse_args(["chat", *argv])


def test_one_question(address: str, frontend: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--max-tokens", "400", "--temperature", "0", "--seed", "5", "--system", "be brief"]
    assert chat.run(parsed("hello", "--grpc", address, *argv)) == 0
    out, err = capsys.readouterr()
    assert out == whole_answer("<system>be brief<user>hello", 0) + "\n"
    assert err == ""
    (request,) = frontend.seen
    assert (request.max_tokens, request.seed, request.sampling.temperature) == (400, 5, 0.0)


def test_defaults_are_left_to_the_server(address: str, frontend: Scripted) -> None:
    assert chat.run(parsed("hello", "--grpc", address)) == 0
    (request,) = frontend.seen
    assert (request.max_tokens, request.seed, request.sampling.temperature) == (None, None, 1.0)


def test_standard_input_is_the_prompt(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert chat.run(parsed("--grpc", address)) == 0
    assert capsys.readouterr().out == ANSWER + "\n"


def test_the_address_is_that_of_the_running_baton(
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert access_of(parsed(), "10.0.0.1:1").address == "10.0.0.1:1"
    state.write({"grpc": address, "http": "", "processes": []} | state.process(os.getpid()))
    chat.ask(access_of(parsed(), ""), "hello")
    assert capsys.readouterr().out == ANSWER + "\n"


def test_nothing_listens() -> None:
    with (
        nobody() as address,
        pytest.raises(Unavailable, match=f"nothing listens on {address}.*baton up"),
    ):
        chat.run(parsed("hello", "--grpc", address))


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--grpc", "nowhere"], "grpc"),
        (["--seed", "-1"], "seed"),
        (["--max-tokens", str(2**40)], "max_tokens"),
    ],
)
def test_wrong_flags_name_the_field(argv: list[str], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat.run(parsed("hello", *argv))
    assert caught.value.field == field


def test_failures_come_through(address: str, frontend: Scripted) -> None:
    with pytest.raises(ModelNotFound):
        chat.run(parsed("hello", "--grpc", address, "--model", "other"))
    with pytest.raises(InvalidArgument) as caught:
        chat.run(parsed("hello", "--grpc", address, "--temperature", "9"))
    assert caught.value.field == "options.sampling.temperature"
    # Of another kind, the client would try to go on for half a minute.
    frontend.failure = Internal("the model fails")
    with pytest.raises(Internal, match="the model fails"):
        chat.run(parsed("hello", "--grpc", address))


class Terminal:
    """A child process on a pseudo-terminal, typed to and read from as a person would."""

    def __init__(self, *argv: str) -> None:
        self._side, child = os.openpty()
        # Without a controlling terminal Ctrl-C would be a character like any other.
        code = (
            "import fcntl, json, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            # A test run in the background hands an ignored SIGINT down.
            "signal.signal(signal.SIGINT, signal.default_int_handler);"
            "from tests.cli.test_chat import parsed; from batonlm.cli import chat;"
            "sys.exit(chat.run(parsed(*json.loads(sys.argv[1]))))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(argv)],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read_to = 0

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def interrupt(self, until: str) -> None:
        """Ctrl-C, again each second: input() misses one that comes just before it waits."""
        deadline = time.monotonic() + PATIENCE_S
        typed = 0.0
        while until not in self.seen[self._read_to :] and time.monotonic() < deadline:
            if time.monotonic() - typed > 1:
                self.type("\x03")
                typed = time.monotonic()
            self._receive(0.1)
        self.wait_for(until)

    def wait_for(self, text: str) -> str:
        """What came since the last wait, up to and with `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.seen[self._read_to :]:
            left = deadline - time.monotonic()
            assert left > 0 and self._receive(left), self.seen
        end = self.seen.index(text, self._read_to) + len(text)
        part, self._read_to = self.seen[self._read_to : end], end
        return part

    def _receive(self, timeout_s: float) -> bool:
        """Adds what comes to what was seen. False when nothing came."""
        if not select.select([self._side], [], [], timeout_s)[0]:
            return False
        self.seen += self._decoder.decode(os.read(self._side, 4096))
        return True

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._side)


@pytest.fixture
def terminal(address: str) -> Iterator[Terminal]:
    with closing(Terminal("--grpc", address)) as opened:
        yield opened


@pytest.mark.deep
def test_a_conversation_on_a_terminal(terminal: Terminal, frontend: Scripted) -> None:
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for(ANSWER)
    assert f"{len(ANSWER.encode())} tokens, first after " in terminal.wait_for("tokens/s")
    terminal.wait_for("> ")
    terminal.type("and\n")
    terminal.wait_for("tokens/s")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    prompt = frontend.seen[1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(m.role, m.content) for m in prompt.messages] == [
        ("user", "hello"),
        ("assistant", ANSWER),
        ("user", "and"),
    ]


@pytest.mark.deep
def test_ctrl_c_stops_the_answer_but_not_the_conversation(
    terminal: Terminal, frontend: Scripted
) -> None:
    frontend.hold = True
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("\n0")
    terminal.type("\x03")
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    deadline = time.monotonic() + PATIENCE_S
    while frontend.open_streams and time.monotonic() < deadline:
        time.sleep(0.01)
    assert frontend.open_streams == 0
    terminal.type("half a li")
    terminal.wait_for("half a li")
    terminal.interrupt("> ")
    frontend.refusal = ContextLengthExceeded("the prompt is too long", field="prompt")
    terminal.type("again\n")
    terminal.wait_for("baton chat: the prompt is too long")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    # The stopped answer's text is part of the conversation, until all no longer fits.
    _, second, third = frontend.seen
    assert isinstance(second.prompt, ChatPrompt) and isinstance(third.prompt, ChatPrompt)
    assert [m.content for m in second.prompt.messages] == ["hello", "0", "again"]
    assert [m.content for m in third.prompt.messages] == ["again"]


@pytest.mark.deep
def test_a_terminal_does_not_obey_the_model(address: str) -> None:
    with closing(Terminal("\x1b[31mred\x07", "--grpc", address)) as terminal:
        shown = terminal.wait_for("tokens/s").partition("tokens,")[0]
        assert terminal.end() == 0
    text = shown.split("世")[0]
    assert "\x1b" not in text and "\x07" not in text and "der" in text
