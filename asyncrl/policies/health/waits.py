"""What an actor may wait for, and how long until the wait counts as a stall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

PATIENCE_SECONDS: Final = 6.0
"""A shorter wait for an actor is no stall. With a heartbeat (2 s) and a poll (1 s) in between, a stall is named within
10 s."""
FIRST_SECONDS: Final = 25.0
"""The same for work that compiles, allocates or reads a model the first time: an alarm within 30 s."""
SLOWER: Final = 4.0
"""A wait for a part is a stall if it lasts this many times its median, and longer than PATIENCE_SECONDS."""
BEAT_SECONDS: Final = 2.0
"""Seconds between two heartbeats of an actor."""

HELD: Final = "that would become too old"
"""Note of the learner's wait while it holds back a full batch for groups that would otherwise be too old."""
ROOM_IN_WINDOW: Final = "room in the window"
SPACE_IN_LOG: Final = "space in the trajectory log"
ROOM: Final = "room"
"""The part that an actor waits for if a file cannot be written."""

Cure = Literal["", "restart", "end"]
"""What a launcher may do about a fault: restart the process or end the run; "" leaves it to a person."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a process.

    fault     name of the fault if a wait for it is a stall
    message   follows the process's name and precedes "for 12 s"
    patience  seconds after which a wait is a stall; None derives it from earlier waits
    """

    fault: str
    message: str
    remedy: str
    cure: Cure = "restart"
    patience: float | None = None


PARTS: Final[Mapping[str, Part]] = {
    "engine": Part("engine", "'s engine has not answered", "its log says more; a restart brings its prompts back"),
    "reward": Part(
        "reward",
        "'s reward function has not returned",
        "fix it, or lower reward.timeout_seconds to fail such groups",
        cure="",  # reward.timeout_seconds ends it, and fails only its group
    ),
    "rollout": Part("rollout", "'s rollout function has not returned", "fix rollout.function: it never stops waiting"),
    "harness": Part(
        "harness",
        "'s harness has neither called the model nor ended",
        "fix the agent, or lower rollout.options.timeout_seconds, which ends its sample",
        cure="",  # the time limit of the sample ends it and everything it started
    ),
    "load": Part("load", "'s engine has not loaded its weights", "a restart loads the newest version"),
    "folder": Part(
        "folder", " has been reading a weight folder", "check weights.directory or the connection to the bus"
    ),
    "step": Part("step", " has been in one training step", "check the GPUs, and the ranks in learner.log"),
    "backend": Part("backend", "'s backend has not answered", "check the GPUs, and the ranks in learner.log"),
    "disk": Part("disk", " has been writing a file", "check the disks of run.directory and weights.directory"),
    ROOM: Part(
        "no room",
        " has been waiting for a disk that cannot be written",
        "make room there, or make it writable: the run goes on by itself, and nothing is lost",
        cure="",  # a restart would find the same disk
        patience=1.0,  # no estimate needed: the disk has failed, and again a second later
    ),
    "start": Part(
        "start", " has been starting", "its log says how far it came; it may take ten times run.stall_seconds"
    ),
    "data": Part("data", "", ""),  # never a stall by its length; the end of a chain of waits
}
"""The parts of its own process that an actor can wait for."""


def stall_limit(usual: float, *, first: float) -> float:
    """Return the seconds after which a wait for a part is a stall.

    usual  median of past waits, 0 if none has ended
    first  limit until then
    """
    return max(PATIENCE_SECONDS, SLOWER * usual if usual else first)
