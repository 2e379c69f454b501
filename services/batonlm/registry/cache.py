"""The folder in which a node keeps models: each is there whole or not at all, within a bound.

A model is fetched into a folder whose name begins with a dot, every file is verified, a manifest is
written, and then the folder is renamed. Several processes share it by file locks, which the kernel
releases when a process ends. A model that a process uses is locked, too, so that room for others is
made by removing the least recently used of the rest.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from batonlm.core.errors import InvalidArgument, Overloaded, Unavailable
from batonlm.registry.digest import MANIFEST, Contents, contents_digest
from batonlm.registry.sources import WEIGHTS, File, FolderSource, ModelSource, is_wanted, sha256_of

COPIES = 4
SAY_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
SPARE_BYTES = 64 << 20
WAIT_S = 3600.0
"""How long another process may fetch the same."""
KEPT_S = 600.0
"""What was asked for within so many seconds counts as in use: whoever fetches for another process,
as an init container does, ends before that one opens it."""
_SIZE = ".baton.size"
"""In a folder that is being fetched: how many bytes it will have."""

Say = Callable[[str], None]


def default_cache() -> Path:
    """Where models of object stores are kept unless another folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton" / "models"


def fetched(
    source: ModelSource,
    into: Path,
    say: Say,
    *,
    weights: bool = True,
    wait_s: float = WAIT_S,
    most_bytes: int = 0,
    kept_s: float = KEPT_S,
) -> Path:
    """Returns the folder with all of a source's files, and copies them if necessary. Raises
    BatonError, and OSError for `into`.

    A complete folder is used without asking the hub; an object store is asked for its manifest.
    wait_s: how long to wait for another process that fetches the model. most_bytes: of all that is
    in `into` afterwards; 0: no bound. kept_s: see KEPT_S.
    """
    into.mkdir(parents=True, exist_ok=True)
    name = source.name if weights else f"{source.name}.tokenizer"
    target = into / name
    if target.is_dir():
        _touch_used(target)
    if _usable(target, source, weights):
        return target
    # Asked before anything is written: whoever may choose names leaves nothing of those that are
    # not there.
    files = source.files(weights=weights)
    if not files:
        raise Unavailable("there is nothing that could be fetched")
    with _locked(into / f".{name}.lock", say, wait_s):
        _touch_used(target)
        if _usable(target, source, weights):
            return target
        partial = into / f".{name}.partial"
        partial.mkdir(exist_ok=True)
        for stray in {path.name for path in partial.glob("*.*")} - {file.name for file in files}:
            if (partial / stray).is_file():
                (partial / stray).unlink()
        size = sum(file.size for file in files)
        if most_bytes:
            with _locked(into / ".room.lock", say, wait_s):
                _make_room(into, name, most_bytes - size, kept_s)
                (partial / _SIZE).write_text(str(size))
        _check_room(partial, files)
        copied = _copy(source, files, partial, say)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        (partial / _SIZE).unlink(missing_ok=True)
        _write_manifest(partial, copied)
        with ExitStack() as room:
            if most_bytes:
                # Whoever makes room would find it under neither name.
                room.enter_context(_locked(into / ".room.lock", say, wait_s))
            if target.exists():
                say(f"{name} was not whole, or is another model now: it is made again")
                _set_aside(target)
            os.replace(partial, target)
        # It may have taken longer than kept_s.
        _touch_used(target)
        return target


