"""Models and adapters in an object store that speaks the S3 protocol: s3://bucket/models/llama@v2.

What is below a prefix is a model when a manifest is there, which names every file with its size and
SHA-256 and is written behind all of them. An upload that was cut short has none; an object that is
not in it is never read, and one that differs from it is thrown away by name. A version is a part of
the name, and stays what it was: `push` writes no manifest over another one.

The protocol is obstore's. The environment has what its other clients read: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, AWS_WEB_IDENTITY_TOKEN_FILE and so on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from batonlm.core.errors import BatonError, InvalidArgument, Unavailable, install
from batonlm.registry.digest import MANIFEST, Contents, in_order
from batonlm.registry.sources import PATH_DIGITS, File, FolderSource, is_wanted, sha256_of

_URL = re.compile(
    r"s3://([a-z0-9][a-z0-9.-]{1,62})((?:/[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]{0,199})+)"
)
"""Without what a URL or a path would read otherwise than it is written."""
_FILE = re.compile(r"([0-9][A-Za-z0-9_-]{0,80}/)?[A-Za-z0-9_][A-Za-z0-9._+@=-]{0,199}")
PIECE_BYTES = 16 << 20
PIECES_AHEAD = 4
"""Of one file, at once in memory."""
MAX_MANIFEST_BYTES = 4 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ObjectSource:
    """A model, or an adapter, below a prefix. See `sources.ModelSource`."""

    def __init__(self, url: str) -> None:
        """Raises InvalidArgument (`model`)."""
        self._url = url.rstrip("/")
        self._bucket, self._prefix = place_of(url, "model")
        digits = hashlib.sha256(self._url.encode()).hexdigest()[:PATH_DIGITS]
        self.name = f"{self._url.rpartition('/')[2]}-{digits}"

    @property
    def served_name(self) -> str:
        """What clients call it: without its version."""
        return self._url.rpartition("/")[2].partition("@")[0]

    def files(self, *, weights: bool) -> list[File]:
        return [file for file in self._manifest() if weights or is_wanted(file.name, weights)]

    def differs(self, known: Mapping[str, File], *, weights: bool) -> bool:
        """What is here stays in use where the store has no manifest, or does not tell."""
        try:
            files = self.files(weights=weights)
        except BatonError:
            return False
        return any(
            file.name not in known or known[file.name].sha256 != file.sha256 for file in files
        )

    def copy(self, file: File, into: Path) -> Contents:
        target = into / file.name
        contents = Contents()
        try:
            target.parent.mkdir(exist_ok=True)
            with target.open("a+b") as copied:
                copied.seek(0)
                while piece := copied.read(PIECE_BYTES):
                    contents.update(piece)
                for came in self._pieces(file, contents.size):
                    copied.write(came)
                    contents.update(came)
                copied.flush()
                os.fsync(copied.fileno())
        except OSError as error:
            raise Unavailable(f"{file.name} cannot be copied: {error.strerror}") from error
        if contents.size != file.size or contents.sha256 != file.sha256:
            target.unlink()
            raise Unavailable(
                f"{file.name} of {self._url} is not the one that its manifest names; what was "
                "fetched is thrown away"
            )
        return contents

    def push(self, folder: Path, say: Callable[[str], None]) -> None:
        """Uploads a folder's files, and then the manifest. Again for the same files changes
        nothing. Raises BatonError."""
        source = FolderSource(folder)
        files = [
            File(file.name, file.size, sha256_of(folder / file.name))
            for file in source.files(weights=True)
        ]
        if all(is_wanted(file.name, False) for file in files):
            raise InvalidArgument(f"{folder} has no weights", field="model")
        for file in files:
            if not _named(file):
                raise InvalidArgument(f"{file.name!r} is no name for an object", field="model")
        known = self._manifest(absent_is_empty=True)
        if known:
            if sorted(known, key=lambda file: file.name) == files:
                return
            raise InvalidArgument(
                f"{self._url} has other files already: push these under another version",
                field="model",
            )
        entries = [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in files]
        text = json.dumps({"files": entries}, indent=1) + "\n"
        import obstore

        with self._asked("the bucket") as store:
            for file in files:
                say(f"{file.name}, {file.size / 1e6:.1f} MB")
                obstore.put(store, file.name, folder / file.name)
            try:
                # Only where there is none: of two that push at once, one is refused.
                obstore.put(store, MANIFEST, text.encode(), mode="create")
            except obstore.exceptions.AlreadyExistsError as error:
                raise InvalidArgument(
                    f"{self._url} was pushed by somebody else meanwhile", field="model"
                ) from error

    def _pieces(self, file: File, start: int) -> Iterator[memoryview]:
        """The rest of a file in order, a few pieces ahead of whoever writes them."""
        import obstore

        def piece(store: Any, at: int) -> memoryview:
            end = min(at + PIECE_BYTES, file.size)
            found = memoryview(obstore.get_range(store, file.name, start=at, end=end))
            if len(found) != end - at:
                raise Unavailable(f"{file.name} of {self._url} is shorter than its manifest says")
            return found

        with self._asked(file.name) as store, ThreadPoolExecutor(PIECES_AHEAD, "fetch") as pool:
            wanted = [partial(piece, store, at) for at in range(start, file.size, PIECE_BYTES)]
            yield from in_order(pool, wanted, PIECES_AHEAD)

    def _manifest(self, *, absent_is_empty: bool = False) -> list[File]:
        """What is below the prefix, sorted by name. Raises InvalidArgument, or Unavailable."""
        import obstore

        try:
            with self._asked(MANIFEST) as store:
                found = obstore.get(store, MANIFEST)
                if found.meta["size"] > MAX_MANIFEST_BYTES:
                    raise self._malformed()
                text = bytes(found.bytes())
        except FileNotFoundError:
            if absent_is_empty:
                return []
            raise InvalidArgument(
                f"{self._url} has no manifest ({MANIFEST}): it is not there, its upload was cut "
                "short, or 'baton push' did not make it",
                field="model",
            ) from None
        try:
            entries = json.loads(text)["files"]
            files = [File(str(e["name"]), int(e["size"]), str(e["sha256"])) for e in entries]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise self._malformed() from None
        sound = len({file.name for file in files}) == len(files) > 0 and all(
            _named(file) and file.size >= 0 and _SHA256.fullmatch(file.sha256) for file in files
        )
        if not sound:
            raise self._malformed()
        return sorted(files, key=lambda file: file.name)

    def _malformed(self) -> InvalidArgument:
        return InvalidArgument(f"the manifest of {self._url} is no manifest", field="model")

    @contextmanager
    def _asked(self, name: str) -> Iterator[Any]:
        """The store, of whose errors those are raised again that say something. name: of what is
        asked for. Raises FileNotFoundError for a manifest that is not there."""
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield self._store()
        except (PermissionDeniedError, UnauthenticatedError):
            raise InvalidArgument(
                f"the object store refuses {self._url} to these credentials (AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY)",
                field="model",
            ) from None
        except FileNotFoundError:
            if name == MANIFEST:
                raise
            raise Unavailable(f"{name} of {self._url} is not there") from None
        except (BaseError, ValueError) as error:
            raise Unavailable(
                f"the object store of {self._url} does not answer: see AWS_ENDPOINT_URL, "
                "AWS_REGION and the credentials"
            ) from error

    def _store(self) -> Any:
        return client_of(self._bucket, self._prefix, timeout_s=120, connect_s=10, retries=5)


def place_of(url: str, field: str) -> tuple[str, str]:
    """The bucket and the prefix that a URL names. Raises InvalidArgument (`field`)."""
    found = _URL.fullmatch(url.rstrip("/"))
    if found is None:
        raise InvalidArgument(
            f"{url[:200]!r} is not s3://bucket/name or s3://bucket/name@version, of letters, "
            "digits and ._@+=-",
            field=field,
        )
    return found[1], found[2].lstrip("/")


def client_of(bucket: str, prefix: str, *, timeout_s: int, connect_s: int, retries: int) -> Any:
    """An obstore client of what is below a prefix. Raises ModuleNotFoundError without obstore."""
    from obstore.store import S3Store

    given = (os.environ.get(f"AWS_ENDPOINT_URL{kind}", "") for kind in ("_S3", ""))
    plain = next(filter(None, given), "").startswith("http://")
    return S3Store(
        bucket,
        prefix=prefix,
        client_options={
            "timeout": f"{timeout_s}s",
            "connect_timeout": f"{connect_s}s",
            "allow_http": plain,
        },
        retry_config={"max_retries": retries},
    )


def _named(file: File) -> bool:
    return is_wanted(file.name, True) and _FILE.fullmatch(file.name) is not None


def object_source(url: str) -> ObjectSource:
    """Raises InvalidArgument (`model`), also where the client of object stores is missing."""
    source = ObjectSource(url)
    try:
        import obstore  # noqa: F401
    except ModuleNotFoundError:
        raise InvalidArgument(f"needs obstore: {install('s3')}", field="model") from None
    return source
