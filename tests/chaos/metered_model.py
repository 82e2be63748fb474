"""The in-process engine, slowed down, with a meter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.engines.inprocess.decoder import Decoder
from asyncrl.engines.inprocess.engine import InProcessEngine
from tests.chaos.meter import Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(inprocess.Options):
    meter: str = ""
    """Names the folder of the meters."""
    step_seconds: float = 0.0
    """Additional seconds per token."""


class MeteredModel(InProcessEngine):
    """engine.kind = "tests.chaos.metered_model:MeteredModel" """

    options_type = Options

    def __init__(
        self,
        model_path: Path,
        *,
        device: str,
        dtype: str,
        version: tuple[int, int],
        options: Options,
        reports_experts: bool = False,
    ) -> None:
        super().__init__(
            model_path, device=device, dtype=dtype, version=version, options=options, reports_experts=reports_experts
        )
        self._meter = Meter(Path(options.meter))
        self._step_seconds = options.step_seconds

    def _step(self, decoder: Decoder) -> None:
        time.sleep(self._step_seconds)
        super()._step(decoder)
        self._meter.tell(generated=decoder.num_sampled, running=self.stats().running)
