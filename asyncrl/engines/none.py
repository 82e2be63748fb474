"""engine.kind = "none": no model. For rollout functions that generate nothing, as supervised fine-tuning's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import PromptError
from asyncrl.messages import Sampling, WeightVersion
from asyncrl.protocols import EngineStats, Generation, LoadReport, Partial


class NoEngine:
    """See Engine in protocols/engine.py. It is always on the newest weights, because it reads none."""

    receiver = None

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: tuple[int, int], options: None = None
    ) -> None:
        self._version = version

    @property
    def version(self) -> tuple[int, int]:
        return self._version

    async def start(self) -> None:
        pass

    async def generate(
        self, prompt_tokens: NDArray[np.int32], sampling: Sampling, *, seed: int, partial: Partial | None = None
    ) -> Generation:
        raise PromptError(
            'engine.kind = "none" generates nothing, and the rollout function asks it to; set engine.kind = "sglang" '
            'or "inprocess", or rollout.function = "given"'
        )

    async def load(self, weights: WeightVersion) -> LoadReport:
        self._version = weights.order
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        pass