def opened(source: ModelSource, into: Path, say: Say, ends: ExitStack, **how: Any) -> Path:
    """The same, in use until `ends`. how: as for `fetched`. Raises BatonError."""
    try:
        folder = fetched(source, into, say, **how)
    except OSError as error:
        raise Unavailable(f"{into} cannot be used: {error.strerror}") from error
    try:
        ends.enter_context(in_use(folder))
    except InvalidArgument as error:
        # Somebody else made room between both.
        raise Unavailable(error.message) from error
    if not folder.is_dir():
        raise Unavailable(f"{folder.name}: it was removed meanwhile")
    return folder


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keeps a fetched model from being removed meanwhile, by whichever process. Does nothing for
    other folders. Raises InvalidArgument naming a file that is not as it was fetched."""
    with ExitStack() as ends:
        if (folder / MANIFEST).is_file():
            # A cache that this process may not write has the file since the model was fetched; a
            # copy that lies elsewhere has none, and nobody removes it.
            with suppress(OSError):
                used = ends.enter_context(_used(folder).open("rb"))
                fcntl.flock(used, fcntl.LOCK_SH)
            check(folder)
        yield


def check(folder: Path) -> None:
    """Raises InvalidArgument (`model`) naming a file that differs from what was fetched, is missing
    or was not fetched. Whether weights have other content is found when they are loaded."""
    if why := _fault(folder, lambda file: not is_wanted(file.name, False)):
        raise InvalidArgument(
            f"{folder.name}: {why}. Delete the folder and fetch the model again", field="model"
        )


def whole(folder: Path) -> bool:
    """Returns whether all files are as verified. Only files modified since then are read."""
    return bool(_known(folder)) and not _fault(folder, lambda _: False)


def differing(folder: Path) -> str:
    """The same in words, after all files were read; "" where they are as they were fetched."""
    return _fault(folder, lambda _: False, by_time=False)


def _fault(folder: Path, trusted: Callable[[File], bool], *, by_time: bool = True) -> str:
    """Which file is not as it was fetched; "": none. trusted: whether a file's size suffices.
    by_time: whether files that were not modified since then are taken for the same."""
    known = _known(folder)
    if not folder.is_dir():
        return "it was removed meanwhile"
    if not known:
        return f"its {MANIFEST} is of another version, or torn"
    for file, checked_ns in known.values():
        try:
            status = (folder / file.name).stat()
            same = status.st_size == file.size and (
                (by_time and status.st_mtime_ns == checked_ns)
                or trusted(file)
                or sha256_of(folder / file.name) == file.sha256
            )
        except OSError:
            return f"{file.name} is not there"
        if not same:
            return f"{file.name} is not the file that was fetched"
    for file in FolderSource(folder).files(weights=True):
        if file.name not in known:
            return f"{file.name} was not fetched with it"
    return ""


def _usable(folder: Path, source: ModelSource, weights: bool) -> bool:
    if not whole(folder):
        return False
    known = {name: file for name, (file, _) in _known(folder).items()}
    return not source.differs(known, weights=weights)


def _used(folder: Path) -> Path:
    """Whoever uses a model holds a lock on this file, whose time is that of its last use."""
    return folder.parent / f".{folder.name}.used"


def _touch_used(folder: Path) -> None:
    # A cache that this process may only read is nobody's to make room in.
    with suppress(OSError):
        _used(folder).touch()


def _make_room(into: Path, own: str, most_bytes: int, kept_s: float) -> None:
    """Removes the models that were not used for the longest time until others than `own` have
    most_bytes. Raises Overloaded if those that are in use are too large; then none is removed. What
    was not fetched into the folder, such as adapters' own cache, neither counts nor is removed."""
    removable: list[tuple[float, int, Path]] = []
    total = 0
    for folder in into.iterdir():
        name = folder.name.removeprefix(".").removesuffix(".partial").removesuffix(".gone")
        begun = folder.name.startswith(".") and folder.name.endswith((".partial", ".gone"))
        if name == own or not folder.is_dir() or not (begun or (folder / MANIFEST).is_file()):
            continue
        if folder.name.endswith(".gone"):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        size = _size(folder)
        with suppress(OSError, ValueError):
            size = max(size, int((folder / _SIZE).read_text()))
        total += size
        try:
            used_at = _used(into / name).stat().st_mtime
        except OSError:
            used_at = folder.stat().st_mtime
        if time.time() - used_at >= kept_s:
            removable.append((used_at, size, folder))
    removable.sort()
    chosen = []
    for _, size, folder in removable:
        if total <= most_bytes:
            break
        if _removable(folder):
            chosen.append(folder)
            total -= size
    if total > most_bytes:
        raise Overloaded(
            f"the cache is full: {total / 1e9:.3g} GB of it are in use, and {own} may only have "
            f"{max(0, most_bytes) / 1e9:.3g} GB beside them"
        )
    if not all([_remove(folder) for folder in chosen]):
        raise Overloaded("what was to make room in the cache is used now; try again")


