"""Staging memory in the device's own memory, from and to which KV is copied by one kernel each."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from batonlm.core.errors import Internal, Unavailable
from batonlm.core.handover.leaf_hash import HASH_BYTES, Points, num_leaves
from batonlm.core.scheduler.plan import KvPayload
from batonlm.engine.device import Download

_INTERPRETER = threading.Lock()
"""Triton's interpreter changes its module while it runs a kernel: it runs one at a time."""


class DeviceStaging:
    """See `batonlm.core.scheduler.plan.StagingMemory`. Parts are uint8 tensors.

    On a GPU the memory is cuMemAlloc's, and not torch's: its allocator may hand out memory that no
    other process can open and no network card can read. On a CPU it is ordinary memory that is
    treated as a GPU's, for tests; Triton's interpreter runs the kernel then.
    """

    in_host = False

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """All zeros. Raises Unavailable when the device has no room for it."""
        self._device = device
        on_gpu = device.type == "cuda"
        self.kind = "VRAM" if on_gpu else "DRAM"
        self.device_id = (device.index or 0) if on_gpu else 0
        self._block = _CudaBlock(device, num_bytes) if on_gpu else None
        if self._block is not None:
            self._memory = torch.as_tensor(self._block, device=device)
            self._memory.zero_()
        else:
            self._memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self.address = self._memory.data_ptr()
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._turn: AbstractContextManager[Any] = nullcontext() if on_gpu else _INTERPRETER
        self._tables = lru_cache(maxsize=64)(self._upload_tables)

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._memory.narrow(0, start, num_bytes)

    def read(self, part: KvPayload) -> bytes:
        return _tensor(part).cpu().numpy().tobytes()

    def write(self, part: KvPayload, data: bytes) -> None:
        _tensor(part).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @torch.inference_mode()
    def leaf_hashes(self, part: KvPayload, points: Points) -> bytes:
        # Machines without a GPU need not have Triton.
        from batonlm.engine.attention.triton import leaf_hash

        found = torch.empty(
            num_leaves(part.nbytes), HASH_BYTES, dtype=torch.uint8, device=self._device
        )
        # What the part holds was written before: by a copy that was waited for, or by a READ that
        # is done. So nothing of other streams is waited for.
        with self._turn, torch.cuda.stream(self._stream):
            leaf_hash.leaf_hashes(_tensor(part), self._tables(points), found)
            (hashes,) = Download([found]).wait()
        return hashes.numpy().tobytes()

    def close(self) -> None:
        if self._block is not None:
            self._block.free()

    def _upload_tables(self, points: Points) -> Any:
        from batonlm.engine.attention.triton import leaf_hash

        return leaf_hash.tables(points, self._device)


def _tensor(part: KvPayload) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        raise Internal("this payload is not in the device's memory")
    return part


class _CudaBlock:
    """Memory of the CUDA driver's plain allocator, in the form in which torch takes memory of
    others (`__cuda_array_interface__`)."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        # The driver allocates in the context of torch, which this makes the thread's current one.
        torch.cuda.synchronize(device)
        address = ctypes.c_uint64()
        if code := self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)):
            raise Unavailable(
                f"a GPU has no {num_bytes} bytes for staging buffers: CUDA's error {code}"
            )
        self._address = address.value
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3,
        }  # fmt: skip

    def free(self) -> None:
        """Idempotent."""
        if self._address:
            self._driver.cuMemFree_v2(ctypes.c_uint64(self._address))
            self._address = 0
