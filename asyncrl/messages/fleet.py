"""What `asyncrl run`, `asyncrl scale` and joining workers tell each other: fleet sizes, names, the run's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.checks import MOST_WORKERS
from asyncrl.errors import MessageError


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """How many workers `asyncrl run` should keep.  Topic ``fleet``: `asyncrl scale` -> `asyncrl run`.

    rollout_workers, reward_workers  None leaves their number as it is
    request                          identifies the command, so that it recognises the answer to its own request
    """

    rollout_workers: int | None = None
    reward_workers: int | None = None
    request: str = ""

    def __post_init__(self) -> None:
        for name in ("rollout_workers", "reward_workers"):
            if not 0 <= (getattr(self, name) or 0) <= MOST_WORKERS:
                raise MessageError(f"{name} must be in 0..{MOST_WORKERS}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The fleet as `asyncrl run` has it.  Topic ``fleet_status``: `asyncrl run` -> `asyncrl scale`, observers.

    request          of the newest FleetSize it has seen
    rollout_workers  its target: the size requested, or as many as there was room for
    workers          names of the rollout workers it keeps running; their heartbeats say whether they sample already
    reward_workers, graders  the same of reward workers
    draining         names of workers that finish their groups and then exit
    problem          why the target is not the size requested, in one line
    """

    request: str = ""
    rollout_workers: int = 0
    workers: tuple[str, ...] = ()
    reward_workers: int = 0
    graders: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The part of the run file that workers need.  Topic ``settings``: learner -> workers that join without a run file.

    sections  from config/record.py, without secrets
    withheld  keys left out because they may hold secrets, such as "reward.options"; a joining worker must give them
    """

    sections: dict[str, Any] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A process that asks for a name, or holds it.  Services ``workers`` and ``launcher``: starting <-> running."""

    host: str
    pid: int
