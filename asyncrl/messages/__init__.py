"""Everything that crosses the bus: message types, topics, and their encoding.

rollout          prompts, trajectories, partial rollouts
control          weight versions, progress, heartbeats, events, metrics, quarantine, size of the fleet
evaluation       the version being evaluated, and the answers
weight_transfer  transfer of weights from the learner's memory to an engine's memory
topics           all topics and services, with who may publish and read them
codec            encoding to bytes and decoding
"""

from asyncrl.messages.control import (
    Event,
    Heartbeat,
    Progress,
    Quarantine,
    StepMetrics,
    Wait,
    WeightVersion,
)
from asyncrl.messages.rollout import (
    ANY_INCARNATION,
    CallSegment,
    GroupSegment,
    PromptGroup,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    TurnReward,
    VersionSpan,
)
from asyncrl.messages.validation import replace

__all__ = [
    "ANY_INCARNATION",
    "CallSegment",
    "Event",
    "GroupSegment",
    "Heartbeat",
    "Progress",
    "PromptGroup",
    "Quarantine",
    "SamplingParams",
    "StepMetrics",
    "Trajectory",
    "TrajectoryGroup",
    "TurnReward",
    "VersionSpan",
    "Wait",
    "WeightVersion",
    "replace",
]
