"""Staging memory in the device's own memory, from and to which KV is copied by one kernel each."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch.utils import dlpack

from batonlm.core.errors import Internal
from batonlm.core.handover.leaf_hash import HASH_BYTES, Points, num_leaves
from batonlm.core.scheduler.plan import KvPayload, MemoryRegion
from batonlm.engine.cuda import CudaMemory
from batonlm.engine.device import Download

_INTERPRETER = threading.Lock()
"""Triton's interpreter changes its module while it runs a kernel: it runs one at a time."""


class LeafHasher:
    """Computes `core.handover.leaf_hash` on a device; on a CPU Triton's interpreter does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._turn: AbstractContextManager[Any] = nullcontext() if on_gpu else _INTERPRETER
        self._tables = lru_cache(maxsize=64)(self._upload_tables)

    @torch.inference_mode()
    def __call__(self, part: torch.Tensor, points: Points) -> bytes:
        """The hashes of a payload's leaves. part: uint8, of whole words."""
        # Machines without a GPU need not have Triton.
        from batonlm.engine.attention.triton import leaf_hash

        found = torch.empty(
            num_leaves(part.nbytes), HASH_BYTES, dtype=torch.uint8, device=self._device
        )
        # What the part holds was written before: by a copy that was waited for, or by a READ that
        # is done. So nothing of other streams is waited for.
        with self._turn, torch.cuda.stream(self._stream):
            leaf_hash.leaf_hashes(part, self._tables(points), found)
            (hashes,) = Download([found]).wait()
        return hashes.numpy().tobytes()

    def _upload_tables(self, points: Points) -> Any:
        from batonlm.engine.attention.triton import leaf_hash

        return leaf_hash.tables(points, self._device)


class DeviceStaging:
    """See `batonlm.core.scheduler.plan.StagingMemory`. Parts are uint8 tensors.

    On a CPU it is ordinary memory that is treated as a GPU's, for tests.
    """

    in_host = False

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """All zeros. Raises Unavailable when the device has no room for it."""
        on_gpu = device.type == "cuda"
        self.kind = "VRAM" if on_gpu else "DRAM"
        self._block = CudaMemory(device.index or 0, num_bytes) if on_gpu else None
        if self._block is not None:
            self._memory = tensor_at(self._block.address, num_bytes, device)
        else:
            self._memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        number = (device.index or 0) if on_gpu else 0
        self.regions = (MemoryRegion(self._memory.data_ptr(), num_bytes, number),)
        self._hashes = LeafHasher(device)

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._memory.narrow(0, start, num_bytes)

    def read(self, part: KvPayload) -> bytes:
        return _tensor(part).cpu().numpy().tobytes()

    def write(self, part: KvPayload, data: bytes) -> None:
        _tensor(part).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def leaf_hashes(self, part: KvPayload, points: Points) -> bytes:
        return self._hashes(_tensor(part), points)

    def close(self) -> None:
        if self._block is not None:
            self._block.close()


def _tensor(part: KvPayload) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        raise Internal("this payload is not in the device's memory")
    return part


# The structures of DLPack, by which libraries pass tensors to each other.


class _DlDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DlType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DlDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DlType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DlManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DlTensor), ("context", ctypes.c_void_p), ("delete", ctypes.c_void_p))


_DL_CPU, _DL_CUDA, _DL_UNSIGNED = 1, 2, 1
_described: list[object] = []
"""What torch reads until a tensor is gone: a few hundred bytes for each, never freed, because a
process makes few of them."""


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] over memory that `device` reaches and somebody else owns.

    torch is told the device, by DLPack: the driver would name the one that has the memory, which
    is another rank's GPU and may be none that this process sees.
    """
    shape = (ctypes.c_int64 * 1)(num_bytes)
    kind = _DL_CUDA if device.type == "cuda" else _DL_CPU
    tensor = _DlTensor(
        address, _DlDevice(kind, device.index or 0), 1, _DlType(_DL_UNSIGNED, 8, 1),
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)), None, 0,
    )  # fmt: skip
    managed = _DlManagedTensor(tensor, None, None)
    _described.append((shape, managed))
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    wrap.restype = ctypes.py_object
    made: torch.Tensor = dlpack.from_dlpack(wrap(ctypes.addressof(managed), b"dltensor", None))
    return made
