"""Where models come from: a folder, the hub, or an object store. What is copied is verified."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.registry.digest import Contents, contents_of

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

WEIGHTS = "*.safetensors"
OTHERS = ("*.json", "*.jinja")
MODULES = "[0-9]*_*"
"""Folders of a model's parts, as `sentence-transformers` calls them: 1_Pooling, 2_Dense."""
PATH_DIGITS = 12
"""Digits of the SHA-256 of a folder's path, in hex. The Helm chart makes the same names."""
_COPY_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a model, as described by its source."""

    name: str
    size: int
    sha256: str = ""
    """In hex; "" if the source has none."""
    git_id: str = ""
    """Git's blob id in hex; "" if the source has none."""
    mtime_ns: int = 0
    """When the source's file was modified; 0 if the source has no such time."""


class ModelSource(Protocol):
    """A place that models are copied from."""

    name: str
    """Name of the folder for its files, unique among sources."""

    def files(self, *, weights: bool) -> list[File]:
        """Returns the files that a server of the model reads. Raises BatonError."""

    def copy(self, file: File, into: Path) -> Contents:
        """Copies a whole file, which is what its source says. Raises BatonError."""

    def differs(self, known: Mapping[str, File], *, weights: bool) -> bool:
        """Returns whether a file differs from the known one of its name, or is not known, as far as
        this machine can tell."""


def in_object_store(model: str) -> bool:
    return model.startswith("s3://")


def may_be_hub_id(model: str) -> bool:
    """Returns whether a model that is no folder may be a hub id."""
    is_path = Path(model).expanduser().exists() or model.startswith((".", "/", "~"))
    return not is_path and model.count("/") == 1


def source_of(model: str, revision: str = "") -> ModelSource:
    """Returns the source: an object store's prefix, an existing folder, or a possible hub id.
    Raises InvalidArgument."""
    if in_object_store(model):
        from batonlm.registry.object_store import object_source

        return object_source(f"{model.rstrip('/')}@{revision}" if revision else model)
    path = Path(model).expanduser()
    if path.is_dir():
        if revision:
            raise InvalidArgument("a folder has no revisions", field="revision")
        return FolderSource(Path(os.path.abspath(path)))
    if not may_be_hub_id(model):
        raise InvalidArgument(f"{model!r} is neither a folder nor a hub id", field="model")
    return HubSource(model, revision)


class FolderSource:
    """A folder, for example a slow one or one that pods on other nodes share.

    The source's name ends with a digest of the path, because folders of different models may have
    the same name.
    """

    def __init__(self, folder: Path) -> None:
        """folder: an absolute path."""
        path = hashlib.sha256(str(folder).encode()).hexdigest()
        self.name = f"{folder.name}-{path[:PATH_DIGITS]}"
        self._folder = folder

    def files(self, *, weights: bool) -> list[File]:
        found = []
        for path in sorted((*self._folder.glob("*"), *self._folder.glob(f"{MODULES}/*"))):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and is_wanted(name, weights):
                status = path.stat()
                found.append(File(name, status.st_size, mtime_ns=status.st_mtime_ns))
        return found

    def differs(self, known: Mapping[str, File], *, weights: bool) -> bool:
        """A file missing in the source is no difference: the copy is still that model."""
        return any(self._differs(file, known) for file in self.files(weights=weights))

    def _differs(self, file: File, known: Mapping[str, File]) -> bool:
        before = known.get(file.name)
        if before is None or before.size != file.size:
            return True
        if before.mtime_ns == file.mtime_ns:
            return False
        return sha256_of(self._folder / file.name) != before.sha256

    def copy(self, file: File, into: Path) -> Contents:
        target, origin = into / file.name, self._folder / file.name
        try:
            target.parent.mkdir(exist_ok=True)
            with origin.open("rb") as source, target.open("ab") as copied:
                source.seek(copied.tell())
                while piece := source.read(_COPY_BYTES):
                    copied.write(piece)
                copied.flush()
                os.fsync(copied.fileno())
        except OSError as error:
            raise Unavailable(f"{file.name} cannot be copied: {error.strerror}") from error
        contents = contents_of(target)
        if contents.sha256 != sha256_of(origin):
            target.unlink()
            raise Unavailable(f"{file.name} is another file now; what was copied is thrown away")
        return contents


