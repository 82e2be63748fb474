"""Learner and engine on one GPU under NVIDIA's Multi-Process Service, instead of by turns of time slices.

The learner's share of the multiprocessors is limited (limited_backend.py): without a limit its products starve an
engine's decoding. The daemon is one of this benchmark's own, with its pipes in a folder of its own; the GPU's compute
mode stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BACKEND: Final = "benchmarks.gpu.limited_backend:LimitedBackend"
_DAEMON: Final = "nvidia-cuda-mps-control"


def is_there() -> bool:
    return shutil.which(_DAEMON) is not None


@contextlib.contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """Run a daemon; yield the variables with which processes use it. Raises OSError, CalledProcessError."""
    places = {name: folder / name for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    for place in places.values():
        place.mkdir(parents=True)
    variables = {name: str(place) for name, place in places.items()}
    # A daemon with CUDA_VISIBLE_DEVICES numbers its GPUs anew, and processes that name one find none.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
    subprocess.run([_DAEMON, "-d"], env=environment, check=True, timeout=30)
    try:
        yield variables
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run([_DAEMON], input="quit\n", text=True, env=environment, check=False, timeout=30)
