"""Every topic and service of a run: what it carries, who publishes or asks, who reads or serves.

kind    promise
work    each message goes to one consumer, and to another one until a consumer acks it
log     every message is kept; readers keep a cursor and nobody acks
state   the last value of each key; a watcher gets the present value, then newer ones, perhaps not all of them

To add one: a message type, and a row here. Streams (bus/jetstream/layout.py), permissions (bus/nats_server) and the
reference page follow from the row.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from asyncrl.messages.control import Event, Heartbeat, Progress, Quarantine, StepMetrics, WeightVersion
from asyncrl.messages.evaluation import Evaluation, EvaluationAnswers
from asyncrl.messages.fleet import Claim, FleetSize, FleetStatus, RunSettings
from asyncrl.messages.grading import Grades, GradingRequest
from asyncrl.messages.pieces import Piece
from asyncrl.messages.rollout import PromptGroup, TrajectoryGroup
from asyncrl.messages.segments import GroupSegment
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest

M = TypeVar("M")
Q = TypeVar("Q")
A = TypeVar("A")
Kind = Literal["work", "log", "state"]
Role = Literal["learner", "rollout-worker", "operator", "observer"]

ROLES: Final[tuple[str, ...]] = ("learner", "rollout-worker", "operator", "observer")
"""Who connects: the learner's processes and `asyncrl run`; workers; `asyncrl scale`; and whoever only looks."""


@dataclass(frozen=True, slots=True)
class Topic(Generic[M]):
    """A typed subject of the bus.

    publishers, readers  roles that need it. Besides these the learner may do everything, and operators and observers
                         read every log and state. A worker that publishes and reads a state may also remove its keys
                         and use keys with several parts ("a/b/c").
    seconds_to_live      states and log entries older than this are gone; 0 keeps them
    speaker              field of the message that names who says it: nobody else may if the name has a key (signing.py)
    most_messages        of a work topic, that it holds at once; 0: as many groups as the run's window has
    is_in_pieces         whether a message larger than the server takes is stored in ``pieces`` (bus/pieces.py)
    is_watched           of a state that workers publish and read: whether they watch single keys of it, no more
    """

    name: str
    kind: Kind
    message_type: type[M]
    publishers: tuple[Role, ...] = ()
    readers: tuple[Role, ...] = ()
    seconds_to_live: float = 0.0
    speaker: str = ""
    most_messages: int = 0
    is_in_pieces: bool = False
    is_watched: bool = False

    @property
    def is_learners(self) -> bool:
        """Whether the learner alone speaks there: it signs what it says, and readers check it (signing.py)."""
        return self.publishers == ("learner",)


@dataclass(frozen=True, slots=True)
class Service(Generic[Q, A]):
    """A question that gets its answer at once, from a process that serves it. Nothing is stored.

    key       which of several served side by side, such as one for each worker
    is_keyed  whether there is one for each of many keys
    is_answer_signed  whether answers are taken from the learner alone (signing.py)
    is_namesakes      whether answers to a process with a key are taken from processes with the same key alone
    """

    name: str
    question_type: type[Q]
    answer_type: type[A]
    asked_by: tuple[Role, ...] = ()
    served_by: tuple[Role, ...] = ()
    is_keyed: bool = False
    key: str = ""
    is_answer_signed: bool = False
    is_namesakes: bool = False


PROMPTS = Topic("prompts", "work", PromptGroup, publishers=("learner",), readers=("rollout-worker",))
TRAJECTORIES = Topic(
    *("trajectories", "log", TrajectoryGroup),
    publishers=("rollout-worker",),
    readers=("learner",),
    speaker="worker",
    is_in_pieces=True,
)
PIECES = Topic("pieces", "log", Piece, publishers=("rollout-worker",), readers=("learner",))
SEGMENTS = Topic(
    *("segments", "state", GroupSegment),
    publishers=("rollout-worker",),
    readers=("rollout-worker",),
    seconds_to_live=6 * 3600.0,
)

