"""Free memory of the GPUs that this process may use, from NVIDIA's management library.

CUDA could tell as well, but its context would itself take half a gigabyte of each GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

_LIBRARY: Final = "libnvidia-ml.so.1"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes(
    environment: Mapping[str, str] = os.environ, *, load: Callable[[str], Any] = ctypes.CDLL
) -> dict[str, int]:
    """Return the free bytes of each visible GPU, by its number or UUID; nothing where the driver does not tell.

    On a machine with GPUs of several kinds, CUDA's numbers may be of other GPUs unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    try:
        library = load(_LIBRARY)
    except OSError:  # no driver
        return {}
    if library.nvmlInit_v2():
        return {}
    try:
        found = {name: _free(library, name) for name in _visible(library, environment)}
    finally:
        library.nvmlShutdown()
    return {name: free for name, free in found.items() if free is not None}


def _visible(library: Any, environment: Mapping[str, str]) -> list[str]:
    if _VISIBLE in environment:
        return [name for name in map(str.strip, environment[_VISIBLE].split(",")) if name]
    count = ctypes.c_uint()
    return [] if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) else list(map(str, range(count.value)))


def _free(library: Any, name: str) -> int | None:
    device, memory = ctypes.c_void_p(), _Memory()
    if name.isdecimal():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    if failed or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return int(memory.free)
