"""A log line says who, and what a client sends cannot forge another line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from batonlm.rpc.logs import JsonFormatter, LineFormatter

INSTANCE_ID = "0123456789abcdef" * 2


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("baton.x", logging.INFO, "", 0, message, args, None)
    vars(made).update(extra)
    return made


def test_a_readable_line() -> None:
    line = LineFormatter("decode", INSTANCE_ID).format(record("took %d", 3, request_id="r1"))
    assert line.endswith(" INFO decode 01234567 baton.x: took 3 request_id=r1")


def test_a_json_line() -> None:
    line = JsonFormatter("decode", INSTANCE_ID).format(record("took %d", 3, request_id="r1"))
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "info",
        "role": "decode",
        "instance_id": INSTANCE_ID,
        "logger": "baton.x",
        "message": "took 3",
        "request_id": "r1",
    }


@pytest.mark.parametrize("formatter", [LineFormatter, JsonFormatter])
@pytest.mark.parametrize("hostile", ["a\nforged", "a\rforged", "\x1b[2Jforged", "\u2028forged"])
def test_values_cannot_forge_lines(
    formatter: type[LineFormatter] | type[JsonFormatter], hostile: str
) -> None:
    line = formatter("router", INSTANCE_ID).format(record("%s", hostile, request_id=hostile))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line


@pytest.mark.parametrize("formatter", [LineFormatter, JsonFormatter])
def test_an_exception_comes_along(
    formatter: type[LineFormatter] | type[JsonFormatter],
) -> None:
    made = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "ValueError: why" in formatter("router", "").format(made)


def test_setup_writes_to_stderr_from_a_level_on() -> None:
    code = (
        "import logging; from batonlm.rpc.logs import setup; setup('router', 'info');"
        "logging.debug('hidden'); logging.info('shown')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.endswith("INFO router root: shown\n")
