"""The faults of a run: what is observed, and what is said about it; diagnosis.py decides which fault it is.

To add a fault, add a function here (or a row of PARTS or CONDITIONS), a rule in diagnosis.py, and a row of the table in
tests/unit/policies/health/test_diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from asyncrl.logs import in_words
from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.roles import LEARNER, QUARANTINED, WORKER
from asyncrl.policies.health.waits import PARTS, UNKNOWN_SECONDS, Cure

SILENT_SECONDS: Final = 6.0
BUS_SECONDS: Final = 5.0
MANY_FAILED: Final = 3
"""This many failed groups in a row are not an accident of one prompt."""
TIME: Final = "this costs time, not correctness"
SETTINGS: Final = "process/settings"
"""Number in the heartbeat of each process: checksum of the settings that all processes of the run must share."""

Process = Literal["", "running", "stopped", "gone"]
"""State of a process according to its machine; "" if it runs on another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatus:
    """One actor as the health monitor sees it.  seconds: since its last heartbeat was received"""

    beat: Heartbeat
    seconds: float = 0.0
    process: Process = ""

    @property
    def is_silent(self) -> bool:
        """Whether its heartbeats have stopped. A process that starts may import or compile for long without any."""
        is_starting = self.beat.phase == "starting" and self.process in ("", "running")
        return self.seconds > (UNKNOWN_SECONDS if is_starting else SILENT_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a health monitor knows.

    listened      seconds during which it could receive
    leaderless    seconds of them since there was a learner
    bus_silent    seconds since the bus last answered
    bus_refuses   seconds since the bus last stored something;  bus_problem: why
    own_roles     roles of processes that this launcher keeps running and that have worked; one that is not heard is
                  ending
    """

    actors: Mapping[str, ActorStatus]
    listened: float
    leaderless: float = 0.0
    bus_silent: float = 0.0
    bus_refuses: float = 0.0
    bus_problem: str = ""
    is_finished: bool = False
    own_roles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault and its consequences.

    fault      name of the fault;  actor: whose fault it is;  cause, cost, remedy: a sentence each
    seconds    how long the wait or the silence has lasted; 0 if that is not known
    victims    sentences on who waits for it
    usual      seconds that this usually takes; 0: unknown; None: no duration is usual
    host, pid  the process, for the reader
    """

    fault: str
    actor: str
    cause: str
    remedy: str
    seconds: float = 0.0
    victims: tuple[str, ...] = ()
    usual: float | None = None
    cost: str = TIME
    cure: Cure = ""
    host: str = ""
    pid: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Key that stays the same for the same fault at another time."""
        return (self.fault, self.actor)

    def cure_seconds(self, stall_seconds: float) -> float:
        """Return for how long the fault must last before a launcher cures it.

        A process that sends heartbeats may only be slow, so it gets ten times the usual duration (at least
        ``stall_seconds``), or ten times ``stall_seconds`` if the usual duration is unknown.
        """
        if self.usual is None:
            return stall_seconds
        return max(stall_seconds, 10 * self.usual) if self.usual else 10 * stall_seconds

    @property
    def text(self) -> str:
        return "; ".join((*self.victims, self.cause))

    @property
    def line(self) -> str:
        """All that is said of it, in one line."""
        return f"{self.text}; {self.cost} -> {self.remedy}"


# -- the bus -----------------------------------------------------------------------------------------------------------


def bus_silent(seen: Observation) -> Finding:
    why = seen.bus_problem or "frozen, cut off, or its machine is gone"
    return Finding(
        fault="bus",
        actor="nats-server",
        cause=f"nats-server has not answered for {in_words(seen.bus_silent)}: {why}",
        remedy="restart it on the same port and store: all processes wait for it, and nothing is lost",
        seconds=seen.bus_silent,
        cure="restart",
    )


def bus_refuses(seen: Observation) -> Finding:
    return Finding(
        fault="bus storage",
        actor="nats-server",
        cause=f"nats-server answers but has stored nothing for {in_words(seen.bus_refuses)}: "
        f"{seen.bus_problem or 'published messages are not acknowledged'}",
        remedy="make room on the disk of its store, then restart it: all processes wait for it, and nothing is lost",
        seconds=seen.bus_refuses,
    )


# -- processes and chains ----------------------------------------------------------------------------------------------


def wait_timeout(label: str, process: str, seen: ActorStatus, wait: Wait) -> Finding:
    """A wait for a part of ``process`` exceeds its limit."""
    part = PARTS[wait.on]
    lasts = wait.seconds + seen.seconds
    problem = f" ({seen.beat.problem})" if seen.beat.problem else ""
    usual = f"; usually at most {in_words(wait.usual)}" if wait.usual else ""
    return Finding(
        fault=part.fault,
        actor=process,
        cause=f"{label}{part.message} for {in_words(lasts)} ({wait.what}{usual}){problem}",
        remedy=part.remedy,
        seconds=lasts,
        usual=wait.usual,
        cure=part.cure,
        host=seen.beat.host,
        pid=seen.beat.pid,
    )


SILENCE: Final[Mapping[Process, str]] = {"stopped": "frozen", "gone": "gone", "running": "blocked", "": "silent"}


def silent(label: str, process: str, seen: ActorStatus) -> Finding:
    beat, lasts = seen.beat, in_words(seen.seconds)
    fault = SILENCE[seen.process]
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
    }[fault]
    return Finding(
        fault=fault,
        actor=process,
        cause=f"{label} {cause} (process {beat.pid} on {beat.host})",
        remedy=remedy,
        seconds=seen.seconds,
        cure="restart",
        host=beat.host,
        pid=beat.pid,
    )


def role_missing(role: str) -> Finding:
    """An actor waits for ``role``, and there is none. Parts of the learner's process count as the learner."""
    if role == WORKER:
        fault, cause = "no worker", "there is no rollout worker"
        remedy = (
            "start one: `asyncrl rollout-worker RUN.toml --set bus.url=...`; if they end at once, their logs say why"
        )
    else:
        role, fault, cause = LEARNER, "no learner", "there is no learner"
        remedy = "wait if it is still starting; else start it: `asyncrl learner RUN.toml --resume`"
    return Finding(fault=fault, actor=role, cause=cause, remedy=remedy, cure="end")


def deadlock(who: str) -> Finding:
    """Actors wait for each other, or for data that has ended."""
    return Finding(
        fault="deadlock",
        actor=LEARNER,
        cause=f"nobody can go on: {who}",
        usual=0.0,  # prompts of a dead worker return to the others after bus.ack_seconds or rollout.reissue_seconds
        remedy="restart the learner with --resume, which publishes its open prompts again; where workers wait for "
        "space in the trajectory log, raise bus.max_log_bytes or lower checkpoint.every_steps",
        cure="restart",
    )


# -- what an actor reports about itself --------------------------------------------------------------------------------


def quarantined(seen: Observation) -> Iterable[Finding]:
    """Yield the workers that wait for the end of the run because the learner does not train their groups."""
    for name, actor in seen.actors.items():
        if actor.beat.phase == QUARANTINED and not actor.is_silent:
            yield Finding(
                fault="quarantine",
                actor=name,
                cause=f"worker {name} is quarantined: {actor.beat.problem}",
                cost="its answers are not trained",
                remedy="fix and restart it: the learner judges a new process from scratch",
                seconds=actor.beat.waiting_seconds,
                host=actor.beat.host,
                pid=actor.beat.pid,
            )


def other_settings(seen: Observation) -> Iterable[Finding]:
    """Yield the workers that were started with other settings of the run than its learner."""
    heard = {name: actor for name, actor in seen.actors.items() if not actor.is_silent}
    learners = [actor.beat.numbers for actor in heard.values() if actor.beat.role == LEARNER]
    settings = {numbers[SETTINGS] for numbers in learners if SETTINGS in numbers}  # one that starts has none yet
    for name, actor in heard.items():
        own = actor.beat.numbers.get(SETTINGS)
        if own is not None and settings and own not in settings:
            yield Finding(
                fault="other settings",
                actor=name,
                cause=f"worker {name} was started with other settings, code, or version of asyncrl than the learner",
                cost="its answers may be of another task than the others'",
                remedy="restart it with the learner's run file: [reward] and rollout.function with their code, "
                '[staleness] (if its bound is "auto", also learner.learning_rate) and weights.channel must be the same',
                host=actor.beat.host,
                pid=actor.beat.pid,
            )


def nothing_to_train(seen: Observation) -> Iterable[Finding]:
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
                cost="no step is made",
                remedy="fix what makes them fail; the run ends by itself when too many fail in a row",
            )
        for word, why, remedy in (
            ("filtered", "filtered out (algorithm.filters)", "the task is too easy or too hard: all rewards are equal"),
            ("dropped", "dropped as too stale", "raise staleness.max_staleness, or generate shorter answers"),
        ):
            count = numbers.get(f"learner/{word}_since_step", 0.0)
            if count > 4 * max(1.0, numbers.get("learner/window", 0.0)):
                cause = f"{count:.0f} groups were {why} since the last step, and none is left to train"
                yield Finding(fault=word, actor=name, cause=cause, cost="no step is made", remedy=remedy)
