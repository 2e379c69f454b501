"""A folder of models that the pods of one node share: each is there whole, or not at all.

What is being fetched lies in a folder whose name begins with a dot, and gets its name when every
file was checked. Its manifest is written last: it says what each file is, and is compared with what
is there whenever the folder is asked for. Who fetches holds a lock that the kernel drops with its
process, so that others wait for it, and go on with what it left if it dies.
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
from dataclasses import asdict, replace
from pathlib import Path

from baton.cli.model_source import WEIGHTS, File, Source, sha256_of
from baton.core.errors import Overloaded, Unavailable
from baton.engine.digest import MANIFEST, model_digest

COPIES = 4
SAY_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
SPARE_BYTES = 64 << 20

Say = Callable[[str], None]


def fetched(source: Source, into: Path, say: Say, *, weights: bool, wait_s: float) -> Path:
    """The folder with all of a source's files. Raises BatonError, and OSError for `into`.

    What is there whole is taken without asking a hub. wait_s: for somebody else who fetches.
    """
    into.mkdir(parents=True, exist_ok=True)
    name = source.name if weights else f"{source.name}.tokenizer"
    target = into / name
    if _usable(target, source, weights):
        return target
    with _locked(into / f".{name}.lock", say, wait_s):
        if _usable(target, source, weights):
            return target
        partial = into / f".{name}.partial"
        partial.mkdir(exist_ok=True)
        files = source.files(weights=weights)
        if not files:
            raise Unavailable("there is nothing that could be fetched")
        for stray in {path.name for path in partial.glob("*.*")} - {file.name for file in files}:
            if (partial / stray).is_file():
                (partial / stray).unlink()
        _check_room(partial, files)
        copied = _copy(source, files, partial, say)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        _write_manifest(partial, copied)
        if target.exists():
            say(f"{name} was not whole, or is another model now: it is made again")
            shutil.rmtree(target)
        os.replace(partial, target)
        return target


def whole(folder: Path) -> bool:
    """Whether all files are there as they were checked. Only one that was touched since is read."""
    known = _known(folder)
    try:
        return bool(known) and all(
            _is(folder / file.name, file, checked_ns) for file, checked_ns in known.values()
        )
    except OSError:
        return False


def _usable(folder: Path, source: Source, weights: bool) -> bool:
    if not whole(folder):
        return False
    known = {name: file for name, (file, _) in _known(folder).items()}
    return not source.differs(known, weights=weights)


def _is(path: Path, file: File, checked_ns: int) -> bool:
    """Raises OSError."""
    status = path.stat()
    if status.st_size != file.size:
        return False
    return status.st_mtime_ns == checked_ns or sha256_of(path) == file.sha256


def _known(folder: Path) -> dict[str, tuple[File, int]]:
    """By name: each file, and when it was changed here last; {} without a manifest of this form."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
        return {
            entry["file"]["name"]: (File(**entry["file"]), int(entry["checked_ns"]))
            for entry in entries
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_manifest(folder: Path, files: list[File]) -> None:
    """What is in the folder, and the digest that workers of these weights have, who compare it when
    they load them."""
    entries = [
        {"file": asdict(file), "checked_ns": (folder / file.name).stat().st_mtime_ns}
        for file in files
    ]
    config, weights = folder / "config.json", sorted(folder.glob(WEIGHTS))
    digest = model_digest(config, weights) if weights and config.is_file() else ""
    text = json.dumps({"files": entries, "digest": digest}, indent=2) + "\n"
    with (folder / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _check_room(partial: Path, files: list[File]) -> None:
    """Raises Overloaded: nothing is begun that cannot be ended."""
    missing = sum(file.size for file in files) - _size(partial)
    free = shutil.disk_usage(partial).free
    if missing + SPARE_BYTES > free:
        raise Overloaded(
            f"{missing / 1e9:.1f} GB are to be fetched, and {free / 1e9:.1f} GB are free there"
        )


def _copy(source: Source, files: list[File], partial: Path, say: Say) -> list[File]:
    """The files, with their digests."""
    total = sum(file.size for file in files)
    began, at_first, said = time.monotonic(), _size(partial), time.monotonic()
    pool = ThreadPoolExecutor(COPIES, "fetch")
    # The largest first, so that none is left alone at the end.
    ordered = sorted(files, key=lambda file: -file.size)
    running = [pool.submit(_one, source, file, partial) for file in ordered]
    copied = []
    try:
        for future in running:
            while True:
                try:
                    copied.append(future.result(LOOK_EVERY_S))
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
    return copied


def _one(source: Source, file: File, partial: Path) -> File:
    return replace(file, sha256=source.copy(file, partial))


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