GRADING = Topic(
    *("grading", "work", GradingRequest),
    publishers=("rollout-worker",),
    readers=("rollout-worker",),
    speaker="worker",
)
"""A reward worker has the rights of a rollout worker."""
GRADING_PIECES = Topic(
    *("grading_pieces", "state", Piece),
    publishers=("rollout-worker",),
    readers=("rollout-worker",),
    seconds_to_live=3600.0,
)
GRADES = Topic(
    *("grades", "state", Grades),
    publishers=("rollout-worker",),
    readers=("rollout-worker",),
    seconds_to_live=3600.0,
    speaker="worker",
    is_watched=True,
)
"""Kept for who takes over a group whose worker died while it was graded."""

EVALUATION = Topic("evaluation", "state", Evaluation, publishers=("learner",), readers=("rollout-worker",))
EVALUATION_PROMPTS = Topic(
    *("evaluation_prompts", "work", PromptGroup),
    publishers=("learner",),
    readers=("rollout-worker",),
    most_messages=4096,
)
EVALUATION_ANSWERS = Topic(
    *("evaluation_answers", "log", EvaluationAnswers),
    publishers=("rollout-worker",),
    readers=("learner",),
    speaker="worker",
)

WEIGHTS = Topic("weights", "state", WeightVersion, publishers=("learner",), readers=("rollout-worker",))
SENT = "sent"
"""Key in ``weights`` of the version that the learner sends from memory; the empty key is the version in a folder."""

PROGRESS = Topic("progress", "state", Progress, publishers=("learner",), readers=("rollout-worker",))
ACTORS = Topic(
    *("actors", "state", Heartbeat),
    publishers=("learner", "rollout-worker"),
    readers=("learner",),
    seconds_to_live=15.0,
    speaker="actor",
)
EVENTS = Topic(
    "events", "log", Event, publishers=("learner", "rollout-worker"), seconds_to_live=7 * 86_400.0, speaker="actor"
)
QUARANTINE = Topic("quarantine", "state", Quarantine, publishers=("learner",), readers=("rollout-worker",))
METRICS = Topic("metrics", "state", StepMetrics, publishers=("learner",), readers=("observer",))
EVALUATION_METRICS = "evaluation"
"""Key in ``metrics`` of the newest evaluation; the empty key is the newest step."""

FLEET = Topic("fleet", "state", FleetSize, publishers=("operator",), readers=("learner",))
FLEET_STATUS = Topic("fleet_status", "state", FleetStatus, publishers=("learner",), readers=("operator",))
SETTINGS = Topic("settings", "state", RunSettings, publishers=("learner",), readers=("rollout-worker",))

TRANSFERS = Service(
    *("transfers", TransferRequest, TransferOffer),
    asked_by=("rollout-worker",),
    served_by=("learner",),
    is_answer_signed=True,
)
LAUNCHER = Service("launcher", Claim, Claim, asked_by=("learner",), served_by=("learner",))
WORKERS = Service(
    *("workers", Claim, Claim),
    asked_by=("rollout-worker",),
    served_by=("rollout-worker",),
    is_keyed=True,
    is_namesakes=True,
)

ALL: Final[tuple[Topic[Any], ...]] = tuple(row for row in tuple(globals().values()) if isinstance(row, Topic))
ALL_SERVICES: Final[tuple[Service[Any, Any], ...]] = tuple(
    row for row in tuple(globals().values()) if isinstance(row, Service)
)


def worker_named(name: str) -> Service[Claim, Claim]:
    """Served by the rollout worker of this name."""
    return dataclasses.replace(WORKERS, key=name)


def answer_key(group_id: int, *, ticket: str) -> str:
    """Of an answer in ``trajectories``. ``ticket``: of the group's prompt; "" where prompts have none."""
    return f"{group_id}-{ticket}" if ticket else str(group_id)


def public_part(key: str) -> str:
    """Of a key of ``trajectories``, what everybody may know: all but the ticket."""
    return key.partition("-")[0]


def group_id_of(key: str) -> int | None:
    """The group that a key of ``prompts`` or ``trajectories`` names; None for a key that no group has."""
    found = re.fullmatch("(0|[1-9][0-9]{0,15})(-[0-9a-f]{32})?", key)
    return int(found[1]) if found else None
