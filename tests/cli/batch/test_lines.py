"""Lines of a batch as they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli import batch
from batonlm.cli.batch import BadLine, Task, count_lines, read_lines
from batonlm.core.errors import InvalidArgument

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [], "seed": 2**63, "priority": -5},
}


def written(folder: Path, *said: object) -> Path:
    """Bytes as they are, all else as JSON."""
    path = folder / "in.jsonl"
    raw = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in said]
    path.write_bytes(b"\n".join(raw))
    return path


def test_a_good_line_is_asked_last_of_all_with_its_own_body(tmp_path: Path) -> None:
    (task,) = read_lines(written(tmp_path, GOOD))
    assert isinstance(task, Task)
    assert (task.number, task.custom_id, task.route) == (1, "a", "/v1/chat/completions")
    assert json.loads(task.body) == {"messages": [], "seed": 2**63, "priority": 2**31 - 1}


@pytest.mark.parametrize(
    ("line", "custom_id", "code"),
    [
        (b"{", None, "invalid_json_line"),
        (b"[" * 100_000, None, "invalid_json_line"),
        (b"\xff", None, "invalid_json_line"),
        (b"[]", None, "invalid_json_line"),
        ({**GOOD, "custom_id": None}, None, "missing_custom_id"),
        ({**GOOD, "custom_id": ""}, None, "missing_custom_id"),
        ({**GOOD, "custom_id": 7}, None, "missing_custom_id"),
        ({**GOOD, "method": "GET"}, "a", "invalid_method"),
        ({**GOOD, "url": "/v1/embeddings"}, "a", "invalid_url"),
        ({**GOOD, "url": ["/v1/completions"]}, "a", "invalid_url"),
        ({**GOOD, "body": None}, "a", "invalid_body"),
        ({**GOOD, "body": {"stream": True}}, "a", "invalid_body"),
    ],
)
def test_what_is_wrong_with_a_line_is_its_own_error(
    tmp_path: Path, line: object, custom_id: str | None, code: str
) -> None:
    other = {**GOOD, "custom_id": "b"}
    bad, good = read_lines(written(tmp_path, line, other))
    assert isinstance(bad, BadLine) and isinstance(good, Task)
    assert (bad.number, bad.custom_id, bad.code) == (1, custom_id, code)
    assert good.number == 2


def test_a_custom_id_is_answered_once(tmp_path: Path) -> None:
    first, second = read_lines(written(tmp_path, GOOD, GOOD))
    assert isinstance(first, Task) and isinstance(second, BadLine)
    assert (second.custom_id, second.code) == ("a", "duplicate_custom_id")


def test_empty_lines_are_counted_as_lines_but_not_answered(tmp_path: Path) -> None:
    path = written(tmp_path, b"", GOOD, b"  ", {**GOOD, "custom_id": "b"}, b"")
    assert [line.number for line in read_lines(path)] == [2, 4]
    assert count_lines(path) == 2


def test_a_line_that_is_too_long_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_LINE", 200)
    monkeypatch.setattr(batch, "READ_BYTES", 50)
    path = written(tmp_path, b"x" * 199, b"x" * 1000, GOOD)
    found = list(read_lines(path))
    assert [line.number for line in found] == [1, 2, 3]
    assert isinstance(found[1], BadLine) and found[1].code == "line_too_long"
    assert isinstance(found[2], Task)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidArgument) as refused:
            count_lines(path)
        assert refused.value.field == "IN"
