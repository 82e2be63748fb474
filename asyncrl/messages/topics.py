"""Every topic and service of a run: its message type, who publishes or asks, and who reads or serves.

kind    guarantee
work    each message goes to one consumer, and to the next one until a consumer acks it
log     every message is kept; each reader keeps a cursor and does not ack
state   the last value of each key; a watcher gets the current value, then newer ones, but may skip some

A key of a topic that workers write begins with the name of its writer, "w0/7", and a worker may publish under no other
name (bus/nats_server/rights.py). So the subject, not the message, proves who wrote it.

To add a topic: define a message type, and add a row here. Streams (bus/jetstream/layout.py), permissions
(bus/nats_server) and the reference page follow from the row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, TypeVar

from asyncrl.messages.control import (
    Claim,
    Event,
    FleetSize,
    FleetStatus,
    Heartbeat,
    Progress,
    Quarantine,
    ServerAddress,
    StepMetrics,
    WeightVersion,
)
from asyncrl.messages.evaluation import Evaluation, EvaluationAnswers
from asyncrl.messages.pieces import Piece
from asyncrl.messages.rollout import GroupSegment, PromptGroup, TrajectoryGroup
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest

M = TypeVar("M")
Q = TypeVar("Q")
A = TypeVar("A")
Kind = Literal["work", "log", "state"]
Role = Literal["learner", "rollout-worker", "model-server", "operator", "observer"]

ROLES: Final[tuple[str, ...]] = ("learner", "rollout-worker", "model-server", "operator", "observer")
"""Roles of connections: the learner's processes and `asyncrl run`; workers; servers of frozen models; `asyncrl scale`;
read-only observers."""
NAMED_ROLES: Final[Mapping[str, str]] = MappingProxyType({"rollout-worker": "workers", "model-server": "servers"})
"""Roles of the run's other processes, each of which writes only under its own name; with the folder of their users."""


@dataclass(frozen=True, slots=True)
class Topic(Generic[M]):
    """A typed subject of the bus.

    publishers, readers  roles that need to publish or read. The learner may also do everything else, and operators and
                         observers may read every log and state. A worker that publishes and reads a state may also
                         remove its keys and use keys with several parts ("a/b/c").
    seconds_to_live      age at which states and log entries expire; 0 keeps them
    sender               field of the message that repeats the name in its key; a message that names another is refused
    most_messages        most messages that a work topic holds at once; 0: as many as the run's window has groups
    is_in_pieces         whether a message larger than the server's limit is stored in ``pieces`` (bus/pieces.py)
    is_watched           for a state that expires and that workers read: whether they only watch single keys
    """

    name: str
    kind: Kind
    message_type: type[M]
    publishers: tuple[Role, ...] = ()
    readers: tuple[Role, ...] = ()
    seconds_to_live: float = 0.0
    sender: str = ""
    most_messages: int = 0
    is_in_pieces: bool = False
    is_watched: bool = False

    @property
    def is_learners(self) -> bool:
        """Whether only the learner publishes here."""
        return self.publishers == ("learner",)


@dataclass(frozen=True, slots=True)
class Service(Generic[Q, A]):
    """A question that a serving process answers at once. Nothing is stored.

    key       selects one of several servers of the service, such as one per worker
    is_keyed  whether each worker has a server of its own, which only itself may ask and serve; its key is its name
    """

    name: str
    question_type: type[Q]
    answer_type: type[A]
    asked_by: tuple[Role, ...] = ()
    served_by: tuple[Role, ...] = ()
    is_keyed: bool = False
    key: str = ""


PROMPTS = Topic("prompts", "work", PromptGroup, publishers=("learner",), readers=("rollout-worker",))
TRAJECTORIES = Topic(
    "trajectories",
    "log",
    TrajectoryGroup,
    publishers=("rollout-worker",),
    readers=("learner",),
    sender="worker",
    is_in_pieces=True,
)
PIECES = Topic("pieces", "log", Piece, publishers=("rollout-worker",), readers=("learner",))
SEGMENTS = Topic(
    "segments",
    "state",
    GroupSegment,
    publishers=("rollout-worker",),
    readers=("rollout-worker",),
    seconds_to_live=6 * 3600.0,
    sender="worker",
)

