"""A custom backend: the reference backend with a limited learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.backends.port import StepResult
from asyncrl.backends.reference import ReferenceBackend
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.policies.batching.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    max_learning_rate: float = 1.0


class LimitedBackend(ReferenceBackend):
    """learner.backend = "tests.integration.extending.toy_backend:LimitedBackend" """

    options_type = Options

    def __init__(self, *arguments: Any, options: Options, **named: Any) -> None:
        super().__init__(*arguments, options=options, **named)  # type: ignore[arg-type]
        self._largest = options.max_learning_rate

    @classmethod
    def check(cls, run: RunConfig) -> None:
        super().check(run)
        if run.learner.learning_rate > cls.options(run).max_learning_rate:
            raise ConfigError("learner.learning_rate: above learner.options.max_learning_rate")

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        return super().step(dp_shards, learning_rate=min(learning_rate, self._largest), model=model)
