"""The `baton` command as a user types it."""

from __future__ import annotations

import subprocess
import sys

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
