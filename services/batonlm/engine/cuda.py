"""Memory of a GPU that several processes and network cards may use, by CUDA's driver without torch.

torch's own allocator may hand out memory that no other process can open and no network card can
read; and a worker whose ranks compute has no torch at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from batonlm.core.errors import Unavailable

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64

_ENABLE_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the memory may be another GPU's."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class _Device:
    """A device's primary context, which is torch's too, held until `close`."""

    def __init__(self, number: int):
        """number: among the devices that this process sees. Raises Unavailable."""
        try:
            self._driver = ctypes.CDLL(LIBRARY)
        except OSError:
            raise Unavailable("there is no NVIDIA driver here") from None
        self._number = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(self._number), ctypes.c_int(number))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)

    def call(self, name: str, *arguments: object) -> None:
        """Raises Unavailable when the driver refuses."""
        if code := getattr(self._driver, name)(*arguments):
            raise Unavailable(f"CUDA's driver refused {name}: error {code}")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the calling thread's context meanwhile."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def close(self) -> None:
        """Idempotent."""
        if self._context:
            with suppress(Unavailable):
                self.call("cuDevicePrimaryCtxRelease_v2", self._number)
        self._context = ctypes.c_void_p()


class CudaMemory:
    """num_bytes of a device, all zeros, allocated plainly (cuMemAlloc). Used from any thread."""

    def __init__(self, device: int, num_bytes: int):
        """device: its number in this process. Raises Unavailable when it has no room for it."""
        self.device, self.num_bytes = device, num_bytes
        self.address = 0
        """0 once it is freed."""
        self._device = _Device(device)
        address = ctypes.c_uint64()
        try:
            with self._device.current():
                size = ctypes.c_size_t(num_bytes)
                self._device.call("cuMemAlloc_v2", ctypes.byref(address), size)
                self.address = address.value
                self._device.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
                self._device.call("cuCtxSynchronize")
        except Unavailable as error:
            self.close()
            raise Unavailable(
                f"a GPU has no {num_bytes} bytes for staging buffers: {error.message}"
            ) from None

    def handle(self) -> bytes:
        """What another process opens it by. Raises Unavailable."""
        handle = _Handle()
        with self._device.current():
            self._device.call(
                "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address)
            )
        return bytes(handle.data)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Raises Unavailable."""
        found = ctypes.create_string_buffer(num_bytes)
        source = ctypes.c_uint64(self.address + offset)
        with self._device.current():
            self._device.call("cuMemcpyDtoH_v2", found, source, ctypes.c_size_t(num_bytes))
        return found.raw

    def write(self, offset: int, data: bytes) -> None:
        """Raises Unavailable."""
        target = ctypes.c_uint64(self.address + offset)
        with self._device.current():
            self._device.call("cuMemcpyHtoD_v2", target, data, ctypes.c_size_t(len(data)))

    def close(self) -> None:
        """Frees it. Only when no other process has it open. Idempotent."""
        address, self.address = self.address, 0
        if address:
            with suppress(Unavailable), self._device.current():
                self._device.call("cuMemFree_v2", ctypes.c_uint64(address))
        self._device.close()


class OpenedMemory:
    """CudaMemory of another process, mapped for the device that this process computes on. Where it
    is another device's, both must reach each other (NVLink, or PCIe without a root between)."""

    def __init__(self, device: int, handle: bytes):
        """Raises Unavailable, also where devices do not reach each other."""
        self._device = _Device(device)
        address = ctypes.c_uint64()
        try:
            with self._device.current():
                self._device.call(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(address),
                    _Handle.from_buffer_copy(handle),
                    ctypes.c_uint(_ENABLE_PEER_ACCESS),
                )
        except BaseException:
            self._device.close()
            raise
        self.address = address.value

    def close(self) -> None:
        """Idempotent."""
        address, self.address = self.address, 0
        if address:
            with suppress(Unavailable), self._device.current():
                self._device.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._device.close()
