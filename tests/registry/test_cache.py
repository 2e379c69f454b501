"""A node's cache keeps its bound, never removes what is in use, and is shared by processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from batonlm.core.errors import InvalidArgument, Overloaded, Unavailable
from batonlm.registry import cache as caching
from batonlm.registry.cache import KEPT_S, fetched, in_use, opened, whole
from batonlm.registry.digest import Contents
from batonlm.registry.sources import File, FolderSource

SIZE = 10_000


def model(folder: Path) -> FolderSource:
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    return FolderSource(folder)


def fetch(source: FolderSource, into: Path, most: float, kept_s: float = 0.0) -> Path:
    """most: how many models the cache may have."""
    return fetched(
        source, into, lambda _: None, wait_s=60, most_bytes=int(most * 1.2 * SIZE), kept_s=kept_s
    )


def age(folder: Path, seconds: float) -> None:
    """Nobody has used it for so long."""
    then = time.time() - seconds
    os.utime(folder.parent / f".{folder.name}.used", (then, then))


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    sources = [model(tmp_path / name) for name in "abcd"]
    cache = tmp_path / "cache"
    a, b = fetch(sources[0], cache, 2), fetch(sources[1], cache, 2)
    age(a, 20)
    age(b, 10)
    c = fetch(sources[2], cache, 2)
    assert not a.exists() and whole(b) and whole(c)
    age(c, 20)
    assert fetch(sources[1], cache, 2) == b, "asking for it is using it"
    fetch(sources[3], cache, 2)
    assert whole(b) and not c.exists()
    fetch(sources[0], cache, 0)
    assert len([each for each in cache.iterdir() if each.is_dir()]) == 3, "0 is no bound"


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    a = fetch(model(tmp_path / "a"), cache, 1)
    other = model(tmp_path / "b")
    with in_use(a), pytest.raises(Overloaded, match="are in use"):
        fetch(other, cache, 1)
    assert whole(a)
    age(a, KEPT_S / 2)
    with pytest.raises(Overloaded):
        fetch(other, cache, 1, KEPT_S)
    age(a, KEPT_S * 2)
    assert whole(fetch(other, cache, 1, KEPT_S)) and not a.exists()
    with pytest.raises(Overloaded):
        fetch(model(tmp_path / "c"), cache, 0.5)


USES = """
import sys
from pathlib import Path
from batonlm.registry.cache import in_use
with in_use(Path(sys.argv[1])):
    print("uses", flush=True)
    sys.stdin.read()
"""


@pytest.mark.deep
def test_another_process_keeps_it_until_it_ends(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    a, other = fetch(model(tmp_path / "a"), cache, 1), model(tmp_path / "b")
    user = subprocess.Popen(
        [sys.executable, "-c", USES, str(a)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert user.stdout is not None and user.stdout.readline() == "uses\n"
        with pytest.raises(Overloaded):
            fetch(other, cache, 1)
    finally:
        user.kill()
        user.communicate()
    assert whole(fetch(other, cache, 1)) and not a.exists()


def test_a_fetch_that_was_cut_short_makes_room_too(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    a = model(tmp_path / "a")
    partial = cache / f".{a.name}.partial"
    partial.mkdir(parents=True)
    (partial / ".baton.size").write_text(str(SIZE))
    assert whole(fetch(model(tmp_path / "b"), cache, 1))
    assert not partial.exists()


def test_what_was_not_fetched_there_is_not_removed(tmp_path: Path) -> None:
    """A model that somebody put beside, and the cache of adapters, which has a bound of its own."""
    cache = tmp_path / "cache"
    model(cache / "own")
    adapter = fetch(model(tmp_path / "adapter"), cache / "adapters", 1)
    a = fetch(model(tmp_path / "a"), cache, 1)
    age(a, 20)
    for each in (cache / "own", cache / "adapters"):
        os.utime(each, (0, 0))
    assert whole(fetch(model(tmp_path / "b"), cache, 1)) and not a.exists()
    assert whole(adapter) and (cache / "own" / "model.safetensors").exists()


class Slow(FolderSource):
    """Takes so long to copy that its first use is long ago."""

    def copy(self, file: File, into: Path) -> Contents:
        age(into.parent / self.name, 2 * KEPT_S)
        return super().copy(file, into)


def test_what_took_long_to_fetch_was_just_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model(tmp_path / "a")
    a = fetch(Slow(tmp_path / "a"), cache, 1, KEPT_S)
    with pytest.raises(Overloaded):
        fetch(model(tmp_path / "b"), cache, 1, KEPT_S)
    assert whole(a)


class Counted(FolderSource):
    """While it is copied, another process begins to count what is in the cache."""

    def copy(self, file: File, into: Path) -> Contents:
        self.counting = (into.parent / ".room.lock").open("w")
        fcntl.flock(self.counting, fcntl.LOCK_EX)
        return super().copy(file, into)


def test_no_model_changes_its_name_while_room_is_made(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"weights")
    source, cache = Counted(tmp_path / "a"), tmp_path / "cache"
    with pytest.raises(Unavailable, match="another process"):
        fetched(source, cache, lambda _: None, wait_s=0.0, most_bytes=1000)
    assert [each.name for each in cache.iterdir() if each.is_dir()] == [f".{source.name}.partial"]
    source.counting.close()
    assert whole(fetch(FolderSource(tmp_path / "a"), cache, 1))


def test_names_that_are_not_there_leave_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in "ab":
        with pytest.raises(Unavailable):
            fetch(FolderSource(tmp_path / name), cache, 1)
    assert not list(cache.iterdir())


def test_a_model_that_made_room_before_it_was_opened_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "a")
    a = fetch(source, tmp_path / "cache", 1)

    def fetched_and_lost(*_: object, **__: object) -> Path:
        a.rename(tmp_path / "gone")
        return a

    monkeypatch.setattr(caching, "fetched", fetched_and_lost)
    with ExitStack() as ends, pytest.raises(Unavailable, match="removed meanwhile"):
        opened(source, tmp_path / "cache", lambda _: None, ends)


CHANGES: dict[str, tuple[str, bytes | None, str]] = {
    "weights": ("more.safetensors", b"x", "more.safetensors was not fetched"),
    "template": ("chat.jinja", b"x", "chat.jinja was not fetched"),
    "changed": ("config.json", b"[]", "config.json is not the file"),
    "gone": ("model.safetensors", None, "model.safetensors is not there"),
    "torn": ("model.safetensors", b"x", "model.safetensors is not the file"),
    "manifest": (".baton.json", b"{", "of another version, or torn"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_as_it_was_fetched_is_refused_by_name(tmp_path: Path, change: str) -> None:
    source = model(tmp_path / "a")
    found = fetch(source, tmp_path / "cache", 0)
    with in_use(found):
        pass
    name, data, said = CHANGES[change]
    (found / name).unlink(missing_ok=True)
    if data is not None:
        (found / name).write_bytes(data)
    with pytest.raises(InvalidArgument, match=said), in_use(found):
        pass
    with ExitStack() as ends:
        ends.enter_context(in_use(fetch(source, tmp_path / "cache", 0)))
