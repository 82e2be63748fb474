"""How much an engine has sampled, told outside of its process: what SIGKILL does not take with it.

The engine writes two numbers into a file that is mapped into its memory, at each token that it decodes.
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
    """Of one life of one engine.

    generated  tokens since it began;  running  sequences being decoded
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._numbers: Any = np.memmap(path, np.int64, "w+", shape=_NUMBERS)

    def tell(self, *, generated: int, running: int) -> None:
        self._numbers[:] = generated, running


def generated(folder: Path) -> int:
    """Tokens that all engines have sampled, the dead ones too."""
    return sum(int(numbers[0]) for path in folder.iterdir() if len(numbers := _read(path)) == _NUMBERS)


def of(folder: Path, pid: int) -> tuple[int, int]:
    """Tokens sampled by the engine of process ``pid``, and sequences that it decodes now; (0, 0) before it has any."""
    found = max(folder.glob(f"{pid}-*"), key=lambda path: path.stat().st_mtime_ns, default=None)
    numbers = _read(found) if found is not None else ()
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == _NUMBERS else (0, 0)


def _read(path: Path) -> NDArray[np.int64]:
    return np.fromfile(path, np.int64)
