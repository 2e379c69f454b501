"""The output of a batch, which is also its journal.

A result is one line, written in one go once it is whole, and never changed. Whatever ends the
process, at most the last line is torn: it is cut off when the batch goes on, and what it answered
is asked again. Which lines of the input have their result is read from the results themselves: the
number is in `id`. One process at a time has the files: they are locked.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from baton.core.errors import InvalidArgument

PREFIX = "batch_req_"
BLOCK = 1 << 16


class _Result(msgspec.Struct):
    """What is read back of a line; the rest is passed over."""

    id: str
    custom_id: str | None
    response: _Status | None = None


class _Status(msgspec.Struct):
    status_code: int


_decoder = msgspec.json.Decoder(_Result)


class Journal:
    """answered: custom_id by number of the line. num_bad: how many of these are errors. errors:
    where these go instead, if anywhere. A context manager.
    """

    def __init__(self, output: Path, errors: Path | None = None) -> None:
        """Takes up what is there. Raises InvalidArgument for files that cannot be written, that
        another process writes, or that hold something else."""
        self.answered: dict[int, str | None] = {}
        self.num_bad = 0
        self._files: list[IO[bytes]] = []
        try:
            self._output = self._open(output, "OUT")
            self._errors = self._output if errors is None else self._open(errors, "errors")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """What was written is on disk then."""
        for file in self._files:
            with file, suppress(OSError):
                os.fsync(file.fileno())

    def has(self, number: int, custom_id: str | None) -> bool:
        """Whether a line has its result. Raises InvalidArgument when that is another line's."""
        if number not in self.answered:
            return False
        if self.answered[number] != custom_id:
            raise InvalidArgument(
                f"was made from another input: line {number} had another custom_id", field="OUT"
            )
        return True

    def write(
        self,
        number: int,
        custom_id: str | None,
        response: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> bool:
        """Adds the one result of a line. Returns whether it is a good one. Raises InvalidArgument
        when it cannot be written, as on a full disk; then nothing of it is there."""
        result = {
            "id": f"{PREFIX}{number}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        good = error is None and response is not None and response["status_code"] < 400
        file = self._output if good else self._errors
        size = os.fstat(file.fileno()).st_size
        # Unbuffered, so that nothing is lost with the process; a full disk takes a part.
        left = memoryview(json.dumps(result).encode() + b"\n")
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            file.truncate(size)
            raise InvalidArgument(
                f"cannot be written: {error.strerror}", field="OUT" if good else "errors"
            ) from None
        self.answered[number] = custom_id
        self.num_bad += not good
        return good

    def _open(self, path: Path, field: str) -> IO[bytes]:
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", field=field) from None
        self._files.append(file)
        if not path.is_file():
            raise InvalidArgument(f"{path} is no file", field=field)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidArgument(
                f"{path} is being written by another batch", field=field
            ) from None
        _cut(file)
        self._take_up(path, field)
        return file

    def _take_up(self, path: Path, field: str) -> None:
        with path.open("rb") as lines:
            for place, line in enumerate(lines, 1):
                try:
                    result = _decoder.decode(line)
                    number = int(result.id.removeprefix(PREFIX))
                except (msgspec.DecodeError, ValueError):
                    raise InvalidArgument(
                        f"line {place} of {path} is no result of a batch", field=field
                    ) from None
                status = 0 if result.response is None else result.response.status_code
                self.answered[number] = result.custom_id
                self.num_bad += not 0 < status < 400


def _cut(file: IO[bytes]) -> None:
    """Takes away what comes after the last end of a line."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        file.truncate(end)
