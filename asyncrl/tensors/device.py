"""Resolve the device named in a section of the run file."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError

_CPU_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes of one GPU."""

    total: int
    free: int


def read_gpu_memory() -> GpuMemory:
    """Return the memory of this process's first GPU, without a CUDA context, which would take half a gigabyte of it.

    Raises ConfigError if the driver's tool does not answer.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        total, free = (int(field) * 2**20 for field in told.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{' '.join(command)}: {error}") from None
    return GpuMemory(total=total, free=free)


def read_host_memory() -> int:
    """Return the bytes of memory of this machine, or of this container if its limit is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine


def count_cpus() -> int:
    """Return how many CPUs this process may use at a time: those it may run on, or this container's limit if lower."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, _CPU_LIMIT.read_text().split())
        return min(allowed, math.ceil(quota / period))
    except (OSError, ValueError):  # no container, or "max", one without a limit
        return allowed


def set_threads(threads: int) -> None:
    """Have torch compute with so many CPU threads; 0: its default, but no more than there are CPUs.

    Its default does not know a container's limit. Under one of half a core, 32 threads took 2.4 times the CPU seconds
    of one.
    """
    import torch

    if threads or torch.get_num_threads() > count_cpus():
        torch.set_num_threads(threads or count_cpus())


def resolve_device(name: str, *, section: str) -> str:
    """Return "cpu" or "cuda"; "auto" picks the GPU if torch sees one. Raises ConfigError for "cuda" without a GPU."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        require_gpu(section)
    return name


def require_gpu(section: str) -> None:
    """Raise ConfigError if torch sees no GPU on this machine."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f'{section}: device = "cuda", but this machine has no GPU that torch sees; use "cpu" or "auto"'
        )
