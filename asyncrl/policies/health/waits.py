"""What an actor may wait for, and how long until the wait counts as a stall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

PATIENCE_SECONDS: Final = 6.0
"""A shorter wait for an actor is no stall."""
SLOWER: Final = 4.0
"""A wait for a part is a stall if it lasts this many times what is usual, and longer than LEAST_SECONDS."""
LEAST_SECONDS: Final = 10.0
"""With a heartbeat (2 s) and a poll (1 s) in between, a stall is named within 15 s."""
LEAST_WAITS: Final = 3
"""Fewer past waits do not tell what is usual."""
UNKNOWN_SECONDS: Final = 300.0
"""Limit of a wait while nothing tells what is usual: on a slow machine, a start, a first step or a first answer may
take minutes, and nothing is wrong."""
BEAT_SECONDS: Final = 2.0
"""Seconds between two heartbeats of an actor."""

STRAGGLERS: Final = "that would become too old"
"""Note of the learner's wait while it holds back a full batch for groups that would otherwise be too old."""
ROOM_IN_WINDOW: Final = "room in the window"
SPACE_IN_LOG: Final = "space in the trajectory log"
ROOM: Final = "room"
"""The part that an actor waits for if a file cannot be written."""
SERVICE: Final = "service"
"""The part that a worker waits for if a service is away that its reward or rollout function needs."""

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
    "engine": Part(
        "engine", "'s engine has not answered", "look at its log; if it stays so, it is restarted and loses no prompt"
    ),
    "reward": Part(
        "reward",
        "'s reward function has not returned",
        "look at what it waits for, or lower reward.timeout_seconds to fail such groups",
        cure="",  # reward.timeout_seconds ends it, and fails only its group
    ),
    "rollout": Part("rollout", "'s rollout function has not returned", "look at what rollout.function waits for"),
    "harness": Part(
        "harness",
        "'s harness has neither called the model nor ended",
        "look at what the agent does, or lower rollout.options.timeout_seconds, which ends its sample",
        cure="",  # the time limit of the sample ends it and everything it started
    ),
    SERVICE: Part(
        "no service",
        " has been waiting for a service that is away",
        "start that service again, or correct its address: the run goes on by itself, and nothing is lost",
        cure="",  # a restart would find the same service
        patience=PATIENCE_SECONDS,
    ),
    "load": Part("load", "'s engine has not loaded its weights", "look at its log; if it stays so, it is restarted"),
    "folder": Part(
        "folder", " has been reading a weight folder", "check weights.directory or the connection to the bus"
    ),
    "step": Part(
        "step",
        " has been in one training step",
        "look at learner.log; if it stays so, it is restarted from its checkpoint",
    ),
    "backend": Part(
        "backend",
        "'s backend has not answered",
        "look at learner.log; if it stays so, it is restarted from its checkpoint",
    ),
    "disk": Part("disk", " has been writing a file", "check the disks of run.directory and weights.directory"),
    "after_write": Part(
        "after_write",
        "'s function weights.after_write has not returned",
        "look at what it waits for: engines load no newer weights before",
        cure="",  # it would be called again, and take as long
    ),
    ROOM: Part(
        "no room",
        " has been waiting for a disk that cannot be written",
        "make room there, or make it writable: the run goes on by itself, and nothing is lost",
        cure="",  # a restart would find the same disk
        patience=1.0,  # no estimate needed: the disk has failed, and again a second later
    ),
    "start": Part(
        "start", " has been starting", "the end of its log says what it does; if it stays so, it is restarted"
    ),
    "data": Part("data", "", ""),  # never a stall by its length; the end of a chain of waits
}
"""The parts of its own process that an actor can wait for."""


def usual_seconds(past: Sequence[float]) -> float:
    """Return how long a wait takes at most, as a rule: the second longest of past waits. 0 if too few tell.

    Not the longest, because one hang that healed must not make the next one look usual; and not the median, because a
    short prompt says nothing about a long one.
    """
    return sorted(past)[-2] if len(past) >= LEAST_WAITS else 0.0


def stall_limit(usual: float) -> float:
    """Return the seconds after which a wait for a part is a stall.  usual: 0 if it is not known yet"""
    return max(LEAST_SECONDS, SLOWER * usual) if usual else UNKNOWN_SECONDS
