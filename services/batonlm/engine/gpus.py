"""Finds this machine's GPUs without torch, and shares them out among Baton's workers.

A worker's process computes on one GPU (each rank of a worker on one of its own), and makes it the
only one that its process sees, by CUDA_VISIBLE_DEVICES with the GPU's UUID. So torch, Triton, NCCL
and UCX all use the right one on every thread, and nothing has to say "cuda:3". This must happen
before any of them starts CUDA, which is why GPUs are listed by NVML, the driver's library for
management: it takes no context and no memory of a GPU.

In Kubernetes the device plugin gives a pod its GPUs and NVML lists no others. Outside of it,
several workers of a machine would all take the first one; `claim` has each take the GPU that the
fewest hold.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from batonlm.core.errors import InvalidArgument, Unavailable

NVML = "libnvidia-ml.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_TEXT_BYTES = 96
"""NVML's longest text: a UUID, a name, the driver's version."""
_MOST_ON_ONE = 64
"""Workers that `claim` lets share a GPU."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A whole GPU, or a MIG slice of one."""

    index: int
    """Of the GPU in PCI order, as nvidia-smi counts; a slice has that of its GPU."""
    uuid: str
    """GPU-… or MIG-…, as CUDA_VISIBLE_DEVICES takes it."""
    name: str
    total_bytes: int
    free_bytes: int
    """When it was listed."""

    @property
    def is_whole(self) -> bool:
        return not self.uuid.startswith("MIG-")


@dataclass(frozen=True, slots=True)
class Driver:
    """What NVML says about this machine."""

    version: str
    gpus: tuple[Gpu, ...]
    """In PCI order. A GPU in MIG mode is listed as its slices, because CUDA can't use it whole."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Nvml:
    """The functions of NVML that are used here. Raises OSError where a call fails."""

    def __init__(self, library: str):
        """Raises OSError where the library is not there or the driver does not answer."""
        self._library = ctypes.CDLL(library)
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} failed with code {code}")

    def text(self, name: str, *first: object) -> str:
        out = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, *first, out, ctypes.c_uint(_TEXT_BYTES))
        return out.value.decode(errors="replace")

    def number(self, name: str, *first: object) -> int:
        out = ctypes.c_uint()
        self.call(name, *first, ctypes.byref(out))
        return out.value

    def handle(self, name: str, *first: object) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        self.call(name, *first, ctypes.byref(out))
        return out

    def slices(self, whole: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """The MIG slices of a GPU; none where it is not in MIG mode or too old for it."""
        found: list[ctypes.c_void_p] = []
        with suppress(OSError):
            for place in range(self.number("nvmlDeviceGetMaxMigDeviceCount", whole)):
                # A GPU has places for more slices than were made of it.
                with suppress(OSError):
                    name = "nvmlDeviceGetMigDeviceHandleByIndex"
                    found.append(self.handle(name, whole, ctypes.c_uint(place)))
        return found

    def gpu(self, index: int, handle: ctypes.c_void_p) -> Gpu:
        memory = _Memory()
        self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return Gpu(
            index,
            self.text("nvmlDeviceGetUUID", handle),
            self.text("nvmlDeviceGetName", handle),
            memory.total,
            memory.free,
        )


def find_driver(library: str = NVML) -> Driver | None:
    """The driver and its GPUs; None where there is no NVIDIA driver, or it does not answer."""
    try:
        nvml = _Nvml(library)
    except OSError:
        return None
    try:
        found = []
        for index in range(nvml.number("nvmlDeviceGetCount_v2")):
            whole = nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
            found += [nvml.gpu(index, part) for part in nvml.slices(whole) or [whole]]
        return Driver(nvml.text("nvmlSystemGetDriverVersion"), tuple(found))
    except OSError:
        return None
    finally:
        with suppress(OSError):
            nvml.call("nvmlShutdown")


def visible(gpus: Sequence[Gpu], limit: str | None) -> list[Gpu]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES allows, in its order; None allows all.

    An entry is a number in PCI order (of a GPU in MIG mode: all of its slices) or the beginning of
    a UUID. As in CUDA, entries from the first one on that names none count for nothing.
    """
    if limit is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in (part.strip() for part in limit.split(",")):
        meant = [gpu for gpu in gpus if _is_meant(gpu, entry)]
        if not meant:
            break
        found += [gpu for gpu in meant if gpu not in found]
    return found


