"""The faults of a run: their names, descriptions and remedies, and what a launcher may do about them.

This module holds words and numbers; diagnosis.py decides which fault it is. To add a fault, add a function here (or a
row of PARTS), a rule there, and a row of the table in tests/unit/policies/health/test_diagnosis.py.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from asyncrl.messages import Heartbeat, Wait

PATIENCE_SECONDS: Final = 6.0
"""A shorter wait for an actor is no stall. With a heartbeat (2 s) and a look (1 s) in between, a stall is named within
10 s."""
FIRST_SECONDS: Final = 25.0
"""The same for work that compiles, allocates or reads a model the first time: an alarm within 30 s."""
SLOWER: Final = 4.0
"""A wait for a part is a stall if it lasts this many times its median, and longer than PATIENCE_SECONDS."""
BEAT_SECONDS: Final = 2.0
"""Seconds between two heartbeats of an actor."""
SILENT_SECONDS: Final = 6.0
BUS_SECONDS: Final = 5.0
MANY_FAILED: Final = 3
"""This many failed groups in a row are not an accident of one prompt."""
_REORDERING: Final = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Unicode's classes of characters that reorder the text after them."""
LEARNER: Final = "learner"
LEARNER_RANK: Final = "learner-rank"
"""Another rank of the learner, in its own process. It is not an actor: the learner speaks for all ranks."""
WORKER: Final = "rollout-worker"
EVALUATION_WORKER: Final = "evaluation-worker"
PROMPT_SOURCE: Final = "prompt-source"
FOLLOWER: Final = "weight-follower"
SENDER: Final = "weight-sender"
LEARNERS_ACTORS: Final = {"learner": LEARNER, "prompts": PROMPT_SOURCE, "weights": SENDER}
"""Names and roles of the actors of the learner's process; no other process has them."""

HELD: Final = "that would become too old"
SETTINGS: Final = "process/settings"
"""Number in the heartbeat of each process: checksum of the settings that all processes of the run must share."""
QUARANTINED: Final = "quarantined"
"""Phase of a worker."""
ROOM_IN_WINDOW: Final = "room in the window"
ROOM: Final = "room"
"""The part that an actor waits for if a file cannot be written."""
SPACE_IN_LOG: Final = "space in the trajectory log"

