"""The simulated engine of simulated.py as a plugin for run files. Weights take time to load, but are not used.

engine.kind = "benchmarks.far_engine:FarEngine"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.planning.simulation import Timing
from benchmarks.simulated import Lengths, SimulatedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of simulated.Timing and simulated.Lengths."""

    seconds_per_token: float = 0.005
    seconds_per_sequence: float = 0.00005
    capacity: int = 256
    load_seconds: float = 0.05
    mean_tokens: int = 1000
    max_tokens: int = 4096


class FarEngine(SimulatedEngine):
    """Generates answers of lognormal length at the speed of a real engine."""

    options_type = Options

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: tuple[int, int], options: Options
    ) -> None:
        timing = Timing(
            seconds_per_token=options.seconds_per_token,
            seconds_per_sequence=options.seconds_per_sequence,
            capacity=options.capacity,
            load_seconds=options.load_seconds,
            train_tokens_per_second=1.0,
            train_seconds=0.0,
        )
        super().__init__(timing, Lengths("lognormal", mean=options.mean_tokens, maximum=options.max_tokens))