def _removable(folder: Path) -> bool:
    with _unused(folder) as free:
        return free


def _remove(folder: Path) -> bool:
    """Returns whether it was removed: nobody used it."""
    with _unused(folder) as free:
        if free:
            _set_aside(folder)
    return free


def _set_aside(folder: Path) -> None:
    """Removes a folder that nobody finds any more from the first moment on."""
    gone = folder.parent / f".{folder.name.removeprefix('.')}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether nobody uses or fetches a model; nobody begins to within the block."""
    name = folder.name.removeprefix(".").removesuffix(".partial")
    with (
        (folder.parent / f".{name}.lock").open("w") as fetching,
        _used(folder.parent / name).open("ab") as using,
    ):
        try:
            for file in (fetching, using):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _known(folder: Path) -> dict[str, tuple[File, int]]:
    """Returns each file and its modification time here, by name; {} without a valid manifest."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
        return {
            entry["file"]["name"]: (File(**entry["file"]), int(entry["checked_ns"]))
            for entry in entries
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_manifest(folder: Path, copied: list[tuple[File, Contents]]) -> None:
    """Writes which files are in the folder, and the model's digest, with which workers compare the
    weights that they load."""
    entries = [
        {
            "file": asdict(replace(file, sha256=contents.sha256)),
            "checked_ns": (folder / file.name).stat().st_mtime_ns,
        }
        for file, contents in copied
    ]
    found = {file.name: contents for file, contents in copied}
    weights = {
        name: each for name, each in found.items() if fnmatch(name, WEIGHTS) and "/" not in name
    }
    config = found.get("config.json")
    digest = contents_digest(config, weights) if weights and config else ""
    text = json.dumps({"files": entries, "digest": digest}, indent=2) + "\n"
    with (folder / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _check_room(partial: Path, files: list[File]) -> None:
    """Raises Overloaded if the files do not fit on the disk."""
    missing = sum(file.size for file in files) - _size(partial)
    free = shutil.disk_usage(partial).free
    if missing + SPARE_BYTES > free:
        raise Overloaded(
            f"{missing / 1e9:.1f} GB are to be fetched, and {free / 1e9:.1f} GB are free there"
        )


def _copy(
    source: ModelSource, files: list[File], partial: Path, say: Say
) -> list[tuple[File, Contents]]:
    """Copies the files. Returns them with what is in them."""
    total = sum(file.size for file in files)
    began, at_first, logged_at = time.monotonic(), _size(partial), time.monotonic()
    pool = ThreadPoolExecutor(COPIES, "fetch")
    # Largest first, so that no large file remains alone at the end.
    ordered = sorted(files, key=lambda file: -file.size)
    running = [pool.submit(source.copy, file, partial) for file in ordered]
    copied = []
    try:
        for file, future in zip(ordered, running, strict=True):
            while True:
                try:
                    copied.append((file, future.result(LOOK_EVERY_S)))
                    break
                except TimeoutError:
                    if future.done():
                        raise
                if time.monotonic() - logged_at >= SAY_EVERY_S:
                    logged_at, done = time.monotonic(), _size(partial)
                    speed = (done - at_first) / (logged_at - began) / 1e6
                    percent = min(100.0, 100 * done / max(1, total))
                    say(f"{percent:.0f} % of {total / 1e9:.1f} GB, {speed:.0f} MB/s")
    finally:
        pool.shutdown(cancel_futures=True)
    return copied


@contextmanager
def _locked(path: Path, say: Say, wait_s: float) -> Iterator[None]:
    """Holds a lock. Raises Unavailable if another process holds it for longer than wait_s."""
    give_up, logged = time.monotonic() + wait_s, False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise Unavailable(f"another process fetched it for {wait_s:g} s") from None
            if not logged:
                say("another process on this node fetches it; waiting")
                logged = True
            time.sleep(LOOK_EVERY_S)
        yield


def _size(folder: Path) -> int:
    """Returns the size of all that was copied, including the hub library's partial files."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
