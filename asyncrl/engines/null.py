"""engine.kind = "none": an engine without a model, for rollout functions that generate nothing, as in fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.adapter import RunConfig
from asyncrl.engines.adapter import EngineAdapter
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import EngineStats
from asyncrl.errors import PromptError
from asyncrl.images.store import ImageFile
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.weights.port import LoadReport


class NullEngine(EngineAdapter):
    """See Engine in engines/port.py. Always reports the newest version, because it reads no weights."""

    generates = False

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        """No requirements."""

    @classmethod
    def num_gpus(cls, run: RunConfig) -> int:
        return 0

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
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
        images: Sequence[ImageFile] = (),
    ) -> Generation:
        raise PromptError(
            'engine.kind = "none" generates nothing, but the rollout function calls generate; set engine.kind = '
            '"sglang" or "inprocess", or rollout.function = "given"'
        )

    async def load(self, weights: WeightVersion) -> LoadReport:
        self._version = weights.version
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        pass
