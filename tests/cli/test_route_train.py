"""`baton route train` reads questions, and writes a policy that routers take."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli.main import main
from batonlm.core.routing.aliases import parse
from batonlm.core.routing.cascade import PolicyKind


def lines(file: Path, count: int = 400, **changed: Any) -> Path:
    """Questions that the small model can answer if they are about cats."""
    draw = random.Random(1)
    rows = []
    for number in range(count):
        easy = draw.random() < 0.5
        row = {"prompt": f"{number}: what is a {'cat' if easy else 'tensor'}?", "suffices": easy}
        rows.append({**row, "logprob": 0.9 if easy else 0.3, **changed})
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return file


@pytest.mark.parametrize("kind", ["logprob", "classifier"])
def test_a_policy_is_made_and_put_into_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    data, policy = lines(tmp_path / "asked.jsonl"), tmp_path / "policy.json"
    told = tmp_path / "curve.json"
    words = ["--data", str(data), "--kind", kind, "--out", str(policy), "--json", str(told)]
    assert main(["route", "train", *words, "--quality", "1"]) == 0
    assert "<- the policy" in capsys.readouterr().out
    curve = json.loads(told.read_text())
    assert curve["at"]["score"] == curve["large"] == 1.0
    assert 0.3 < curve["at"]["share"] < 0.7 and curve["recovered"] > 0.7
    file = tmp_path / "aliases.json"
    route = ["route", str(file), "auto"]
    then = ["--then", "large", "--policy", str(policy)]
    assert main([*route, "small", *then, "--upstream", "127.0.0.1:1"]) == 0
    cascade = parse(file.read_text())["auto"].cascade
    assert cascade is not None and cascade.policy.kind is PolicyKind(kind)
    assert cascade.upstream is not None and cascade.upstream.address == "127.0.0.1:1"
    assert main([*route, *then]) == 0
    assert main([*route, "--alone"]) == 0
    alias = parse(file.read_text())["auto"]
    assert alias.cascade is None and alias.models == ("small",)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ("{", "line 1"),
        ("[]", "line 1"),
        ('{"small": 1, "large": 1}', "line 1.prompt"),
        ('{"prompt": 1}', "line 1.prompt"),
        ('{"prompt": "a", "small": 2, "large": 1}', "line 1.small"),
        ('{"prompt": "a", "suffices": 1}', "line 1.suffices"),
        ('{"prompt": "a", "suffices": true, "small": 1}', "line 1.suffices"),
        ('{"prompt": "a", "score": 1}', "line 1"),
        ('{"prompt": "a", "right": "b"}', "data, question 1"),
        ('{"prompt": "a", "suffices": true}', "more examples"),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, where: str
) -> None:
    data = tmp_path / "asked.jsonl"
    data.write_text(row + "\n")
    words = ["--data", str(data), "--kind", "classifier", "--out", str(tmp_path / "policy.json")]
    assert main(["route", "train", *words, "--share", "0.5"]) == 1
    assert where in capsys.readouterr().err
    assert not (tmp_path / "policy.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train"],
        ["train", "--data", "DATA", "--out", "OUT"],
        ["train", "--data", "DATA", "--out", "OUT", "--share", "2"],
        ["train", "--data", "NONE", "--out", "OUT", "--share", "0.5"],
        ["aliases.json", "auto", "small", "--then", "large"],
        ["aliases.json", "auto", "small", "--then", "large", "--policy", "NONE"],
        ["aliases.json", "auto", "small", "--then", "large", "--policy", "DATA"],
        ["aliases.json", "auto", "small", "--upstream", "x:1"],
    ],
)
def test_words_that_say_too_little_change_nothing(tmp_path: Path, words: list[str]) -> None:
    lines(tmp_path / "DATA")
    before = sorted(path.name for path in tmp_path.iterdir())
    files = {"DATA", "OUT", "NONE", "aliases.json"}
    given = [str(tmp_path / word) if word in files else word for word in words]
    assert main(["route", *given]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before
