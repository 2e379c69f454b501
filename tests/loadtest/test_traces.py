"""Recorded traffic, and lines of it that are broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_loadtest import traces
from baton_loadtest.traces import BLOCK, Recorded
from batonlm.core.errors import InvalidArgument

GOOD = '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}'
COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncake(tmp_path: Path) -> None:
    other = '{"timestamp": 2000, "input_length": 512, "output_length": 0, "hash_ids": [0]}'
    found = traces.read(written(tmp_path, GOOD, "", other))
    assert found.requests == (Recorded(1.5, 700, 5, (0, 9)), Recorded(2.0, 512, 0, (0,)))
    assert found.broken == ()


def test_azure(tmp_path: Path) -> None:
    first, second = "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8"
    found = traces.read(written(tmp_path, COLUMNS, first, second)).requests
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(4808, 10), (3180, 8)]
    assert found[1].at_s - found[0].at_s == pytest.approx(0.052)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: is no JSON"),
        ("[" * 100_000, "line 2: is no JSON"),
        ("7", "line 2: is no JSON object"),
        ('{"input_length": 1, "output_length": 1, "hash_ids": [1]}', "line 2: timestamp"),
        (GOOD.replace("1500", "NaN"), "line 2: timestamp"),
        (GOOD.replace("1500", "true"), "line 2: timestamp"),
        (GOOD.replace("700", "0"), "line 2: input_length"),
        (GOOD.replace("700", "700.5"), "line 2: input_length"),
        (GOOD.replace(": 5", ": -5"), "line 2: output_length"),
        (GOOD.replace("[0, 9]", '["a", 9]'), "line 2: hash_ids"),
        (GOOD.replace("[0, 9]", "[0]"), "line 2: hash_ids: 1 of them"),
        (GOOD.replace("[0, 9]", "null"), "line 2: hash_ids"),
    ],
)
def test_a_broken_line_of_mooncake(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, GOOD, line, GOOD)
    with pytest.raises(InvalidArgument) as caught:
        traces.read(path)
    assert caught.value.field == "trace"
    assert f"{path}, {said}" in caught.value.message
    found = traces.read(path, skip_broken=True)
    assert len(found.requests) == 2
    assert len(found.broken) == 1 and said in found.broken[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("yesterday,1,2", "line 3: TIMESTAMP"),
        ("2023-11-16 18:17:03.9799600,1", "line 3: GeneratedTokens: is missing"),
        ("2023-11-16 18:17:03.9799600,-1,2", "line 3: ContextTokens"),
        ("2023-11-16 18:17:03.9799600,0,2", "line 3: ContextTokens"),
        ("2023-11-16 18:17:03.9799600,1,two", "line 3: GeneratedTokens"),
    ],
)
def test_a_broken_line_of_azure(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, COLUMNS, "2023-11-16 18:17:03.9799600,1,2", line)
    with pytest.raises(InvalidArgument, match=said):
        traces.read(path)
    assert len(traces.read(path, skip_broken=True).requests) == 1


def test_many_broken_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"line 4: is no JSON; and 7 more"):
        traces.read(written(tmp_path, GOOD, *["{"] * 10))


@pytest.mark.parametrize("text", ["", "a,b\n1,2", "\x00\xff"])
def test_a_file_of_another_kind(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match="line 1: neither"):
        traces.read(written(tmp_path, text))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        traces.read(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="has no request"):
        traces.read(written(tmp_path, COLUMNS))
    with pytest.raises(InvalidArgument, match="has no request"):
        traces.read(written(tmp_path, "{"), skip_broken=True)


@settings(max_examples=25)
@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 10**9))
def test_what_is_written_is_read(prompt: int, output: int, at_ms: int) -> None:
    blocks = list(range(-(-prompt // BLOCK)))
    line = json.dumps(
        {"timestamp": at_ms, "input_length": prompt, "output_length": output, "hash_ids": blocks}
    )
    assert traces.mooncake(line) == Recorded(at_ms / 1000, prompt, output, tuple(blocks))
