"""The files of a tokenizer as one zip archive."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidArgument, Unavailable
from baton.rpc.digest import FILES, tokenizer_digest
from baton.rpc.model_folder import read_json

MORE_FILES = ("config.json", "generation_config.json", "added_tokens.json", "chat_template.json")
"""That a gateway looks for beside those that Baton's own tokenizers read."""

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Archive:
    """sha256: of the data, in hex. digest: of the tokenizer, as its workers tell it."""

    data: bytes
    sha256: str
    digest: str

    def chunks(self) -> Iterator[tuple[bytes, bool]]:
        """Each with whether it is the last one."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            yield self.data[start:end], end >= len(self.data)


class TokenizerFiles:
    """Of one folder, read at the first wish. model: what its config.json says."""

    def __init__(self, folder: Path, model: dict[str, Any]) -> None:
        self.model = model
        self._folder = folder
        self._archive: Archive | None = None
        self._reading = asyncio.Lock()

    @classmethod
    def of(cls, folder: str) -> TokenizerFiles:
        """Raises InvalidArgument naming `vllm_tokenizer`. Blocks for a moment."""
        path = Path(folder).expanduser()
        if not (path / FILES[0]).is_file():
            raise InvalidArgument(f"there is no {FILES[0]} in {path}", field="vllm_tokenizer")
        try:
            return cls(path, read_json(path / "config.json"))
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field="vllm_tokenizer") from None

    async def archive(self, digest: str) -> Archive:
        """digest: of the tokenizer that is served. Raises Unavailable when the folder has another:
        its ids would mean something else."""
        async with self._reading:
            if self._archive is None or self._archive.digest != digest:
                self._archive = await asyncio.to_thread(_pack, self._folder)
            if self._archive.digest != digest:
                raise Unavailable("This router's copy of the tokenizer is not the one in use.")
            return self._archive


def _pack(folder: Path) -> Archive:
    """The same bytes whenever the files are the same."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*FILES, *MORE_FILES):
            path = folder / name
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest(), tokenizer_digest(folder))
