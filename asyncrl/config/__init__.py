"""The run file: what every key means, its default, and what is refused. One section of models or rules a file."""

from asyncrl.config.learner import Learner
from asyncrl.config.run import (
    Algorithm,
    Bus,
    Checkpoint,
    Data,
    Engine,
    Metrics,
    Mode,
    Model,
    RewardSection,
    Rollout,
    Run,
    RunConfig,
    Weights,
    load,
    only_overrides,
    override,
)

__all__ = [
    "Algorithm",
    "Bus",
    "Checkpoint",
    "Data",
    "Engine",
    "Learner",
    "Metrics",
    "Mode",
    "Model",
    "RewardSection",
    "Rollout",
    "Run",
    "RunConfig",
    "Weights",
    "load",
    "only_overrides",
    "override",
]
