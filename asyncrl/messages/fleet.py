"""Messages between `asyncrl run`, `asyncrl scale` and workers: fleet sizes, and claims of names."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import MOST_WORKERS
from asyncrl.errors import MessageError


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Number of workers that `asyncrl run` should keep.  Topic ``fleet``: `asyncrl scale` -> `asyncrl run`.

    request  identifies the command, so that it recognises the reply to its own request
    """

    rollout_workers: int
    request: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rollout_workers <= MOST_WORKERS:
            raise MessageError(f"rollout_workers must be in 0..{MOST_WORKERS}, got {self.rollout_workers}")


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
class Claim:
    """A process that asks for a name, or holds it.  Services ``workers`` and ``launcher``: starting <-> running."""

    host: str
    pid: int
