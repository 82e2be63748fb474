"""The tiny net of the staleness benchmark as an engine, with a meter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.meter import Meter
from tests.chaos.trouble import follow_clock
from tests.harness.tiny import engine as tiny_engine
from tests.harness.tiny.engine import TinyEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(tiny_engine.Options):
    meter: str = ""
    """Names the folder of the meters."""


class MeteredNet(TinyEngine):
    """engine.kind = "tests.chaos.metered_net:MeteredNet" """

    options_type = Options

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: tuple[int, int], options: Options
    ) -> None:
        super().__init__(model_path, device=device, dtype=dtype, version=version, options=options)
        self._meter = Meter(Path(options.meter))
        follow_clock(Path(options.meter), role="rollout-worker")

    def _decode(self) -> None:
        super()._decode()
        self._tell()

    def _schedule(self) -> None:
        super()._schedule()
        self._tell()

    def _tell(self) -> None:
        stats = self.stats()
        self._meter.tell(generated=stats.tokens_generated, running=stats.running)
