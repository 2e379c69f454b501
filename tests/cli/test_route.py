"""`baton route` changes the file that routers follow, and takes changes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from batonlm.cli.main import main
from batonlm.core.routing.aliases import Alias, Shadow, parse


def weights(file: Path) -> dict[str, dict[str, int]]:
    return {name: dict(alias.weights) for name, alias in parse(file.read_text()).items()}


def test_weights_are_set_and_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "aliases.json"
    route = ["route", str(file)]
    assert main([*route, "chat", "small"]) == 0
    assert main([*route, "other", "small=1", "large=3"]) == 0
    file.chmod(0o644)
    assert main([*route, "chat", "small=90", "large=10"]) == 0
    assert weights(file) == {
        "chat": {"small": 90, "large": 10},
        "other": {"small": 1, "large": 3},
    }
    assert file.stat().st_mode & 0o777 == 0o644
    assert capsys.readouterr().out.splitlines()[-1] == "chat: small 0.9, large 0.1"
    assert main([*route, "chat", "--back"]) == 0
    assert weights(file)["chat"] == {"small": 1}
    assert main([*route, "chat", "--back"]) == 1
    assert "was never changed" in capsys.readouterr().err
    assert main([*route, "other", "--remove"]) == 0
    assert main(route) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "chat: small 1"
    assert [path.name for path in tmp_path.iterdir()] == ["aliases.json"]


def test_a_shadow_stays_until_it_is_taken_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "aliases.json"
    route = ["route", str(file), "chat"]
    assert main([*route, "small", "--shadow", "new=0.05"]) == 0
    assert main([*route, "small=1", "large=1"]) == 0
    assert main([*route, "--back"]) == 0
    alias = parse(file.read_text())["chat"]
    assert alias == Alias((("small", 1),), shadow=Shadow("new", 0.05))
    assert capsys.readouterr().out.splitlines()[-1] == "chat: small 1; unseen: new 0.05"
    assert main([*route, "--shadow", "new=0"]) == 0
    assert parse(file.read_text())["chat"] == Alias((("small", 1),))


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "small=x"],
        ["chat", "small=1", "small=2"],
        ["chat", "small=0"],
        ["chat", "small", "large"],
        ["chat", "small=1", "--back"],
        ["--back"],
        ["chat", "small=1", "--shadow", "new"],
        ["chat", "small=1", "--shadow", "new=2"],
        ["chat", "small=1", "--shadow", "new=nan"],
        ["chat", "small=1", "--shadow", "=0.5"],
        ["other", "--shadow", "new=0.5"],
        ["none", "--remove"],
        ["none"],
    ],
)
def test_what_cannot_be_changes_nothing(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "aliases.json"
    assert main(["route", str(file), *words]) == 1
    assert not file.exists()
    assert main(["route", str(file), "chat", "small=2"]) == 0
    before = file.read_bytes()
    assert main(["route", str(file), *words]) == 1
    assert file.read_bytes() == before
