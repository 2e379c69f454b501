"""A small text file that is read at the start and again whenever it was replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from batonlm.core.errors import InvalidArgument
from batonlm.rpc.tls import LOOK_S, signature

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20

T = TypeVar("T")


class FollowedFile(Generic[T]):
    """The value of the last valid state of a file: an invalid one changes nothing."""

    def __init__(self, path: str, parse: Callable[[str], T], what: str, field: str) -> None:
        """parse: makes the value; raises InvalidArgument whose field is the place in the file.
        what: the file, for logs. Raises InvalidArgument naming the option `field`."""
        self._path, self._parse, self._what, self._field = Path(path), parse, what, field
        self.stale = False
        """Whether the file is invalid now, and the value of an older state."""
        self._seen = signature([self._path])
        try:
            self.value = self._read()
        except InvalidArgument as error:
            where = f" at {error.field}" if error.field != field else ""
            raise InvalidArgument(f"{path}{where}: {error.message}", field=field) from None

    async def run(self) -> None:
        """Looks at the file every second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Reads the file again when it was replaced. Blocks."""
        found = signature([self._path])
        if found == self._seen:
            self.stale = False
            return
        try:
            value = self._read()
        except InvalidArgument as error:
            if not self.stale:
                log.error(
                    "the file of %s cannot be used, the former %s stay: %s %s",
                    self._what, self._what.split()[-1], error.field, error.message,
                )  # fmt: skip
            # The file may be half written; the next look reads it again.
            self.stale = True
            return
        self.value, self._seen, self.stale = value, found, False
        log.info("took over the file of %s", self._what)

    def _read(self) -> T:
        try:
            with self._path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            words = error.strerror or "cannot be read"
            raise InvalidArgument(words, field=self._field) from None
        if len(raw) > MAX_FILE_BYTES:
            raise InvalidArgument(f"must have at most {MAX_FILE_BYTES} bytes", field=self._field)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise InvalidArgument("is not UTF-8", field=self._field) from None
        return self._parse(text)
