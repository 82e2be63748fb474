"""Who holds up whom, and why: from what the actors of a run say to findings with a cause and a remedy.

An actor that waits names a role ("rollout-worker") or a part of its own process ("engine"). A wait is a stall when its
chain ends in somebody who does not wait for anybody and yet does not go on:

  a process that is not heard of any more          frozen, blocked, silent, gone
  a part that takes longer than its limit          engine, reward, rollout, load, ...
  a role that nobody has                           no worker, no learner
  somebody who is in the chain already             window, log, deadlock
  data that has ended                              data

It is none when anybody at its end still works: a learner that waits while engines generate is only faster than they.
Findings name that end and say who waits for it. All ages are the receiver's: seconds on its own monotonic clock in
which it could hear (actors/watcher.py), so no clock of any machine can fake a stall or hide one.

Tests: tests/test_diagnosis.py, a table of faults and the name each must get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from asyncrl.messages import Heartbeat, Wait

PATIENCE_SECONDS: Final = 6.0
"""A wait for somebody is no stall before; with a beat (2 s) and a look (1 s) between, it is named within 10 s."""
FIRST_SECONDS: Final = 25.0
"""The same for work whose first time compiles, allocates or reads a model: an alarm within 30 s."""
SLOWER: Final = 4.0
"""A wait for a part that lasts this many times its median is a stall, if it is longer than PATIENCE_SECONDS."""
SILENT_SECONDS: Final = 6.0
"""An actor beats every 2 s."""
BUS_SECONDS: Final = 5.0
BURIED: Final = 3
"""So many groups buried in a row are no accident of one prompt."""
CLOCK_SECONDS: Final = 5.0

LEARNER: Final = "learner"
WORKER: Final = "rollout-worker"
PROMPT_SOURCE: Final = "prompt-source"
FOLLOWER: Final = "weight-follower"
SENDER: Final = "weight-sender"

ROOM_IN_WINDOW: Final = "room in the window"
SPACE_IN_LOG: Final = "space in the trajectory log"

Process = Literal["", "running", "stopped", "gone"]
"""What the machine says of a process: "" of another machine's."""
Cure = Literal["", "restart", "end"]
"""What a launcher may do about a finding: start the process again, end the run; "" leaves it to a person."""


@dataclass(frozen=True, slots=True)
class Part:
    """``says`` follows the process's name and stands before "for 12 s"."""

    fault: str
    says: str
    remedy: str


