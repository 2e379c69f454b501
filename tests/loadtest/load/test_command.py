"""`baton loadtest` as a user types it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton_loadtest.bench.known_server import KnownAnswer, Latencies, known
from batonlm.cli.main import main

SCENARIO = """
[arrivals]
kind = "constant"
rate = 40
seconds = 1
[lengths]
prompt_tokens = 10
output_tokens = 3
"""
FAST = Latencies(first_s=0.02, between_s=0.005)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


class Serving:
    """A server of known latencies that runs."""

    def __init__(self, address: str, records: Callable[[], list[KnownAnswer]]) -> None:
        self.address, self.records = address, records


@contextmanager
def serving(latencies: Latencies) -> Iterator[Serving]:
    """As `known`, for a command that has an event loop of its own."""
    with asyncio.Runner() as runner:
        context = known(latencies)
        server = runner.run(context.__aenter__())
        try:
            yield Serving(server.address, lambda: runner.run(server.records()))
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.mark.deep
def test_a_run(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    with serving(replace(FAST, refuse_every=4)) as server:
        words = ["loadtest", str(file), "--http", server.address, "--json", str(figures)]
        assert main([*words, "--html", str(page), "--seed", "5"]) == 0
    said = json.loads(figures.read_text())
    assert said["seed"] == 5 and str(tmp_path) not in said["command"]
    found = {result["name"]: result["value"] for result in said["results"]}
    assert found["requests due"] == 40
    assert (found["answered"], found["refused"]) == (30, 10)
    assert found["output tokens"] == 90
    assert "<svg" in page.read_text()
    assert "first token, p99" in capsys.readouterr().out


@pytest.mark.deep
def test_a_search(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FAST) as server:
        words = ["loadtest", str(file), "--http", server.address, "--search", "--seconds", "0.5"]
        few = ["--search-to", "160", "--search-from", "40", "--slo-first-s", "60", "--lag-s", "60"]
        page = tmp_path / "page.html"
        assert main([*words, *few, "--slo-between-s", "60", "--html", str(page)]) == 0
        text = page.read_text()
        assert "<svg" in text
        assert all(
            title in text for title in ("Within objectives", "First token", "Between tokens")
        )
        assert "At least 160 a second" in capsys.readouterr().out
        assert main([*words, *few, "--slo-first-s", "0.000001"]) == 1
    assert "Even the lowest rate, 40 a second" in capsys.readouterr().out


@pytest.mark.deep
def test_nothing_answered(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(replace(FAST, fail_every=1)) as server:
        assert main(["loadtest", str(file), "--http", server.address, "--rate", "5"]) == 1
    assert "No request was answered: 5 status 500." in capsys.readouterr().err


@pytest.mark.deep
def test_ctrl_c_shows_what_there_is(file: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    with serving(FAST) as server:
        running = subprocess.Popen(
            [sys.executable, "-m", "batonlm.cli.main", "loadtest", str(file), "--seconds", "600",
             "--http", server.address, "--json", str(figures)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            # As many as show that the first ones have been read, too.
            answers = 0
            while (answers := answers + len(server.records())) < 20:
                assert time.monotonic() < deadline and running.poll() is None
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=120)
        finally:
            running.kill()
            running.communicate()
    assert running.returncode == 130
    assert "Stopped before its end." in err
    assert "first token, p99" in out
    assert json.loads(figures.read_text())["results"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a scenario file or --trace (scenario)"),
        (["FILE", "--http", "127.0.0.1:1"], "nothing listens on 127.0.0.1:1"),
        (["FILE", "--http", "nowhere"], "(http)"),
        (["FILE", "--http", "127.0.0.1:1", "--token-ids", "5"], "(token_ids)"),
        (["FILE", "--max-open", "0"], "(max_open)"),
        (["FILE", "--slo-first-s", "nan"], "(slo_first_s)"),
        (["FILE", "--http", "192.0.2.1:1", "--api-key", "k"], "(api_key)"),
        (["--trace", "none.jsonl"], "none.jsonl: No such file or directory (trace)"),
    ],
)
def test_an_error_is_one_line(
    file: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadtest", *(str(file) if word == "FILE" else word for word in words)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("baton loadtest: ") and len(told.splitlines()) == 1
    assert said in told
