"""GPU memory at a fixed address, which can be given back and taken again.

CUDA graphs hold the addresses of what they read. Here the address stays when the memory behind it
goes to somebody else, so graphs recorded with it can be replayed once there is memory again: CUDA's
virtual memory management, through the driver itself, since torch has no call for it. Torch does not
count this memory as its own.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from functools import cache

import torch

from moored.errors import MooredError

OUT_OF_MEMORY = 2
PINNED, ON_DEVICE, READ_AND_WRITE, SMALLEST, VIRTUAL_MEMORY = 1, 1, 3, 0, 102
"""Of CUDA's enumerations: the type of memory, where it is, who may use it, which granularity is
asked for, whether a device knows all this."""
ZERO = ctypes.c_uint64(0)


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int))


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("for_windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("rights", ctypes.c_int))


class FixedMemory:
    """A tensor of zeros, with memory behind it except between `give_back` and `take`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._location = _Location(ON_DEVICE, _index(device))
        self._properties = _Properties(kind=PINNED, location=self._location)
        granularity, wanted = ctypes.c_size_t(), ctypes.byref(self._properties)
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), wanted, SMALLEST)
        asked = math.prod(shape) * dtype.itemsize
        self._size = ctypes.c_size_t(-(-asked // granularity.value) * granularity.value)
        self._address = ctypes.c_uint64()
        self.is_there = False
        _call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ZERO, ZERO, ZERO)
        self._when_forgotten = weakref.finalize(self, _drop, self._address, self._size, device)
        # A process that ends gives all of it back anyway, and may have lost its driver by then.
        self._when_forgotten.atexit = False
        try:
            self._map()
            flat = torch.as_tensor(_Bytes(self._address.value, asked), device=device)
        except BaseException:
            self.close()
            raise
        self.tensor = flat.view(dtype).view(*shape).zero_()

    @property
    def num_bytes(self) -> int:
        """That it has now."""
        return self._size.value if self.is_there else 0

    def take(self) -> None:
        """Have memory again, all zeros; torch gives up what it keeps where there is none else."""
        self._map()
        self.tensor.zero_()

    def give_back(self) -> None:
        """Let others use the memory, once nothing that is under way does."""
        if self.is_there:
            torch.cuda.synchronize(self._device)
            _call("cuMemUnmap", self._address, self._size)
            self.is_there = False

    def close(self) -> None:
        """Give the address back too; the tensor must be gone."""
        self._when_forgotten.detach()
        self.give_back()
        _call("cuMemAddressFree", self._address, self._size)

    def _map(self) -> None:
        handle = self._create()
        try:
            _call("cuMemMap", self._address, self._size, ZERO, handle, ZERO)
        finally:
            # It lives on while it is mapped.
            _call("cuMemRelease", handle)
        self.is_there = True
        rights = ctypes.byref(_Access(self._location, READ_AND_WRITE))
        try:
            _call("cuMemSetAccess", self._address, self._size, rights, ctypes.c_size_t(1))
        except BaseException:
            self.give_back()
            raise

    def _create(self) -> ctypes.c_uint64:
        handle, properties = ctypes.c_uint64(), ctypes.byref(self._properties)
        try:
            _call("cuMemCreate", ctypes.byref(handle), self._size, properties, ZERO)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _call("cuMemCreate", ctypes.byref(handle), self._size, properties, ZERO)
        return handle


def _drop(address: ctypes.c_uint64, size: ctypes.c_size_t, device: torch.device) -> None:
    """Free memory that nobody has closed; where none is mapped, the driver says no to the first."""
    torch.cuda.synchronize(device)
    for name in ("cuMemUnmap", "cuMemAddressFree"):
        getattr(_driver(), name)(address, size)


def has_fixed_memory(device: torch.device) -> bool:
    """Whether the device and its driver know such memory."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    known = ctypes.c_int()
    try:
        _call("cuDeviceGetAttribute", ctypes.byref(known), VIRTUAL_MEMORY, _index(device))
    except (OSError, AttributeError, MooredError):
        return False
    return bool(known.value)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class _Bytes:
    """Memory that torch makes a tensor of."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call the driver; it says no by a number."""
    code = getattr(_driver(), name)(*arguments)
    if code == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: no room on the GPU")
    if code:
        raise MooredError(f"the CUDA driver refused {name} with error {code}")
