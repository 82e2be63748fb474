"""Counts sampled tokens outside the engine's process, so that the count survives SIGKILL.

The engine writes two numbers to a memory-mapped file at each decoded token.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_NUMBERS: Final = 2


class Meter:
    """Meter of one engine process.

    generated  tokens sampled since the engine started
    running    sequences being decoded
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._numbers: Any = np.memmap(path, np.int64, "w+", shape=_NUMBERS)

    def tell(self, *, generated: int, running: int) -> None:
        self._numbers[:] = generated, running


def generated(folder: Path) -> int:
    """Return the tokens that all engines have sampled, dead engines included."""
    return sum(int(numbers[0]) for path in folder.iterdir() if len(numbers := _read(path)) == _NUMBERS)


def of(folder: Path, pid: int) -> tuple[int, int]:
    """Return the tokens sampled by the engine of process ``pid`` and its running sequences; (0, 0) before its first
    token."""
    found = max(folder.glob(f"{pid}-*"), key=lambda path: path.stat().st_mtime_ns, default=None)
    numbers = _read(found) if found is not None else ()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == _NUMBERS else (0, 0)


def _read(path: Path) -> NDArray[np.int64]:
    return np.fromfile(path, np.int64)