PARTS: Final[Mapping[str, Part]] = {
    "engine": Part("engine", "'s engine has not answered", "its log says more; a restart brings its prompts back"),
    "reward": Part(
        "reward", "'s reward function has not returned", "mend it, or lower reward.timeout_seconds to bury such groups"
    ),
    "rollout": Part("rollout", "'s rollout function has not returned", "mend rollout.function: it waits without end"),
    "load": Part("load", "'s engine has not loaded its weights", "a restart loads the newest version"),
    "folder": Part("folder", " has read a weight folder", "see to the disk or share of weights.directory"),
    "step": Part("step", " has been in one training step", "see the GPUs and the ranks of learner.log"),
    "backend": Part("backend", "'s backend has not answered", "see the GPUs and the ranks of learner.log"),
    "disk": Part("disk", " has written a file", "see to the disk of run.directory and weights.directory"),
    "start": Part("start", " has been starting", "its log says how far it came"),
    "data": Part("data", "", ""),  # no length of this wait is a stall; a chain that ends here is
}
"""What an actor of the same process can wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One actor. ``seconds``: since its last beat was heard."""

    beat: Heartbeat
    seconds: float = 0.0
    process: Process = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a watcher knows.

    bus_silent   seconds since the bus last answered;  bus_refuses: since it last stored something;  bus_problem: why
    listened     seconds that the watcher has heard
    """

    actors: Mapping[str, Seen]
    listened: float
    bus_silent: float = 0.0
    bus_refuses: float = 0.0
    bus_problem: str = ""
    bus_process: Process = ""
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault and what follows from it.

    fault    its name;  actor: whose it is
    cause    a sentence;  remedy: another;  victims: sentences on who waits for it
    usual    seconds that this usually takes; 0: unknown; None: no length of it is usual
    host, pid  of the process to blame; pid 0: none
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

    @property
    def key(self) -> tuple[str, str]:
        """The same for the same fault at another time."""
        return (self.fault, self.actor)

    def is_hopeless(self, stall_seconds: float) -> bool:
        """Whether it has lasted too long to heal by itself.

        A process that beats may only be slow: more than ten times what is usual, or, while nothing is known to be
        usual, ten times ``stall_seconds``.
        """
        if self.usual is None:
            return self.seconds > stall_seconds
        return self.seconds > (max(stall_seconds, 10 * self.usual) if self.usual else 10 * stall_seconds)

    @property
    def text(self) -> str:
        return "; ".join((*self.victims, self.cause))


def limit(usual: float, *, first: float) -> float:
    """Seconds after which a wait for a part is a stall. ``usual``: its median in the past, 0 when none has ended."""
    return max(PATIENCE_SECONDS, SLOWER * usual if usual else first)


def diagnose(observation: Observation) -> list[Finding]:
    """Every fault, what holds up the learner first. Empty: the run goes on."""
    seen = observation
    if seen.bus_silent > BUS_SECONDS:
        return [_deaf(seen)]  # nothing can be known of anybody
    if seen.bus_refuses > BUS_SECONDS:
        return [_refused(seen)]
    if seen.is_finished:
        return []
    chains = _Chains(seen)
    found = {finding.key: finding for finding in (*chains.silent(), *chains.stuck(), *chains.ends())}
    found |= {finding.key: finding for finding in chains.missing() if finding.key not in found}
    blamed = [chains.with_victims(finding) for finding in found.values()]
    return [*sorted(blamed, key=lambda finding: (not finding.victims, finding.key)), *_idle(seen), *_clocks(seen)]


# -- the bus -----------------------------------------------------------------------------------------------------------


def _deaf(seen: Observation) -> Finding:
    why = {"stopped": "its process is stopped (SIGSTOP)", "gone": "its process has ended"}.get(seen.bus_process, "")
    why = why or seen.bus_problem or "frozen, cut off, or its machine is gone"
    return Finding(
        fault="bus",
        actor="nats-server",
        cause=f"nats-server has not answered for {_seconds(seen.bus_silent)}: {why}",
        remedy="start it again on its port and store: everybody waits, and nothing is lost",
        seconds=seen.bus_silent,
        cure="restart",
    )


def _refused(seen: Observation) -> Finding:
    return Finding(
        fault="bus storage",
        actor="nats-server",
        cause=f"nats-server answers but has stored nothing for {_seconds(seen.bus_refuses)}: "
        f"{seen.bus_problem or 'no answer to what is published'}",
        remedy="make room on the disk of its store: everybody waits, and nothing is lost; its log says more",
        seconds=seen.bus_refuses,
    )


# -- chains ------------------------------------------------------------------------------------------------------------

_Key = tuple[str, str]
_Path = tuple[tuple[str, Wait], ...]
_CYCLES: Final = ("window", "log", "deadlock")


@dataclass(slots=True)
class _Chains:
    """Follows waits through one observation."""

    observation: Observation
    _ends: dict[_Key, Finding] = field(default_factory=dict)
    _known: dict[str, frozenset[_Key]] = field(default_factory=dict)

    @property
    def actors(self) -> Mapping[str, Seen]:
        return self.observation.actors

    def silent(self) -> Iterable[Finding]:
        """One finding a process that is not heard of."""
        for name, seen in self.actors.items():
            if _is_silent(seen) and name == self._main(seen):
                yield _silent(self._label(name), name, seen)

    def stuck(self) -> Iterable[Finding]:
        """One finding a part that takes longer than it may."""
        for name, seen in self.actors.items():
            if not _is_silent(seen):
                yield from (self._stuck(name, seen, wait) for wait in seen.beat.waits if _is_stuck(wait))

    def ends(self) -> Iterable[Finding]:
        """What else chains end in."""
        for name in self.actors:
            self._known[name] = self._roots(name, ()) or frozenset()
        last = frozenset().union(*self._known.values())
        return [finding for key, finding in self._ends.items() if key in last]

    def missing(self) -> Iterable[Finding]:
        """A run without a learner stands still, or soon will, whoever waits for it."""
        has_learner = any(seen.beat.role == LEARNER for seen in self.actors.values())
        if not has_learner and self.observation.listened > PATIENCE_SECONDS:
            yield _nobody(LEARNER, self.observation.listened)

    def with_victims(self, finding: Finding) -> Finding:
        """The finding with who waits for it: the learner, then workers, by name."""
        waiting = []
        for name, seen in sorted(self.actors.items(), key=lambda item: (item[1].beat.role != LEARNER, item[0])):
            if seen.beat.role not in (LEARNER, WORKER) or (finding.pid and _process(seen) == _blamed(finding)):
                continue
            if finding.key in self._known[name]:
                waiting.append(f"{self._label(name)} waits for {_longest_for_another(seen.beat)}")
        if len(waiting) > 2:
            waiting = [waiting[0], f"{len(waiting) - 1} others wait too"]
        return replace(finding, victims=tuple(waiting))

    def _roots(self, name: str, path: _Path) -> frozenset[_Key] | None:
        """What holds up this actor for good; None when it, or somebody it waits for, still works."""
        seen = self.actors[name]
        if _is_silent(seen):
            main = self._main(seen)
            return frozenset({(_silence(seen), main)})
        waits = [wait for wait in seen.beat.waits if wait.on]
        if not waits:
            return None
        found: set[_Key] = set()
        for wait in waits:
            roots = self._roots_of_wait(name, seen, wait, path)
            if roots is None:
                return None
            found |= roots
        return _without_echoes(found)

    def _roots_of_wait(self, name: str, seen: Seen, wait: Wait, path: _Path) -> frozenset[_Key] | None:
        path = (*path, (name, wait))
        if wait.on == "data":  # that nobody else waits for it is how a run ends
            return self._end(_ended(path[0][1].seconds, *self._blame(LEARNER))) if len(path) > 1 else None
        if wait.on in PARTS:
            return frozenset({self._stuck(name, seen, wait).key}) if _is_stuck(wait) else None
        if wait.seconds + seen.seconds <= PATIENCE_SECONDS:
            return None
        candidates = [other for other, its in self.actors.items() if its.beat.role == wait.on and other != name]
        if not candidates:
            return self._end(_nobody(wait.on, wait.seconds + seen.seconds)) if wait.on != FOLLOWER else None
        found: set[_Key] = set()
        for other in candidates:
            position = next((i for i, (passed, _) in enumerate(path) if passed == other), None)
            roots = self._roots(other, path) if position is None else self._cycle(path[position:])
            if roots is None:
                return None
            found |= roots
        return _without_echoes(found)

    def _cycle(self, path: _Path) -> frozenset[_Key]:
        whats = {wait.what for _, wait in path}
        who = "; ".join(f"{self._label(name)} waits for {wait.what}" for name, wait in path)
        fault = "log" if SPACE_IN_LOG in whats else "window" if ROOM_IN_WINDOW in whats else "deadlock"
        return self._end(_circle(fault, who, min(wait.seconds for _, wait in path), *self._blame(LEARNER)))

    def _end(self, finding: Finding) -> frozenset[_Key]:
        self._ends.setdefault(finding.key, finding)
        return frozenset({finding.key})

    def _stuck(self, name: str, seen: Seen, wait: Wait) -> Finding:
        part = PARTS[wait.on]
        main = self._main(seen)
        lasts = wait.seconds + seen.seconds
        problem = f" ({seen.beat.problem})" if seen.beat.problem else ""
        usual = f"; usually {_seconds(wait.usual)}" if wait.usual else ""
        return Finding(
            fault=part.fault,
            actor=main,
            cause=f"{self._label(main)}{part.says} for {_seconds(lasts)} ({wait.what}{usual}){problem}",
            remedy=part.remedy,
            seconds=lasts,
            usual=wait.usual,
            cure="restart",
            host=seen.beat.host,
            pid=seen.beat.pid,
        )

    def _main(self, seen: Seen) -> str:
        """The actor that gives its process the name: the learner or the worker in it."""
        names = [name for name, other in self.actors.items() if _process(other) == _process(seen)]
        return min(names, key=lambda name: (self.actors[name].beat.role not in (LEARNER, WORKER), name))

    def _label(self, name: str) -> str:
        return f"worker {name}" if self.actors[name].beat.role == WORKER else name

    def _blame(self, role: str) -> tuple[str, int]:
        """(host, pid) of the first process with this role."""
        beats = [seen.beat for seen in self.actors.values() if seen.beat.role == role]
        return (beats[0].host, beats[0].pid) if beats else ("", 0)


def _without_echoes(keys: set[_Key]) -> frozenset[_Key]:
    """A circle, or data that has ended, is what a fault elsewhere leaves everybody else in."""
    causes = {key for key in keys if key[0] not in (*_CYCLES, "data")}
    return frozenset(causes or keys)


def _is_silent(seen: Seen) -> bool:
    return seen.seconds > SILENT_SECONDS


def _is_stuck(wait: Wait) -> bool:
    return 0 < wait.limit < wait.seconds


def _process(seen: Seen) -> tuple[str, int]:
    return (seen.beat.host, seen.beat.pid)


def _blamed(finding: Finding) -> tuple[str, int]:
    return (finding.host, finding.pid)


def _longest_for_another(beat: Heartbeat) -> str:
    return next((wait.what for wait in beat.waits if wait.on not in PARTS), beat.waits_for)


def _silence(seen: Seen) -> str:
    return {"stopped": "frozen", "gone": "gone", "running": "blocked", "": "silent"}[seen.process]


def _silent(label: str, name: str, seen: Seen) -> Finding:
    beat, lasts = seen.beat, _seconds(seen.seconds)
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
            "see to that machine; its prompts go to other workers after bus.ack_seconds",
        ),
    }[_silence(seen)]
    return Finding(
        fault=_silence(seen),
        actor=name,
        cause=f"{label} {cause} (process {beat.pid} on {beat.host})",
        remedy=remedy,
        seconds=seen.seconds,
        cure="restart",
        host=beat.host,
        pid=beat.pid,
    )


def _nobody(role: str, seconds: float) -> Finding:
    if role == WORKER:
        return Finding(
            fault="no worker",
            actor=WORKER,
            cause="there is no rollout worker",
            remedy="start one: asyncrl rollout-worker RUN.toml --set bus.url=...; if they end at once, their logs say "
            "why",
            seconds=seconds,
            cure="end",
        )
    return Finding(
        fault="no learner",
        actor=LEARNER,
        cause="there is no learner",
        remedy="start it: asyncrl learner RUN.toml --resume",
        seconds=seconds,
        cure="end",
    )


def _circle(fault: str, who: str, seconds: float, host: str, pid: int) -> Finding:
    cause, remedy, cure = _CIRCLES[fault]
    return Finding(
        fault=fault, actor="run", cause=f"{cause}: {who}", remedy=remedy, seconds=seconds, cure=cure, host=host, pid=pid
    )


_CIRCLES: Final[Mapping[str, tuple[str, str, Cure]]] = {
    "window": (
        "the window is full of groups that nobody works on",
        "prompts lent to a worker that died come again after bus.ack_seconds; what the bus lost is published again by "
        "a learner that is started with --resume",
        "restart",
    ),
    "log": (
        "the trajectory log is full before a batch is in it",
        "raise bus.max_log_bytes or lower checkpoint.every_steps",
        "end",
    ),
    "deadlock": ("everybody waits for somebody else", "start the learner again with --resume", "restart"),
}


def _ended(seconds: float, host: str, pid: int) -> Finding:
    return Finding(
        fault="data",
        actor="run",
        cause="the data has ended, and groups that would fill the last batch do not come back",
        remedy="a learner that is started with --resume publishes them again; or raise data.epochs",
        seconds=seconds,
        cure="restart",
        host=host,
        pid=pid,
    )


# -- busy for nothing --------------------------------------------------------------------------------------------------


def _idle(seen: Observation) -> Iterable[Finding]:
    """The learner gets groups and none that it can train."""
    for name, actor in seen.actors.items():
        numbers, problem = actor.beat.numbers, actor.beat.problem
        if actor.beat.role != LEARNER:
            continue
        if (count := numbers.get("learner/buried_in_a_row", 0.0)) >= BURIED:
            yield Finding(
                fault="buried",
                actor=name,
                cause=f"the last {count:.0f} groups were all buried; the newest because: {problem or 'unknown'}",
                remedy="mend what buries them; the run ends by itself when too many are buried in a row",
            )
        for word, why, remedy in (
            ("filtered", "filtered out (algorithm.filters)", "the task is too easy or too hard: all rewards are equal"),
            ("dropped", "dropped as too stale", "raise staleness.max_staleness, or generate shorter answers"),
        ):
            count = numbers.get(f"learner/{word}_since_step", 0.0)
            if count > 4 * max(1.0, numbers.get("learner/window", 0.0)):
                cause = f"{count:.0f} groups were {why} since the last step, and none is left to train"
                yield Finding(fault=word, actor=name, cause=cause, remedy=remedy)


def _clocks(seen: Observation) -> Iterable[Finding]:
    """Nothing waits for a clock; but times in logs and metrics are off."""
    hosts: dict[str, float] = {}
    for actor in seen.actors.values():
        if abs(actor.beat.clock_shift) > CLOCK_SECONDS:
            hosts.setdefault(actor.beat.host, actor.beat.clock_shift)
    for host, shift in sorted(hosts.items()):
        yield Finding(
            fault="clock",
            actor=host,
            cause=f"the clock of {host} jumped by {shift:+.0f} s",
            remedy="nothing waits for it; times in logs and metrics are off by as much",
        )


# -- words -------------------------------------------------------------------------------------------------------------


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