Process = Literal["", "running", "stopped", "gone"]
"""State of a process according to its machine; "" if it runs on another machine."""
Cure = Literal["", "restart", "end"]
"""What a launcher may do about a finding: restart the process or end the run; "" leaves it to a person."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a process. ``says`` follows the process's name and precedes "for 12 s"."""

    fault: str
    says: str
    remedy: str
    cure: Cure = "restart"
    patience: float | None = None
    """Seconds after which a wait is a stall; None derives it from earlier waits."""


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
    "data": Part("data", "", ""),  # never a stall by its length; a chain that ends here is one
}
"""The parts of its own process that an actor can wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One actor as the watcher sees it.

    seconds  seconds since its last heartbeat was received
    """

    beat: Heartbeat
    seconds: float = 0.0
    process: Process = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a watcher knows.

    listened      seconds during which the watcher could receive
    leaderless    seconds since a learner's last heartbeat; infinite if there was none
    bus_silent    seconds since the bus last answered
    bus_refuses   seconds since the bus last stored something;  bus_problem: why
    own_roles     roles of processes that this launcher keeps running and that have worked; one that is not heard is
                  ending or hidden
    """

    actors: Mapping[str, Seen]
    listened: float
    leaderless: float = math.inf
    bus_silent: float = 0.0
    bus_refuses: float = 0.0
    bus_problem: str = ""
    bus_process: Process = ""
    is_finished: bool = False
    own_roles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault and its consequences.

    fault     name of the fault;  actor: whose fault it is;  cause, remedy: a sentence each
    victims   sentences on who waits for it
    usual     seconds that this usually takes; 0: unknown; None: no duration is usual
    host, pid  the process to blame; pid 0: none
    which     distinguishes findings of the same fault and actor
    is_joint  whether it is concluded from the waits of several actors, which may be older than the fault; the watcher
              counts how long it lasts
    """

    fault: str
    actor: str
    cause: str
    remedy: str
    seconds: float = 0.0
    victims: tuple[str, ...] = ()
    usual: float | None = None
    cure: Cure = ""
    host: str = ""
    pid: int = 0
    which: str = ""
    is_joint: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Key that stays the same for the same fault at another time."""
        return (self.fault + self.which, self.actor)

    def is_hopeless(self, stall_seconds: float) -> bool:
        """Return whether the fault has lasted too long to heal by itself.

        The limit is ``stall_seconds`` if ``usual`` is None. A process that sends heartbeats may only be slow, so its
        limit is ten times the usual duration (at least ``stall_seconds``), or ten times ``stall_seconds`` if the usual
        duration is unknown.
        """
        if self.usual is None:
            return self.seconds > stall_seconds
        return self.seconds > (max(stall_seconds, 10 * self.usual) if self.usual else 10 * stall_seconds)

    @property
    def text(self) -> str:
        return "; ".join((*self.victims, self.cause))


def limit(usual: float, *, first: float) -> float:
    """Return the seconds after which a wait for a part is a stall.

    usual  median of past waits, 0 if none has ended
    first  limit until then
    """
    return max(PATIENCE_SECONDS, SLOWER * usual if usual else first)


# -- the bus -----------------------------------------------------------------------------------------------------------


def deaf(seen: Observation) -> Finding:
    why = {"stopped": "its process is stopped (SIGSTOP)", "gone": "its process has ended"}.get(seen.bus_process, "")
    why = why or seen.bus_problem or "frozen, cut off, or its machine is gone"
    return Finding(
        fault="bus",
        actor="nats-server",
        cause=f"nats-server has not answered for {in_words(seen.bus_silent)}: {why}",
        remedy="restart it on the same port and store: all processes wait for it, and nothing is lost",
        seconds=seen.bus_silent,
        cure="restart",
    )


def refused(seen: Observation) -> Finding:
    return Finding(
        fault="bus storage",
        actor="nats-server",
        cause=f"nats-server answers but has stored nothing for {in_words(seen.bus_refuses)}: "
        f"{seen.bus_problem or 'published messages are not acknowledged'}",
        remedy="make room on the disk of its store, then restart it: all processes wait for it, and nothing is lost",
        seconds=seen.bus_refuses,
        cure="restart",  # free space alone does not heal it
    )


# -- processes and chains ----------------------------------------------------------------------------------------------


def stuck(label: str, name: str, seen: Seen, wait: Wait) -> Finding:
    """A wait for a part of the process of ``name`` exceeds its limit."""
    part = PARTS[wait.on]
    lasts = wait.seconds + seen.seconds
    problem = f" ({seen.beat.problem})" if seen.beat.problem else ""
    usual = f"; usually {in_words(wait.usual)}" if wait.usual else ""
    return Finding(
        fault=part.fault,
        actor=name,
        cause=f"{label}{part.says} for {in_words(lasts)} ({wait.what}{usual}){problem}",
        remedy=part.remedy,
        seconds=lasts,
        usual=wait.usual,
        cure=part.cure,
        host=seen.beat.host,
        pid=seen.beat.pid,
    )


def silence(seen: Seen) -> str:
    return {"stopped": "frozen", "gone": "gone", "running": "blocked", "": "silent"}[seen.process]


def silent(label: str, name: str, seen: Seen) -> Finding:
    beat, lasts = seen.beat, in_words(seen.seconds)
    cause, remedy = {
        "frozen": (f"is stopped (SIGSTOP) and has not been heard of for {lasts}", f"kill -CONT {beat.pid}"),
        "gone": (f"has not been heard of for {lasts}: its process has ended", "start it again; its log says why"),
        "blocked": (
            f"has not been heard of for {lasts} though its process is there: its event loop is blocked or its "
            "connection to the bus is dead",
            "a restart loses nothing; look for blocking calls in the reward and rollout functions",
        ),
        "silent": (
            f"has not been heard of for {lasts}: frozen, cut off, or its machine is gone",
            "check that machine; its prompts go to other workers after bus.ack_seconds",
        ),
    }[silence(seen)]
    return Finding(
        fault=silence(seen),
        actor=name,
        cause=f"{label} {cause} (process {beat.pid} on {beat.host})",
        remedy=remedy,
        seconds=seen.seconds,
        cure="restart",
        host=beat.host,
        pid=beat.pid,
    )


def nobody(role: str, seconds: float) -> Finding:
    """``role`` is missing although an actor waits for it; parts of the learner's process count as the learner."""
    role = role if role in MISSING else LEARNER
    fault, cause, remedy, cure = MISSING[role]
    return Finding(fault=fault, actor=role, cause=cause, remedy=remedy, seconds=seconds, cure=cure, is_joint=True)


