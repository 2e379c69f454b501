"""`baton keys` on a real file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from batonlm.cli.main import main
from batonlm.core.errors import Unauthenticated
from batonlm.router.api.access import KeyAuthenticator


def test_a_key_is_made_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    new = ["keys", "new", "--tenant", "acme", "--tokens-per-minute", "1000", str(file)]
    assert main(new) == 0
    key = capsys.readouterr().out.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text()
    authenticator = KeyAuthenticator(str(file), CollectorRegistry())
    assert authenticator.authenticate([f"Bearer {key}"]).tokens_per_minute == 1000

    # A second key of a tenant keeps its limits, but for those that are given anew.
    assert main(["keys", "new", "--tenant", "acme", "--weight", "2.5", str(file)]) == 0
    second = capsys.readouterr().out.strip()
    authenticator.look()
    for shown in (key, second):
        tenant = authenticator.authenticate([f"Bearer {shown}"])
        assert (tenant.tokens_per_minute, tenant.weight) == (1000, 2.5)

    assert main(["keys", "list", str(file)]) == 0
    first_line, _ = capsys.readouterr().out.splitlines()
    assert "acme" in first_line and "tokens_per_minute=1000" in first_line
    assert key not in first_line

    file.chmod(0o640)
    assert main(["keys", "remove", first_line.split()[0], str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    authenticator.look()
    with pytest.raises(Unauthenticated):
        authenticator.authenticate([f"Bearer {key}"])
    assert authenticator.authenticate([f"Bearer {second}"]).name == "acme"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json"]


def test_an_operators_key_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    assert main(["keys", "new", "--tenant", "acme", str(file)]) == 0
    tenants = capsys.readouterr().out.strip()
    assert "operator" not in file.read_text(), "what an older router cannot read"
    assert main(["keys", "new", "--tenant", "acme", "--operator", str(file)]) == 0
    staff = capsys.readouterr().out.strip()
    authenticator = KeyAuthenticator(str(file), CollectorRegistry())
    found = [authenticator.authenticate([f"Bearer {key}"]) for key in (tenants, staff)]
    assert [(one.name, one.operator) for one in found] == [("acme", False), ("acme", True)]
    assert main(["keys", "list", str(file)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert ["operator" in line for line in said] == [False, True]


@pytest.mark.parametrize(
    "words",
    [
        ["new", "--tenant", "a b"],
        ["new", "--tenant", "a", "--max-tokens", "0"],
        ["new", "--tenant", "a", "--weight", "nan"],
        ["list"],
        ["remove", "k-1"],
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_no_file(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    assert main(["keys", *words, str(file)]) == 1
    assert "baton keys:" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
