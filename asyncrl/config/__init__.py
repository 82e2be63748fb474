"""The run file: the meaning and default of every key, and what is refused.

Larger sections have their own modules; run.py has the others and RunConfig.
"""

from asyncrl.config.bus import BusSection
from asyncrl.config.data import DataFile, DataSection
from asyncrl.config.evaluation import EvaluationDataset, EvaluationSection
from asyncrl.config.learner import LearnerSection
from asyncrl.config.metrics import MetricsSection
from asyncrl.config.reward import RewardPart, RewardSection
from asyncrl.config.run import (
    AlgorithmSection,
    CheckpointSection,
    EngineSection,
    Mode,
    ModelSection,
    PoolSection,
    RolloutSection,
    RunConfig,
    RunSection,
    WeightsSection,
)
from asyncrl.config.run_file import load, only_overrides, override, override_items
from asyncrl.config.servers import ServerSection

__all__ = [
    "AlgorithmSection",
    "BusSection",
    "CheckpointSection",
    "DataFile",
    "DataSection",
    "EngineSection",
    "EvaluationDataset",
    "EvaluationSection",
    "PoolSection",
    "LearnerSection",
    "MetricsSection",
    "Mode",
    "ModelSection",
    "RewardPart",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "RunConfig",
    "ServerSection",
    "WeightsSection",
    "load",
    "only_overrides",
    "override",
    "override_items",
]