class HubSource:
    """A model of the hub, at the commit to which the revision refers when `files` is called. Uses
    HF_TOKEN and HF_ENDPOINT from the environment, as the hub's library does.
    """

    def __init__(self, model: str, revision: str) -> None:
        # Hub ids contain no "--". Both revisions "a/b" and "a-b" may exist, so "/" is escaped.
        escaped = revision.replace("%", "%25").replace("/", "%2F")
        self.name = model.replace("/", "--") + (f"@{escaped}" if revision else "")
        self._model = model
        self._revision = revision or None
        self._commit = ""

    def files(self, *, weights: bool) -> list[File]:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            info = HfApi().model_info(
                self._model,
                revision=self._revision,
                files_metadata=True,
                # Without one it waits for ever.
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
        except HFValidationError as error:
            raise InvalidArgument(f"{self._model!r} is no hub id", field="model") from error
        except HfHubHTTPError as error:
            raise _refused(self._model, error) from error
        except Exception as error:  # the exceptions differ between releases of the library
            raise Unavailable("the hub cannot be reached") from error
        self._commit = info.sha or ""
        found = []
        for entry in info.siblings or ():
            if is_wanted(entry.rfilename, weights):
                file = File(entry.rfilename, entry.size or 0)
                if entry.lfs:
                    file = replace(file, sha256=str(entry.lfs.sha256))
                else:
                    file = replace(file, git_id=entry.blob_id or "")
                found.append(file)
        return found

    def differs(self, known: Mapping[str, File], *, weights: bool) -> bool:
        """Always False: only the hub could tell, and it is not asked about existing files."""
        return False

    def copy(self, file: File, into: Path) -> Contents:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            hf_hub_download(self._model, file.name, revision=self._commit, local_dir=into)
        except HfHubHTTPError as error:
            raise _refused(self._model, error) from error
        except Exception as error:  # as above
            if _is_full(error):
                raise Unavailable(f"the disk is full: {file.name} is not whole") from error
            raise Unavailable(f"{file.name} could not be had from the hub; try again") from error
        path = into / file.name
        contents = contents_of(path)
        if (
            contents.size != file.size
            or (file.sha256 and file.sha256 != contents.sha256)
            or (file.git_id and file.git_id != _git_id(path))
        ):
            path.unlink()
            raise Unavailable(f"{file.name} came damaged and is thrown away; try again")
        return contents


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_id(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def is_wanted(name: str, weights: bool) -> bool:
    """Whether a server of a model reads a file of this name."""
    patterns = (*OTHERS, WEIGHTS) if weights else OTHERS
    *folders, base = name.split("/")
    if folders and not (len(folders) == 1 and fnmatch(folders[0], MODULES)):
        return False
    return not base.startswith(".") and any(fnmatch(base, pattern) for pattern in patterns)


def hub_folder(model: str, files: Sequence[str] = (*OTHERS, WEIGHTS)) -> Path:
    """Returns the folder of a hub model in the hub library's own cache, after a download if its
    files of these patterns are not complete there; with a hub that does not answer, what is there.
    Raises InvalidArgument or Unavailable with the reason."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    answers = True
    try:
        # The library's own listing has no deadline.
        HfApi().model_info(model, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):
        pass  # It is met again below, where what is in the cache stands for some.
    except Exception:  # the exceptions differ between releases of the library
        answers = False
    try:
        return Path(
            snapshot_download(model, allow_patterns=list(files), local_files_only=not answers)
        )
    except HFValidationError:
        raise InvalidArgument(f"{model!r} is no hub id", field="model") from None
    except HfHubHTTPError as error:
        raise _refused(model, error) from None
    except LocalEntryNotFoundError:
        raise Unavailable(
            f"{model!r} is no folder, and the hub cannot be reached", field="model"
        ) from None
    except OSError as error:
        if _is_full(error):
            text = (
                f"the disk is full: {model} is not complete in the hub's cache (HF_HOME moves it)"
            )
        else:
            text = f"{model} cannot be fetched from the hub: {error.strerror or 'it failed'}"
        raise Unavailable(text, field="model") from None


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk is the reason, or the reason's reason."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        error = error.__cause__ or error.__context__
    return error is not None


def _refused(model: str, error: HfHubHTTPError) -> InvalidArgument | Unavailable:
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status, token = error.response.status_code, get_token()
    if isinstance(error, GatedRepoError) and token:
        text = f"{model} is gated: the account of your token has to accept its terms on the hub"
    elif isinstance(error, GatedRepoError):
        text = f"{model} is gated: accept its terms on the hub, and give a token in HF_TOKEN"
    elif status == 401 and token:
        text = f"the hub does not know your token (HF_TOKEN, or 'hf auth login'), so not {model}"
    elif isinstance(error, RepositoryNotFoundError) and token:
        text = f"the hub has no {model}, or it is private and your token may not read it"
    elif isinstance(error, RepositoryNotFoundError):
        text = f"the hub has no {model}, or it is private and needs a token in HF_TOKEN"
    elif status in (401, 403):
        text = f"{model} needs a token that may read it: HF_TOKEN"
    elif status == 404:
        text = f"the hub has no {model} of that revision"
    else:
        return Unavailable(f"the hub answered {status}; try again")
    return InvalidArgument(text, field="model")
