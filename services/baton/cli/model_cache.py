"""A folder of models that the pods of one node share: each is there whole, or not at all.

What is being fetched lies in a folder whose name begins with a dot, and gets its name when every
file was checked. Who fetches holds a lock that the kernel drops with its process, so that others
wait for it, and go on with what it left if it dies. Knows no source.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from baton.cli.model_source import File, Source
from baton.core.errors import Overloaded, Unavailable

MANIFEST = ".baton.json"
COPIES = 4
SAY_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
SPARE_BYTES = 64 << 20

Say = Callable[[str], None]


def fetched(source: Source, into: Path, say: Say, *, weights: bool, wait_s: float) -> Path:
    """The folder with all of a source's files. Raises BatonError, and OSError for `into`.

    What is there whole is taken without asking the source. wait_s: for somebody else who fetches.
    """
    into.mkdir(parents=True, exist_ok=True)
    name = source.name if weights else f"{source.name}.tokenizer"
    target = into / name
    if whole(target):
        return target
    with _locked(into / f".{name}.lock", say, wait_s):
        if whole(target):
            return target
        partial = into / f".{name}.partial"
        partial.mkdir(exist_ok=True)
        files = source.files(weights=weights)
        if not files:
            raise Unavailable("there is nothing that could be fetched")
        _check_room(partial, files)
        _copy(source, files, partial, say)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        sizes = {file.name: file.size for file in files}
        (partial / MANIFEST).write_text(json.dumps({"files": sizes}, indent=2) + "\n")
        if target.exists():
            say(f"{name} was not whole: it is made again")
            shutil.rmtree(target)
        os.replace(partial, target)
        return target


def whole(folder: Path) -> bool:
    """Whether all files are there, in the size that they were checked in."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _check_room(partial: Path, files: list[File]) -> None:
    """Raises Overloaded: nothing is begun that cannot be ended."""
    missing = sum(file.size for file in files) - _size(partial)
    free = shutil.disk_usage(partial).free
    if missing + SPARE_BYTES > free:
        raise Overloaded(
            f"{missing / 1e9:.1f} GB are to be fetched, and {free / 1e9:.1f} GB are free there"
        )


def _copy(source: Source, files: list[File], partial: Path, say: Say) -> None:
    total = sum(file.size for file in files)
    began, at_first, said = time.monotonic(), _size(partial), time.monotonic()
    pool = ThreadPoolExecutor(COPIES, "fetch")
    # The largest first, so that none is left alone at the end.
    ordered = sorted(files, key=lambda file: -file.size)
    running = [pool.submit(_one, source, file, partial) for file in ordered]
    try:
        for future in running:
            while True:
                try:
                    future.result(LOOK_EVERY_S)
                    break
                except TimeoutError:
                    if future.done():
                        raise
                if time.monotonic() - said >= SAY_EVERY_S:
                    said, done = time.monotonic(), _size(partial)
                    speed = (done - at_first) / (said - began) / 1e6
                    percent = min(100.0, 100 * done / max(1, total))
                    say(f"{percent:.0f} % of {total / 1e9:.1f} GB, {speed:.0f} MB/s")
    finally:
        pool.shutdown(cancel_futures=True)


def _one(source: Source, file: File, partial: Path) -> None:
    """Raises Unavailable for a file that is not what the source said; it is thrown away."""
    path = partial / file.name
    source.copy(file, partial)
    if not file.is_at(path):
        path.unlink()
        raise Unavailable(f"{file.name} came damaged and is thrown away; try again")


@contextmanager
def _locked(path: Path, say: Say, wait_s: float) -> Iterator[None]:
    """Raises Unavailable when somebody else has it for longer than wait_s."""
    give_up, told = time.monotonic() + wait_s, False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise Unavailable(f"another process fetched it for {wait_s:g} s") from None
            if not told:
                say("another process on this node fetches it; waiting")
                told = True
            time.sleep(LOOK_EVERY_S)
        yield


def _size(folder: Path) -> int:
    """Of all that is there already, also of parts of files that the hub's library keeps."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
