"""Changes files that running routers follow: one change at a time, each as a whole."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from batonlm.core.errors import InvalidArgument, NotFound

T = TypeVar("T")


@contextmanager
def changing(file: Path, parse: Callable[[str], T], new: T | None = None) -> Iterator[T]:
    """Yields the file's value and holds a lock on the folder; the file itself is replaced. new: the
    value where there is no file; None: that is an error. Raises InvalidArgument, NotFound."""
    try:
        folder = os.open(file.parent, os.O_RDONLY)
    except OSError as error:
        raise InvalidArgument(f"{file.parent}: {error.strerror}", field="file") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield new if new is not None and not file.exists() else read(file, parse)
    finally:
        os.close(folder)


def read(file: Path, parse: Callable[[str], T]) -> T:
    """Raises InvalidArgument naming the place in the file, and NotFound."""
    try:
        return parse(file.read_text())
    except FileNotFoundError:
        raise NotFound(f"there is no {file}") from None
    except (OSError, UnicodeDecodeError):
        raise InvalidArgument(f"{file} cannot be read", field="file") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error.field}: {error.message}", field="file") from None


def replace(file: Path, text: str) -> None:
    """Replaces the file atomically, so that a router never reads a part. A new one can be read by
    its owner only."""
    try:
        fd, fresh = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    except OSError as error:
        raise InvalidArgument(f"{file.parent}: {error.strerror}", field="file") from None
    try:
        with os.fdopen(fd, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if file.exists():
            # A router of another user can still read it.
            os.chmod(fresh, file.stat().st_mode & 0o777)
        os.replace(fresh, file)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
