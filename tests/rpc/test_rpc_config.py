"""Configuration: precedence, types, and one clear line for everything that is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.rpc.config import describe, load, option


@dataclass(frozen=True, slots=True)
class Base:
    """A process for tests."""

    listen: str = option("127.0.0.1:0", "where it listens", unit="host:port")
    model: str = option("", "what it serves", required=True)


@dataclass(frozen=True, slots=True)
class Config(Base):
    """A process for tests. More is not printed."""

    REMOVED: ClassVar = frozenset(("order", "fast"))

    slots: int = option(16, "number of slots", minimum=2, maximum=2**20)
    wait_ms: float = option(2.5, "longest wait", unit="ms", minimum=0.0)
    exact: bool = option(True, "same tokens")
    peers: tuple[str, ...] = option((), "known peers")
    mode: str = option("safe", "how it runs", choices=("safe", "fast"))
    dtype: str = option("auto", "number type", choices=("auto", "float32"))
    api_key: str = option("", "what clients must send", secret=True)

    def __post_init__(self) -> None:
        if self.mode == "fast" and self.exact:
            raise InvalidArgument("fast cannot be exact", field="mode")


def read(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    return load(Config, ["--model", "m", *argv], environ or {}, prog="test")


def test_defaults() -> None:
    assert read() == Config(model="m")


def test_file_below_environment_below_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'slots = 3\nwait_ms = 3\nlisten = "file:1"\nexact = false\npeers = ["a", "b"]\n'
    )
    environ = {"BATON_WAIT_MS": "4.5", "BATON_LISTEN": "environment:2"}
    config = read(["--config", str(file), "--listen", "flag:3"], environ)
    assert config == Config(
        model="m", slots=3, wait_ms=4.5, listen="flag:3", exact=False, peers=("a", "b")
    )
    assert isinstance(config.wait_ms, float)


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('slots = 5\nmodel = "from the file"\n')
    config = load(Config, [], {"BATON_CONFIG": str(file)}, prog="test")
    assert (config.slots, config.model) == (5, "from the file")


@pytest.mark.parametrize(
    ("argv", "exact"),
    [
        (["--exact"], True),
        (["--exact", "0"], False),
        (["--no-exact"], False),
        (["--exact", "true"], True),
    ],
)
def test_forms_of_a_bool(argv: list[str], exact: bool) -> None:
    assert read(argv).exact is exact


def test_lists_and_choices() -> None:
    config = read(["--peers", "a:1, b:2,", "--mode", "fast", "--no-exact"])
    assert config.peers == ("a:1", "b:2")
    assert config.mode == "fast"


def test_variables_of_other_processes_are_ignored() -> None:
    assert read([], {"BATON_SOMETHING_ELSE": "1", "SLOTS": "9"}) == Config(model="m")


@pytest.mark.parametrize(
    ("argv", "environ", "file", "words"),
    [
        (["--slots", "1"], {}, "", ["slots", "'1'", "--slots", "whole number from 2 to 1048576"]),
        (["--slots", "1048577"], {}, "", ["slots", "'1048577'"]),
        (["--slots", "many"], {}, "", ["slots", "'many'"]),
        (["--slots", "3.5"], {}, "", ["slots", "'3.5'"]),
        (["--wait-ms", "5 ms"], {}, "", ["wait_ms", "'5 ms'"]),
        (["--wait-ms", ""], {}, "", ["wait_ms", "''"]),
        ([], {"BATON_SLOTS": ""}, "", ["slots", "BATON_SLOTS"]),
        ([], {"BATON_WAIT_MS": "-1"}, "", ["wait_ms", "'-1'", "BATON_WAIT_MS", "at least 0"]),
        ([], {"BATON_WAIT_MS": "nan"}, "", ["wait_ms", "'nan'"]),
        ([], {"BATON_WAIT_MS": "inf"}, "", ["wait_ms", "'inf'"]),
        ([], {"BATON_WAIT_MS": "1e999"}, "", ["wait_ms", "'1e999'"]),
        ([], {}, "wait_ms = inf", ["wait_ms", "inf"]),
        ([], {"BATON_EXACT": "maybe"}, "", ["exact", "'maybe'", "true or false"]),
        (["--dtype", "int4"], {}, "", ["dtype", "'int4'", "one of auto, float32"]),
        (["--mode", "slow"], {}, "", ["mode", "'slow'", "one of safe, fast"]),
        (["--mode", "fast"], {}, "", ["mode", "fast cannot be exact"]),
        (["--slot", "3"], {}, "", ["--slot", "did you mean '--slots'"]),
        (["word"], {}, "", ["word"]),
        (["--slots"], {}, "", ["--slots"]),
        ([], {}, "slots = true", ["slots", "True", "c.toml"]),
        ([], {}, "slots = 1.5", ["slots", "1.5"]),
        ([], {}, "listen = 80", ["listen", "80"]),
        ([], {}, "peers = [1]", ["peers", "[1]"]),
        ([], {}, "exact = 1", ["exact", "1"]),
        ([], {}, "slot = 3", ["unknown key 'slot'", "did you mean 'slots'"]),
        ([], {}, "slots 3", ["config", "not TOML"]),
        (["--config", "/does/not/exist"], {}, "", ["config", "No such file"]),
    ],
)
def test_what_is_wrong_is_one_clear_line(
    argv: list[str],
    environ: dict[str, str],
    file: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file:
        (tmp_path / "c.toml").write_text(file)
        argv = ["--config", str(tmp_path / "c.toml"), *argv]
    with pytest.raises(SystemExit) as exit_:
        read(argv, environ)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("test: error: ") and printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err


@pytest.mark.parametrize(
    ("argv", "environ", "file", "source"),
    [
        (["--order", "fcfs"], {}, "", "--order"),
        (["--fast"], {}, "", "--fast"),
        (["--no-fast"], {}, "", "--fast"),
        ([], {"BATON_ORDER": "fcfs"}, "", "BATON_ORDER"),
        ([], {}, 'order = "fcfs"', "c.toml"),
    ],
)
def test_a_former_option_is_ignored_with_a_warning(
    argv: list[str],
    environ: dict[str, str],
    file: str,
    source: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file:
        (tmp_path / "c.toml").write_text(file)
        argv = ["--config", str(tmp_path / "c.toml")]
    assert read(argv, environ) == Config(model="m")
    warning = capsys.readouterr().err
    assert warning.startswith("test: warning: ") and warning.count("\n") == 1
    assert source in warning and "docs/upgrading.md" in warning
    name = "fast" if "fast" in source else "order"
    assert warning.startswith(f"test: warning: {name} (from "), "it names the option, not the file"


@pytest.mark.parametrize(("text", "number"), [(".5", 0.5), ("5.", 5.0), ("+7", 7.0), ("1e3", 1e3)])
def test_a_number_with_a_fraction_is_written_as_in_python(text: str, number: float) -> None:
    assert read(["--wait-ms", text]).wait_ms == number
    assert read([], {"BATON_WAIT_MS": text}).wait_ms == number


def test_help_does_not_show_a_former_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Config, ["--help"], {}, prog="test")
    assert "order" not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--model", ""]])
def test_a_required_field_must_be_given(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(Config, argv, {}, prog="test")
    assert "model: is required: give --model or BATON_MODEL" in capsys.readouterr().err


def test_a_secret_is_never_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hunter2" not in describe(read(["--api-key", "hunter2"]))
    assert "api_key=***" in describe(read(["--api-key", "hunter2"]))


def test_help_shows_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load(Config, ["--help"], {}, prog="test")
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "A process for tests",
        "--slots",
        "number of slots",
        "from 2 to 1048576; default 16",
        "default 2.5 ms",
        "--exact",
        "--listen",
        "default 127.0.0.1:0",
        "required",
        "one of safe, fast; default safe",
    ):
        assert words in text


def test_describe_is_one_line_that_can_be_given_back() -> None:
    line = describe(read(["--peers", "a,b"]))
    assert "\n" not in line
    for words in ("slots=16", "wait_ms=2.5", "exact=true", "peers=a,b", "mode=safe", "api_key=''"):
        assert words in line


def test_reading_configuration_loads_no_grpc() -> None:
    code = "import sys, batonlm.rpc.config; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
