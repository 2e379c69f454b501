"""The digest of weights does not depend on who reads them, and on everything that is in them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from batonlm.registry import digest
from batonlm.registry.digest import Contents, contents_digest, contents_of, model_digest

PIECE = 1000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of many pieces, one and none, one of them ending with a whole piece."""
    monkeypatch.setattr(digest, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(digest, "_READ_BYTES", 300)
    numbers = random.Random(1)
    for name, size in {"a": 7 * PIECE + 1, "b": 3 * PIECE, "c": 5, "d": 0}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(numbers.randbytes(size))
    (tmp_path / "config.json").write_bytes(b"{}")
    return tmp_path


def of(folder: Path, readers: int = 3) -> str:
    return model_digest(folder / "config.json", list(folder.glob("*.safetensors")), readers=readers)


def test_it_is_the_same_whoever_reads(folder: Path) -> None:
    assert len({of(folder, readers) for readers in (1, 2, 8, 32)}) == 1


@pytest.mark.parametrize("size", [1, 299, PIECE, PIECE + 1, 100 * PIECE])
def test_it_is_known_when_the_last_byte_has_come(folder: Path, size: int) -> None:
    came: dict[str, Contents] = {}
    for path in folder.iterdir():
        data, own = path.read_bytes(), Contents()
        for at in range(0, len(data), size):
            own.update(memoryview(data)[at : at + size])
        read = contents_of(path)
        assert own.sha256 == read.sha256 == hashlib.sha256(data).hexdigest()
        assert (own.size, own.pieces) == (read.size, read.pieces)
        came[path.name] = own
    assert contents_digest(came.pop("config.json"), came) == of(folder)


@pytest.mark.parametrize("place", [("a", 0), ("a", 7 * PIECE), ("b", 2 * PIECE), ("c", 4)])
def test_every_byte_counts(folder: Path, place: tuple[str, int]) -> None:
    before, (name, at) = of(folder), place
    path = folder / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert of(folder) != before


def test_pieces_that_change_places_and_names_count(folder: Path) -> None:
    before, path = of(folder), folder / "b.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[PIECE : 2 * PIECE] + data[:PIECE] + data[2 * PIECE :])
    assert of(folder) != before
    path.write_bytes(data)
    assert of(folder) == before
    path.rename(folder / "e.safetensors")
    assert of(folder) != before


def test_all_that_was_read_is_told(folder: Path) -> None:
    told: list[int] = []
    files = list(folder.glob("*.safetensors"))
    model_digest(folder / "config.json", files, read=told.append)
    assert sum(told) == 10 * PIECE + 1 + 5 + 2


def test_a_file_that_cannot_be_read_is_no_digest(folder: Path) -> None:
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").mkdir()
    with pytest.raises(OSError):
        of(folder)
