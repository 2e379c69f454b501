"""Where a model's files come from, a folder or the hub: names, sizes, and how each is copied.

Whoever asks says where the files go. Copies that were cut short are gone on with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from baton.core.errors import InvalidArgument, Unavailable

WEIGHTS = "*.safetensors"
OTHERS = ("*.json", "*.jinja")
PATH_DIGITS = 12
"""Of the SHA-256 of a folder's path, in hex. The Helm chart makes the same names."""
_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class File:
    """A file of a model, as its source describes it."""

    name: str
    size: int
    sha256: str = ""
    """In hex; "" where the source does not say."""
    git_id: str = ""
    """In hex, as git names a file's contents; "" where the source does not say."""
    mtime_ns: int = 0
    """When the source's file was changed; 0 where the source does not say."""


class Source(Protocol):
    """name: of the folder that its files belong into. No other source has it."""

    name: str

    def files(self, *, weights: bool) -> list[File]:
        """What a server of the model reads. Raises BatonError."""

    def copy(self, file: File, into: Path) -> str:
        """Returns the file's SHA-256 in hex, and the whole file is there, or raises BatonError."""

    def differs(self, known: Mapping[str, File], *, weights: bool) -> bool:
        """Whether a file is another one than the one that is known, or none is known of its name;
        as far as this machine can tell."""


def may_be_hub_id(model: str) -> bool:
    """Of a model that is no folder: whether the hub may be asked for it."""
    is_path = Path(model).expanduser().exists() or model.startswith((".", "/", "~"))
    return not is_path and model.count("/") == 1


def source_of(model: str, revision: str = "") -> Source:
    """A folder that exists, else what may be a hub id. Raises InvalidArgument."""
    path = Path(model).expanduser()
    if path.is_dir():
        if revision:
            raise InvalidArgument("a folder has no revisions", field="revision")
        return FolderSource(Path(os.path.abspath(path)))
    if not may_be_hub_id(model):
        raise InvalidArgument(f"{model!r} is neither a folder nor a hub id", field="model")
    return HubSource(model, revision)


class FolderSource:
    """A folder that is slow, or that pods on other nodes share.

    Its name ends with a digest of its path, because many models lie in folders of one name.
    """

    def __init__(self, folder: Path) -> None:
        """folder: an absolute path."""
        path = hashlib.sha256(str(folder).encode()).hexdigest()
        self.name = f"{folder.name}-{path[:PATH_DIGITS]}"
        self._folder = folder

    def files(self, *, weights: bool) -> list[File]:
        found = []
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and _wanted(path.name, weights):
                status = path.stat()
                found.append(File(path.name, status.st_size, mtime_ns=status.st_mtime_ns))
        return found

    def differs(self, known: Mapping[str, File], *, weights: bool) -> bool:
        """Files that are gone are no difference: what was copied is still that model."""
        return any(self._differs(file, known) for file in self.files(weights=weights))

    def _differs(self, file: File, known: Mapping[str, File]) -> bool:
        before = known.get(file.name)
        if before is None or before.size != file.size:
            return True
        if before.mtime_ns == file.mtime_ns:
            return False
        return sha256_of(self._folder / file.name) != before.sha256

    def copy(self, file: File, into: Path) -> str:
        target, origin = into / file.name, self._folder / file.name
        try:
            with origin.open("rb") as source, target.open("ab") as copied:
                source.seek(copied.tell())
                while piece := source.read(_COPY_BYTES):
                    copied.write(piece)
                copied.flush()
                os.fsync(copied.fileno())
        except OSError as error:
            raise Unavailable(f"{file.name} cannot be copied: {error.strerror}") from error
        digest = sha256_of(target)
        if digest != sha256_of(origin):
            target.unlink()
            raise Unavailable(f"{file.name} is another file now; what was copied is thrown away")
        return digest


class HubSource:
    """A model of the hub, at the commit that a revision stands for when `files` is called. Takes
    HF_TOKEN and HF_ENDPOINT from the environment, as the hub's library does.
    """

    def __init__(self, model: str, revision: str) -> None:
        # The hub's ids have no "--". Of revisions, "a/b" and "a-b" may both be there.
        escaped = revision.replace("%", "%25").replace("/", "%2F")
        self.name = model.replace("/", "--") + (f"@{escaped}" if revision else "")
        self._model = model
        self._revision = revision or None
        self._commit = ""

    def files(self, *, weights: bool) -> list[File]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            info = HfApi().model_info(self._model, revision=self._revision, files_metadata=True)
        except HFValidationError as error:
            raise InvalidArgument(f"{self._model!r} is no hub id", field="model") from error
        except HfHubHTTPError as error:
            raise _refused(self._model, error.response.status_code) from error
        except Exception as error:  # the library's releases differ in what they raise
            raise Unavailable("the hub cannot be reached") from error
        self._commit = info.sha or ""
        found = []
        for entry in info.siblings or ():
            if "/" not in entry.rfilename and _wanted(entry.rfilename, weights):
                file = File(entry.rfilename, entry.size or 0)
                if entry.lfs:
                    file = replace(file, sha256=str(entry.lfs.sha256))
                else:
                    file = replace(file, git_id=entry.blob_id or "")
                found.append(file)
        return found

    def differs(self, known: Mapping[str, File], *, weights: bool) -> bool:
        """Only the hub could tell, and it is not asked for what is there."""
        return False

    def copy(self, file: File, into: Path) -> str:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            hf_hub_download(self._model, file.name, revision=self._commit, local_dir=into)
        except HfHubHTTPError as error:
            raise _refused(self._model, error.response.status_code) from error
        except Exception as error:  # as above
            raise Unavailable(f"{file.name} could not be had from the hub; try again") from error
        path = into / file.name
        digest = sha256_of(path)
        if (
            path.stat().st_size != file.size
            or (file.sha256 and file.sha256 != digest)
            or (file.git_id and file.git_id != _git_id(path))
        ):
            path.unlink()
            raise Unavailable(f"{file.name} came damaged and is thrown away; try again")
        return digest


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_id(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _wanted(name: str, weights: bool) -> bool:
    patterns = (*OTHERS, WEIGHTS) if weights else OTHERS
    return not name.startswith(".") and any(fnmatch(name, pattern) for pattern in patterns)


def _refused(model: str, status: int) -> InvalidArgument | Unavailable:
    if status in (401, 403):
        return InvalidArgument(f"{model} needs a token that may read it: HF_TOKEN", field="model")
    if status == 404:
        return InvalidArgument(f"the hub has no {model} of that revision", field="model")
    return Unavailable(f"the hub answered {status}; try again")