MISSING: Final[Mapping[str, tuple[str, str, str, Cure]]] = {
    LEARNER: ("no learner", "there is no learner", "start it: asyncrl learner RUN.toml --resume", "end"),
    WORKER: (
        *("no worker", "there is no rollout worker"),
        "start one: asyncrl rollout-worker RUN.toml --set bus.url=...; if they end at once, their logs say why",
        "end",
    ),
}


# -- what an actor reports about itself --------------------------------------------------------------------------------


def quarantined(seen: Observation) -> Iterable[Finding]:
    """Yield the workers that wait for the end of the run because the learner does not train their groups."""
    for name, actor in seen.actors.items():
        if actor.beat.phase == QUARANTINED and actor.seconds <= SILENT_SECONDS:
            yield Finding(
                fault="quarantine",
                actor=name,
                cause=f"worker {name} is quarantined: {actor.beat.problem}",
                remedy="fix and restart it: the learner judges a new process from scratch; or check "
                "learner.quarantine_mismatch",
                seconds=actor.beat.waiting_seconds,
                host=actor.beat.host,
                pid=actor.beat.pid,
            )


def other_settings(seen: Observation) -> Iterable[Finding]:
    """Yield the workers that were started with other settings of the run than its learner."""
    heard = {name: actor for name, actor in seen.actors.items() if actor.seconds <= SILENT_SECONDS}
    settings = {actor.beat.numbers.get(SETTINGS) for actor in heard.values() if actor.beat.role == LEARNER}
    for name, actor in heard.items():
        own = actor.beat.numbers.get(SETTINGS)
        if own is not None and settings and own not in settings:
            yield Finding(
                fault="other settings",
                actor=name,
                cause=f"worker {name} was started with other settings, or another version of asyncrl, than the learner",
                remedy="restart it with the learner's run file: [reward], rollout.function, [staleness] and "
                "weights.channel must be the same",
                host=actor.beat.host,
                pid=actor.beat.pid,
            )


def idle(seen: Observation) -> Iterable[Finding]:
    """Yield the reasons why the learner receives groups but none that it can train."""
    for name, actor in seen.actors.items():
        numbers, problem = actor.beat.numbers, actor.beat.problem
        if actor.beat.role != LEARNER:
            continue
        if (count := numbers.get("learner/failed_in_a_row", 0.0)) >= MANY_FAILED:
            yield Finding(
                fault="failed",
                actor=name,
                cause=f"the last {count:.0f} groups were all failed; the newest because: {problem or 'unknown'}",
                remedy="fix what makes them fail; the run ends by itself when too many fail in a row",
            )
        for word, why, remedy in (
            ("filtered", "filtered out (algorithm.filters)", "the task is too easy or too hard: all rewards are equal"),
            ("dropped", "dropped as too stale", "raise staleness.max_staleness, or generate shorter answers"),
        ):
            count = numbers.get(f"learner/{word}_since_step", 0.0)
            if count > 4 * max(1.0, numbers.get("learner/window", 0.0)):
                cause = f"{count:.0f} groups were {why} since the last step, and none is left to train"
                yield Finding(fault=word, actor=name, cause=cause, remedy=remedy)


def printable(text: str) -> str:
    """Replace unprintable characters: text from an actor is not trusted and must not control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_text(text: str) -> str:
    """Replace characters in the text of a model that would control a terminal or reorder the text after them."""
    return "".join(letter if _is_text(letter) else "?" for letter in text)


def _is_text(letter: str) -> bool:
    """Whether the letter is shown: printable, a newline or tab, or a space or joiner of another script."""
    return (
        letter.isprintable()
        or letter in "\n\t"
        or (unicodedata.category(letter) in ("Zs", "Cf") and unicodedata.bidirectional(letter) not in _REORDERING)
    )


def in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{max(seconds, 0.1):.1f} s"
