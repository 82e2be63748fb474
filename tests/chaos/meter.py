"""How much an engine has sampled, told outside of its process: what SIGKILL does not take with it.

The engine writes two numbers into a file that is mapped into its memory, at each token that it decodes.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import tiny_engine
from benchmarks.tiny_engine import TinyEngine

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


def running(folder: Path, pid: int) -> int:
    """Sequences that the engine of process ``pid`` decodes; 0 before it has any."""
    found = max(folder.glob(f"{pid}-*"), key=lambda path: path.stat().st_mtime_ns, default=None)
    numbers = _read(found) if found is not None else ()
    return int(numbers[1]) if len(numbers) == _NUMBERS else 0


def _read(path: Path) -> NDArray[np.int64]:
    return np.fromfile(path, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(tiny_engine.Options):
    meter: str = ""
    """The folder of the meters."""


class MeteredEngine(TinyEngine):
    """engine.kind = "tests.chaos.meter:MeteredEngine" """

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: tuple[int, int], options: Options
    ) -> None:
        super().__init__(model_path, device=device, dtype=dtype, version=version, options=options)
        self._meter = Meter(Path(options.meter))

    def _decode(self) -> None:
        super()._decode()
        self._tell()

    def _schedule(self) -> None:
        super()._schedule()
        self._tell()

    def _tell(self) -> None:
        stats = self.stats()
        self._meter.tell(generated=stats.tokens_generated, running=stats.running)