def _is_meant(gpu: Gpu, entry: str) -> bool:
    if entry.isdecimal():
        return gpu.index == int(entry)
    return entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)


def select(device: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those of the visible GPUs that an option `device` allows: auto and cuda all of them, cuda:N
    the N-th, GPU-… and MIG-… by the beginning of the UUID.

    Raises InvalidArgument, naming device, for another text and for a GPU that is not there.
    """
    kind, _, number = device.partition(":")
    if device in ("auto", "cuda"):
        found = list(gpus)
    elif kind == "cuda" and number.isdecimal():
        found = list(gpus[int(number) : int(number) + 1])
    elif device.startswith(("GPU-", "MIG-")):
        found = [gpu for gpu in gpus if gpu.uuid.startswith(device)]
    else:
        raise InvalidArgument(
            f"{device!r} is none of auto, cpu, cuda, cuda:N, GPU-UUID, MIG-UUID", field="device"
        )
    if not found and device != "auto":
        there = ", ".join(f"{i}: {gpu.name} {gpu.uuid}" for i, gpu in enumerate(gpus))
        raise InvalidArgument(
            f"{device} is not among the GPUs of this machine that {VISIBLE} allows: "
            f"{there or 'there is none, or no NVIDIA driver'}",
            field="device",
        )
    return found


def torch_has_cuda() -> bool:
    """Whether the torch that would be imported is a build for CUDA. Imports nothing."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()


class Claim:
    """GPUs that this process holds until `close`, or until it ends however that happens."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.sharing = False
        """Whether another worker holds one of them, too."""
        self._locks: list[int] = []

    def take(self, gpu: Gpu, file: Path) -> bool:
        """Holds a file's lock, and with it the GPU; False where another process does."""
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._locks.append(lock)
        self.gpus.append(gpu)
        return True

    def close(self) -> None:
        """Idempotent."""
        while self._locks:
            os.close(self._locks.pop())


def claim(gpus: Sequence[Gpu], count: int, folder: Path | None = None) -> Claim:
    """Takes `count` of the GPUs: those that the fewest of this user's workers hold, among these the
    ones with most free memory (which other programs may use), then the first ones.

    Each GPU has a row of lock files, one for each worker that it may be shared by; a worker takes
    the first free one of the shortest row. Locks, and not a count: the kernel releases a lock when
    its process ends, and two workers that start together cannot take the same one.
    folder: of the lock files; None is one for this user in the system's temporary folder.
    Raises InvalidArgument, naming device, where there are fewer GPUs, and Unavailable where locks
    cannot be had.
    """
    if count > len(gpus):
        raise InvalidArgument(
            f"{count} whole GPUs are needed, one for each rank, and {len(gpus)} can be used here",
            field="device",
        )
    folder = folder or _own_folder()
    wanted = sorted(gpus, key=lambda gpu: -(gpu.free_bytes // _GIB))
    found = Claim()
    try:
        for place in range(_MOST_ON_ONE):
            for gpu in wanted:
                if gpu not in found.gpus and found.take(gpu, folder / f"{gpu.uuid}.{place}"):
                    found.sharing |= place > 0
                    if len(found.gpus) == count:
                        return found
        raise Unavailable(f"{_MOST_ON_ONE} workers hold each of this machine's GPUs")
    except BaseException as error:
        found.close()
        if isinstance(error, OSError):
            raise Unavailable(f"the locks of GPUs in {folder} cannot be used") from error
        raise


def _own_folder() -> Path:
    """Raises Unavailable for a folder that another user has made in its place."""
    folder = Path(tempfile.gettempdir()) / f"baton-gpus-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        raise Unavailable(f"{folder} belongs to somebody else")
    return folder
