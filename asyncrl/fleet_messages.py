"""What travels between `asyncrl run`, `asyncrl scale` and workers that join: sizes, names, and the run's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import MessageError

MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """So many rollout workers `asyncrl run` should keep up.  Topic ``fleet``: `asyncrl scale` -> `asyncrl run`.

    request  names the command that asked, so that it knows the answer to its own question
    """

    rollout_workers: int
    request: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rollout_workers <= MOST_WORKERS:
            raise MessageError(f"rollout_workers must be in 0..{MOST_WORKERS}, got {self.rollout_workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """What `asyncrl run` makes of it.  Topic ``fleet_status``: `asyncrl run` -> `asyncrl scale`, observers.

    request          the newest FleetSize that it has seen
    rollout_workers  the size it keeps to: the one asked for, or what there was room for
    workers          names that it keeps up; whether they sample already, their heartbeats say
    draining         names that finish what they hold and then end
    problem          why the size is not the one asked for, in one line
    """

    request: str = ""
    rollout_workers: int = 0
    workers: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a worker needs of the run file.  Topic ``settings``: learner -> workers that join without one.

    sections  as config/record.py makes them, without secrets
    withheld  keys that may hold some, such as "reward.options": who joins has to say them
    """

    sections: dict[str, Any] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The process that asks for a name, or has it.  Services ``workers``, ``launcher``: who starts <-> who is up."""

    host: str
    pid: int
