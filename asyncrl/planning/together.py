"""How much an engine and a learner on the same GPUs slow each other down: both are measured at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Event
from typing import Final

from asyncrl.planning.simulation import DecodeReading, Timing, TrainReading

_SPAWN: Final[SpawnContext] = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What the two measuring processes tell each other.

    engine_samples  the engine has sequences; the learner starts only then, as the engine's start takes memory
    steps_begin     the learner's kernels are compiled, so from now on both are measured
    steps_end       the learner is done, or one of the two has failed
    """

    engine_samples: Event = field(default_factory=_SPAWN.Event)
    steps_begin: Event = field(default_factory=_SPAWN.Event)
    steps_end: Event = field(default_factory=_SPAWN.Event)

    def give_up(self) -> None:
        """Let both go on to their ends."""
        for event in (self.steps_end, self.steps_begin, self.engine_samples):
            event.set()


def slowdowns(timing: Timing, decode: Iterable[DecodeReading], train: Iterable[TrainReading]) -> tuple[float, float]:
    """Return the factors (decode_beside, train_beside) of readings made at once, both >= 1.  timing: of each alone"""
    given = [reading for reading in decode if reading.running > 0]
    alone = sum(one.tokens / one.running * timing.decode_step(one.running, one.context) for one in given)
    steps = list(train)
    alone_steps = sum(timing.train_step(one.tokens, machines=1) for one in steps)
    return (
        max(1.0, sum(one.seconds for one in given) / alone) if alone else 1.0,
        max(1.0, sum(one.seconds for one in steps) / alone_steps) if alone_steps else 1.0,
    )
