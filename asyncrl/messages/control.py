"""Messages besides rollouts: weights, progress, heartbeats, events, metrics, quarantine, size of the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.checks import MOST_WORKERS
from asyncrl.messages.rollout import LONGEST_ERROR
from asyncrl.messages.validation import LARGEST_KEY, check_counts, check_seconds, require


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """Where to get the weights of one policy version.  Topic ``weights``: learner -> weight followers.

    uri          folder with config.json and model.safetensors, or with several files and their index, at the path that
                 workers see; empty under the key ``sent``, where the learner keeps the weights in memory and sends them
                 on request (service ``transfers``)
    sha256       hash of model.safetensors, or of the index
    num_bytes    size of all weight files
    num_engines  engines that the learner knows; an eighth of them may load at once
    resumed_from policy version from which this incarnation started
    """

    incarnation: int
    policy_version: int
    uri: str = ""
    sha256: str = ""
    num_bytes: int = 0
    num_engines: int = 0
    resumed_from: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "incarnation", "policy_version", "num_bytes", "num_engines", "resumed_from")
        require("\0" not in self.uri, "uri is not a path")

    @property
    def version(self) -> tuple[int, int]:
        """Newer weights compare greater: a new incarnation supersedes everything an older one published."""
        return (self.incarnation, self.policy_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of the learner.  Topic ``progress``: learner -> prompt source, workers, observers.

    step           training steps done, one per batch
    batches_taken  training steps begun
    groups_lost    groups that left the window untrained: dropped (too stale), failed or filtered
    finished       no more prompts will come, so workers drain
    """

    incarnation: int
    step: int
    policy_version: int
    batches_taken: int = 0
    groups_trained: int = 0
    groups_dropped: int = 0
    groups_failed: int = 0
    groups_filtered: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "incarnation", "step", "policy_version", "batches_taken", "groups_trained")
        check_counts(self, "groups_dropped", "groups_failed", "groups_filtered")

    @property
    def groups_lost(self) -> int:
        return self.groups_dropped + self.groups_failed + self.groups_filtered


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that an actor waits for.

    what     description, such as "trajectories"
    on       what can end the wait: a role ("rollout-worker") or a part of the actor's process (waits.PARTS: "engine");
             empty for the actor itself
    seconds  length so far on the actor's monotonic clock; for a part that shows signs of life, since its last sign
    usual    median length of past waits of this kind for a part, in seconds; 0 before the first one has ended
    limit    seconds after which a wait for a part is a stall; 0 for no limit
    count    number of such waits; ``seconds`` is the longest of them
    """

    what: str
    on: str = ""
    seconds: float = 0.0
    usual: float = 0.0
    limit: float = 0.0
    count: int = 1

    def __post_init__(self) -> None:
        check_seconds(self, "seconds", "usual", "limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one actor does and waits for.  Topic ``actors``, one key per actor, which expires when the actor stops.

    beat         counter; two readings show whether the actor is alive, without comparing clocks
    life         identifies one start of the process; a restarted process of the same name has a new life
    phase        starting, running, draining or quarantined
    waits        longest first
    problem      last unresolved error, in one line
    numbers      gauges and counters by metric name, such as ``rollout/running``
    begun        group id -> oldest policy version in the group, for each group in progress at a rollout worker
    """

    actor: str
    role: str
    incarnation: int = 0
    policy_version: int = 0
    beat: int = 0
    phase: str = "running"
    waits: tuple[Wait, ...] = ()
    problem: str = ""
    host: str = ""
    pid: int = 0
    life: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counted = all(group.isascii() and group.isdigit() and len(group) <= 16 for group in self.begun)
        require(counted and all(0 <= version < 2**53 for version in self.begun.values()), "begun holds invalid groups")
        names = (self.actor, self.role, self.phase, self.host)
        require(all(len(name) <= LARGEST_KEY for name in names), f"it has a name of more than {LARGEST_KEY} characters")
        require(len(self.problem) <= LONGEST_ERROR, f"its problem has more than {LONGEST_ERROR} characters")
        require("".join(names).isprintable(), "it has a name that cannot be printed")

    @property
    def waits_for(self) -> str:
        """Description of the longest wait; empty without waits."""
        return self.waits[0].what if self.waits else ""

    @property
    def waiting_seconds(self) -> float:
        return self.waits[0].seconds if self.waits else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that may matter later: a dropped group, an error, a worker that joined.  Topic ``events``.

    time  Unix seconds
    """

    kind: str
    actor: str
    time: float
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seconds(self, "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of the newest step.  Topic ``metrics``: learner -> observers.

    numbers    finite values by metric name (metrics/schema.py)
    staleness  number of trained tokens that were 0, 1, 2, ... policy versions old
    """

    step: int
    numbers: dict[str, float] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The learner no longer trains groups of this worker.  Topic ``quarantine``, key WORKER: learner -> worker.

    life  life in the worker's heartbeat, so that the next worker of this name is not affected; empty if the worker had
          ended
    """

    worker: str
    incarnation: int
    reason: str
    life: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Number of workers that `asyncrl run` should keep.  Topic ``fleet``: `asyncrl scale` -> `asyncrl run`.

    request  identifies the command, so that it recognises the reply to its own request
    """

    rollout_workers: int
    request: str = ""

    def __post_init__(self) -> None:
        is_allowed = 0 <= self.rollout_workers <= MOST_WORKERS
        require(is_allowed, f"rollout_workers must be in 0..{MOST_WORKERS}, got {self.rollout_workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The present fleet of `asyncrl run`.  Topic ``fleet_status``: `asyncrl run` -> `asyncrl scale`, observers.

    request          request of the newest FleetSize seen
    rollout_workers  target: the requested size, or as many as there is room for
    workers          names of the rollout workers kept running; their heartbeats show whether they sample yet
    draining         names of workers that finish their groups and then exit
    problem          why the target is not the requested size, in one line
    """

    request: str = ""
    rollout_workers: int = 0
    workers: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a frozen model is served ([servers.NAME]).  Topic ``servers``, key NAME: its process -> rollout workers.

    url    base URL of OpenAI's protocol, http://HOST:PORT/v1
    model  name of the model there
    key    bearer token of its requests; "" if it requires none
    """

    name: str
    url: str
    model: str = ""
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A process that asks for a name, or holds it.  Services ``workers`` and ``launcher``: starting <-> running."""

    host: str
    pid: int
