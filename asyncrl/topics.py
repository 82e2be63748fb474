"""What flows where. One row a topic; who acks is in the design, not in the code that reads it.

kind    promise
work    every message goes to one consumer and is delivered again until that consumer acks it
log     every message is kept; readers hold a cursor and nobody acks
state   the last value per key; a watcher gets the present value first, then every change it is fast enough to see
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from asyncrl.fleet_messages import Claim, FleetSize, FleetStatus, RunSettings
from asyncrl.messages import (
    Event,
    GroupSegment,
    Heartbeat,
    Progress,
    PromptGroup,
    Quarantine,
    StepMetrics,
    TrajectoryGroup,
    WeightVersion,
)
from asyncrl.transfer_messages import TransferOffer, TransferRequest

M = TypeVar("M")
Q = TypeVar("Q")
A = TypeVar("A")
Kind = Literal["work", "log", "state"]


@dataclass(frozen=True, slots=True)
class Topic(Generic[M]):
    name: str
    kind: Kind
    message_type: type[M]
    seconds_to_live: float = 0.0
    """State and log entries older than this are gone; 0 keeps them."""


@dataclass(frozen=True, slots=True)
class Service(Generic[Q, A]):
    """A question that whoever serves it answers at once. Nothing is stored: nobody there is an answer too."""

    name: str
    question_type: type[Q]
    answer_type: type[A]
    key: str = ""
    """Which of several that are served side by side, such as one a worker."""


PROMPTS = Topic("prompts", "work", PromptGroup)
TRAJECTORIES = Topic("trajectories", "log", TrajectoryGroup)
WEIGHTS = Topic("weights", "state", WeightVersion)
SENT = "sent"
"""Key in ``weights`` of the version that the learner sends from memory; the empty key is the version in a folder."""
PROGRESS = Topic("progress", "state", Progress)
ACTORS = Topic("actors", "state", Heartbeat, seconds_to_live=15.0)
SEGMENTS = Topic("segments", "state", GroupSegment, seconds_to_live=6 * 3600.0)
EVENTS = Topic("events", "log", Event, seconds_to_live=7 * 86_400.0)
QUARANTINE = Topic("quarantine", "state", Quarantine)
METRICS = Topic("metrics", "state", StepMetrics)
FLEET = Topic("fleet", "state", FleetSize)
FLEET_STATUS = Topic("fleet_status", "state", FleetStatus)
SETTINGS = Topic("settings", "state", RunSettings)

ALL: tuple[Topic[Any], ...] = (
    *(PROMPTS, TRAJECTORIES, WEIGHTS, PROGRESS, ACTORS, SEGMENTS, EVENTS, QUARANTINE),
    *(METRICS, FLEET, FLEET_STATUS, SETTINGS),
)

TRANSFERS = Service("transfers", TransferRequest, TransferOffer)
LAUNCHER = Service("launcher", Claim, Claim)


def worker_named(name: str) -> Service[Claim, Claim]:
    """Served by the rollout worker of this name."""
    return Service("workers", Claim, Claim, key=name)


def group_id_of(key: str) -> int | None:
    """The group that a key of ``prompts`` or ``trajectories`` names; None for a key that no group has."""
    return int(key) if re.fullmatch("0|[1-9][0-9]{0,15}", key) else None
