"""The journal of a batch: what is there stays, what is torn goes, and nothing is there twice."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli.batch import Journal
from batonlm.core.errors import InvalidArgument

OK: dict[str, Any] = {"status_code": 200, "request_id": "r", "body": {"text": "é\n\u2028"}}
REFUSED: dict[str, Any] = {"status_code": 400, "request_id": "r", "body": {}}
ERROR: dict[str, Any] = {"code": "invalid_url", "message": "m"}


def kept(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_results_are_in_openais_form(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path) as journal:
        assert journal.write(2, "b", OK, None)
        assert not journal.write(1, None, None, ERROR)
        assert not journal.write(3, "c", REFUSED, None)
        assert journal.num_bad == 2
    assert kept(path) == [
        {"id": "batch_req_2", "custom_id": "b", "response": OK, "error": None},
        {"id": "batch_req_1", "custom_id": None, "response": None, "error": ERROR},
        {"id": "batch_req_3", "custom_id": "c", "response": REFUSED, "error": None},
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_wherever_a_line_is_torn_the_whole_ones_are_taken_up(tmp_path: Path, apart: bool) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl" if apart else None
    with Journal(path, errors) as journal:
        journal.write(1, None, None, ERROR)
        journal.write(2, "b", OK, None)
        journal.write(3, "c", OK, None)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        with Journal(path, errors) as journal:
            assert journal.answered == {1: None, 2: "b"} and journal.num_bad == 1
            assert path.read_bytes() == whole[:last]
    with Journal(path, errors) as journal:
        journal.write(3, "c", OK, None)
    assert path.read_bytes() == whole


def test_a_torn_line_that_is_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path) as journal:
        journal.write(1, "a", OK, None)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    with Journal(path) as journal:
        assert journal.answered == {1: "a"}
    assert path.read_bytes() == whole
    path.write_bytes(b"x" * 200_000)
    with Journal(path) as journal:
        assert not journal.answered
    assert path.read_bytes() == b""


def test_another_inputs_output_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path) as journal:
        journal.write(1, "a", OK, None)
        assert journal.has(1, "a") and not journal.has(2, "a")
        with pytest.raises(InvalidArgument, match="another input"):
            journal.has(1, "b")


@pytest.mark.parametrize("text", ["{}\n", "no\n", '{"id": "x", "custom_id": "a"}\n'])
def test_what_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="line 1") as refused:
        Journal(path)
    assert refused.value.field == "OUT"
    assert path.read_text() == text


def test_only_one_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path), pytest.raises(InvalidArgument, match="another batch"):
        Journal(path)
    Journal(path).close()


def test_no_room_for_a_line_is_told_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path) as journal:
        journal.write(1, "a", OK, None)
        whole = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))
        try:
            with pytest.raises(InvalidArgument) as refused:
                journal.write(2, "b", OK, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.field == "OUT"
    assert path.read_bytes() == whole


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no file"):
        Journal(Path("/dev/null"))
