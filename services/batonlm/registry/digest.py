"""The digest by which two workers find whether they serve the same weights.

Weights are read in pieces by many threads at once, because one reader leaves most of a disk or a
network idle. What was read is in the page cache then, and loading reads it from there. Pieces are
hashed with xxh3, which is faster than they come, where BLAKE2b was what a start waited for: this
tells weights apart that differ by mistake, and whoever can choose a worker's weights needs no
collision. The digest is of the pieces' digests; one that is made otherwise is another one.

What is fetched is read once: its `Contents` are known when its last byte has come.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_128

PIECE_BYTES = 32 << 20
"""Part of the digest: another size makes other digests."""

MANIFEST = ".baton.json"
"""In a folder that `baton fetch` made: what is in it."""

READERS = 8
_READ_BYTES = 4 << 20
T = TypeVar("T")
_FORM = b"baton weights, xxh3-128 of pieces of 32 MiB\n"


def model_digest(
    config: Path,
    weights: Sequence[Path],
    quantize: str = "none",
    read: Callable[[int], None] = lambda _: None,
    *,
    readers: int = READERS,
) -> str:
    """BLAKE2b-128 in hex over names and sizes of config.json and the weight files, and over the
    xxh3-128 of each of their pieces, in order.

    quantize: what is done to the weights. Other than "none", it is appended in words: KV of such a
    worker fits no other, and two that differ should be able to say in what.
    read: called on this thread with how many bytes were read since, for a progress bar.
    """
    with ExitStack() as ends:
        pool = ends.enter_context(ThreadPoolExecutor(readers, "weights"))
        pieces: list[Callable[[], tuple[bytes, int]]] = []
        sizes = []
        for path in (config, *sorted(weights)):
            file = ends.enter_context(path.open("rb", buffering=0))
            size = os.fstat(file.fileno()).st_size
            sizes.append((path.name, size))
            pieces += [
                partial(_piece, file.fileno(), start, min(PIECE_BYTES, size - start))
                for start in range(0, size, PIECE_BYTES)
            ]

        def digests() -> Iterator[bytes]:
            for found, count in in_order(pool, pieces, 2 * readers):
                read(count)
                yield found

        whole = _combined(sizes, digests())
    return whole + ("" if quantize == "none" else f"-{quantize}")


def _combined(sizes: Iterable[tuple[str, int]], pieces: Iterable[bytes]) -> str:
    """sizes: each file's name and size, config.json first and weights by name; pieces: digests of
    all pieces in the same order."""
    digest = blake2b(_FORM, digest_size=16)
    for name, size in sizes:
        digest.update(f"{name} {size}\n".encode())
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Contents:
    """What a file's bytes are compared by, computed as they come, in order."""

    def __init__(self) -> None:
        self.size = 0
        self._sha256 = hashlib.sha256()
        self._pieces: list[xxh3_128] = []

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        rest = memoryview(data)
        while rest:
            within = self.size % PIECE_BYTES
            if not within:
                self._pieces.append(xxh3_128())
            part = rest[: PIECE_BYTES - within]
            self._pieces[-1].update(part)
            self.size += len(part)
            rest = rest[len(part) :]

    @property
    def sha256(self) -> str:
        """In hex."""
        return self._sha256.hexdigest()

    @property
    def pieces(self) -> bytes:
        """The xxh3-128 of each piece, one behind the other."""
        return b"".join(piece.digest() for piece in self._pieces)


def contents_of(path: Path) -> Contents:
    """Raises OSError."""
    found = Contents()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            found.update(data)
    return found


def contents_digest(config: Contents, weights: Mapping[str, Contents]) -> str:
    """`model_digest` of files that were read already. weights: by name."""
    files = [("config.json", config), *sorted(weights.items())]
    return _combined(
        [(name, contents.size) for name, contents in files],
        [contents.pieces for _, contents in files],
    )


def adapter_digest(files: Mapping[str, bytes]) -> str:
    """BLAKE2b-128 in hex over the names, sizes and contents of an adapter's files. Unlike a model's
    weights they may be a stranger's, and nobody's may pass for another's."""
    digest = blake2b(digest_size=16)
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def fetched_digest(folder: Path) -> str:
    """The digest that the weights had when `baton fetch` checked them against their source; "" for
    any other folder."""
    try:
        return str(json.loads((folder / MANIFEST).read_text()).get("digest", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def in_order(
    pool: ThreadPoolExecutor, pieces: Sequence[Callable[[], T]], ahead: int
) -> Iterator[T]:
    """What calls return, in their order. No more than `ahead` are begun and not taken: a failure is
    raised before all else is read."""
    waiting = iter(pieces)
    running = [pool.submit(piece) for piece in islice(waiting, ahead)]
    try:
        while running:
            done = running.pop(0).result()
            running += [pool.submit(piece) for piece in islice(waiting, 1)]
            yield done
    finally:
        for future in running:
            future.cancel()


def _piece(file: int, start: int, count: int) -> tuple[bytes, int]:
    """The digest of a part of a file, and its size. Reading and hashing release the GIL."""
    digest = xxh3_128()
    memory = memoryview(bytearray(min(count, _READ_BYTES)))
    done = 0
    while done < count:
        part = memory[: min(len(memory), count - done)]
        got = os.preadv(file, [part], start + done)
        if not got:
            raise OSError("a file of weights became shorter while it was read")
        digest.update(part[:got])
        done += got
    return digest.digest(), count
