"""Free memory of the GPUs that this process may use, from NVIDIA's management library. The only file that imports it.

CUDA could tell as well, but its context would itself take half a gigabyte of each GPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

_LIBRARY: Final = "pynvml"
"""Package nvidia-ml-py, which SGLang needs on GPUs."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def free_bytes(
    environment: Mapping[str, str] = os.environ, *, load: Callable[[str], Any] = importlib.import_module
) -> dict[str, int]:
    """Return the free bytes of each visible GPU, by its number or UUID; nothing where the driver does not tell.

    On a machine with GPUs of several kinds, CUDA's numbers may be of other GPUs unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    try:
        library = load(_LIBRARY)
    except ImportError:
        return {}
    try:
        library.nvmlInit()
    except library.NVMLError:  # no driver
        return {}
    try:
        found = {name: _free(library, name) for name in _visible(library, environment)}
    finally:
        library.nvmlShutdown()
    return {name: free for name, free in found.items() if free is not None}


def _visible(library: Any, environment: Mapping[str, str]) -> list[str]:
    if _VISIBLE in environment:
        return [name for name in map(str.strip, environment[_VISIBLE].split(",")) if name]
    return list(map(str, range(library.nvmlDeviceGetCount())))


def _free(library: Any, name: str) -> int | None:
    try:
        of_name = library.nvmlDeviceGetHandleByIndex if name.isdecimal() else library.nvmlDeviceGetHandleByUUID
        return int(library.nvmlDeviceGetMemoryInfo(of_name(int(name) if name.isdecimal() else name)).free)
    except library.NVMLError:
        return None