EVALUATION = Topic("evaluation", "state", Evaluation, publishers=("learner",), readers=("rollout-worker",))
EVALUATION_PROMPTS = Topic(
    "evaluation_prompts",
    "work",
    PromptGroup,
    publishers=("learner",),
    readers=("rollout-worker",),
    most_messages=4096,
)
EVALUATION_ANSWERS = Topic(
    "evaluation_answers",
    "log",
    EvaluationAnswers,
    publishers=("rollout-worker",),
    readers=("learner",),
    sender="worker",
)

WEIGHTS = Topic("weights", "state", WeightVersion, publishers=("learner",), readers=("rollout-worker",))
SENT = "sent"
"""Key in ``weights`` of the version that the learner sends from memory. The empty key is the version in a folder."""

PROGRESS = Topic("progress", "state", Progress, publishers=("learner",), readers=("rollout-worker", "model-server"))
ACTORS = Topic(
    "actors",
    "state",
    Heartbeat,
    publishers=("learner", "rollout-worker", "model-server"),
    readers=("learner",),
    seconds_to_live=15.0,
    sender="actor",
)
EVENTS = Topic(
    "events", "log", Event, publishers=("learner", "rollout-worker"), seconds_to_live=7 * 86_400.0, sender="actor"
)
SERVERS = Topic(
    "servers",
    "state",
    ServerAddress,
    publishers=("model-server",),
    readers=("rollout-worker",),
    seconds_to_live=15.0,
    sender="name",
    is_watched=True,
)
QUARANTINE = Topic("quarantine", "state", Quarantine, publishers=("learner",), readers=("rollout-worker",))
METRICS = Topic("metrics", "state", StepMetrics, publishers=("learner",), readers=("observer",))
EVALUATION_METRICS = "evaluation"
"""Key in ``metrics`` of the newest evaluation. The empty key is the newest step."""

FLEET = Topic("fleet", "state", FleetSize, publishers=("operator",), readers=("learner",))
FLEET_STATUS = Topic("fleet_status", "state", FleetStatus, publishers=("learner",), readers=("operator",))

TRANSFERS = Service(
    "transfers",
    TransferRequest,
    TransferOffer,
    asked_by=("rollout-worker",),
    served_by=("learner",),
)
LAUNCHER = Service("launcher", Claim, Claim, asked_by=("learner",), served_by=("learner",))
WORKERS = Service(
    "workers",
    Claim,
    Claim,
    asked_by=("rollout-worker",),
    served_by=("rollout-worker",),
    is_keyed=True,
)

ALL: Final[tuple[Topic[Any], ...]] = tuple(row for row in tuple(globals().values()) if isinstance(row, Topic))
ALL_SERVICES: Final[tuple[Service[Any, Any], ...]] = tuple(
    row for row in tuple(globals().values()) if isinstance(row, Service)
)


def worker_named(name: str) -> Service[Claim, Claim]:
    """Return the service of the rollout worker with this name."""
    return dataclasses.replace(WORKERS, key=name)


def answer_key(group_id: int, *, worker: str, ticket: str) -> str:
    """Key of an answer in ``trajectories``. ``ticket``: that of the group's prompt; "" if prompts have no tickets.

    Example: "w0/7-5f..." is the answer of worker w0 to group 7.
    """
    return f"{worker}/{group_id}-{ticket}" if ticket else f"{worker}/{group_id}"


def sender_of(key: str) -> str:
    """The name with which a key begins; "" for the key of a log without a name."""
    name, slash, _ = key.partition("/")
    return name if slash else ""


def public_part(key: str) -> str:
    """The part of a key of ``trajectories`` that is not secret: all but the ticket."""
    name, slash, rest = key.rpartition("/")
    return name + slash + rest.partition("-")[0]


def group_id_of(key: str) -> int | None:
    """Return the group of a key of ``prompts`` or ``trajectories``; None if the key is malformed."""
    found = re.fullmatch("(?:[^/]*/)?(0|[1-9][0-9]{0,15})(-[0-9a-f]{32})?", key)
    return int(found[1]) if found else None
