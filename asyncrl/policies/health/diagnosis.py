"""Who holds up whom, and why: turns what the actors of a run report into findings with a cause and a remedy.

An actor that waits names a role ("rollout-worker") or a part of its own process ("engine"). A wait is a stall if its
chain ends in one of these:

  a process whose heartbeats have stopped          frozen, blocked, silent, gone
  a part that takes longer than its limit          engine, reward, rollout, load, ...
  a role that no process has                       no worker (quarantined: not counted), no learner
  an actor that is already in the chain            window, log, deadlock
  data that has ended                              data

A wait is not a stall while any actor at the end of its chain still works: a learner that waits for busy engines is only
faster than they are. Findings name the end of the chain and list who waits for it. All ages are measured by the
receiver: seconds on its own monotonic clock during which it could receive (actors/health_monitor.py). So a wrong clock
on any machine can neither fake nor hide a stall.

Tests: tests/unit/policies/health/test_diagnosis.py, a table of faults and the name each must get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from asyncrl.messages import Heartbeat, Wait
from asyncrl.policies.health import circles, conditions, faults
from asyncrl.policies.health.faults import (
    BUS_SECONDS,
    FOLLOWER,
    HELD,
    LEARNER,
    PARTS,
    PATIENCE_SECONDS,
    PROMPT_SOURCE,
    ROOM_IN_WINDOW,
    SENDER,
    SILENT_SECONDS,
    SPACE_IN_LOG,
    WORKER,
    Finding,
    Observation,
    Seen,
)


def diagnose(observation: Observation) -> list[Finding]:
    """Return all faults, those that hold up the learner first; empty if the run makes progress."""
    seen = observation
    if seen.is_finished:
        return []  # its server may be gone as well
    if seen.bus_silent > BUS_SECONDS:
        return [faults.deaf(seen)]  # without the bus, nothing is known about any actor
    if seen.bus_refuses > BUS_SECONDS:
        return [faults.refused(seen)]
    chains = _Chains(seen)
    found = {finding.key: finding for finding in (*chains.silent(), *chains.stuck(), *chains.ends())}
    found |= {finding.key: finding for finding in chains.missing() if finding.key not in found}
    blamed = [chains.with_victims(finding) for finding in found.values()]
    blamed.sort(key=lambda finding: (not finding.victims, finding.key))
    return [
        *blamed,
        *faults.quarantined(seen),
        *faults.idle(seen),
        *conditions.present(seen),
        *faults.other_settings(seen),
    ]


_Key = tuple[str, str]
_Path = tuple[tuple[str, Wait], ...]


@dataclass(slots=True)
class _Chains:
    """Follows waits through one observation."""

    observation: Observation
    _ends: dict[_Key, Finding] = field(default_factory=dict)
    _known: dict[str, frozenset[_Key]] = field(default_factory=dict)
    _by_role: dict[str, list[str]] = field(default_factory=dict)
    _mains: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def actors(self) -> Mapping[str, Seen]:
        return self.observation.actors

    def silent(self) -> Iterable[Finding]:
        """Yield one finding per process whose heartbeats have stopped."""
        for name, seen in self.actors.items():
            if _is_silent(seen) and name == self._main(seen):
                yield faults.silent(self._label(name), name, seen)

    def stuck(self) -> Iterable[Finding]:
        """Yield one finding per part that exceeds its limit."""
        for name, seen in self.actors.items():
            if not _is_silent(seen):
                yield from (self._stuck(name, seen, wait) for wait in seen.beat.waits if _is_stuck(wait))

    def ends(self) -> Iterable[Finding]:
        """Return the remaining findings at the ends of chains."""
        for name in self.actors:
            self._known[name] = self._roots(name, ()) or frozenset()
        last = frozenset().union(*self._known.values())
        return [finding for key, finding in self._ends.items() if key in last]

    def missing(self) -> Iterable[Finding]:
        """Report a missing learner: without it the run stands still, or soon will, whatever else makes progress."""
        has_learner = any(seen.beat.role == LEARNER for seen in self.actors.values())
        if not has_learner and self._is_learner_missed:
            yield faults.nobody(LEARNER, min(self.observation.listened, self.observation.leaderless))

    @property
    def _is_learner_missed(self) -> bool:
        """Whether the learner has been missing for too long; one that has just left may have ended its run."""
        seen = self.observation
        return LEARNER not in seen.own_roles and min(seen.listened, seen.leaderless) > PATIENCE_SECONDS

    def with_victims(self, finding: Finding) -> Finding:
        """Return the finding with the actors that wait for it: the learner, then workers, by name."""
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
        """Return what holds up this actor for good; None if it, or an actor that it waits for, still works."""
        seen = self.actors[name]
        if _is_silent(seen):
            main = self._main(seen)
            return frozenset({(faults.silence(seen), main)})
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
        if wait.on == "data":  # if no other actor waits for it, the run is ending normally
            return self._end(circles.ended(path[0][1].seconds, *self._blame(LEARNER))) if len(path) > 1 else None
        if wait.on in PARTS:
            return frozenset({self._stuck(name, seen, wait).key}) if _is_stuck(wait) else None
        if wait.seconds + seen.seconds <= PATIENCE_SECONDS:
            return None
        candidates = self._others(wait.on, name)
        if not candidates and wait.on in (PROMPT_SOURCE, SENDER):  # part of the learner, which may be starting
            candidates = self._others(LEARNER, name)
        if not candidates:
            if wait.on == FOLLOWER or wait.on in self.observation.own_roles:
                return None
            if wait.on != WORKER and not self._is_learner_missed:
                return None
            return self._end(faults.nobody(wait.on, wait.seconds + seen.seconds))
        found: set[_Key] = set()
        for other in candidates:
            position = next((i for i, (passed, _) in enumerate(path) if passed == other), None)
            roots = self._roots(other, path) if position is None else self._cycle(path[position:])
            if roots is None:
                return None
            found |= roots
        return _without_echoes(found)

    def _others(self, role: str, name: str) -> list[str]:
        if role not in self._by_role:
            self._by_role[role] = [other for other, seen in self.actors.items() if _is_at(role, seen)]
        return [other for other in self._by_role[role] if other != name]

    def _cycle(self, path: _Path) -> frozenset[_Key]:
        """Return the fault of a circle; nothing if a learner holds a full batch, because a hold ends by itself."""
        whats = {wait.what for _, wait in path}
        if any(what.endswith(HELD) for what in whats):
            return frozenset()
        fault = "log" if SPACE_IN_LOG in whats else "window" if ROOM_IN_WINDOW in whats else "deadlock"
        if (fault, "run") in self._ends:  # each of many workers may be in such a circle
            return frozenset({(fault, "run")})
        who = "; ".join(f"{self._label(name)} waits for {wait.what}" for name, wait in path)
        return self._end(circles.circle(fault, who, min(wait.seconds for _, wait in path), *self._blame(LEARNER)))

    def _end(self, finding: Finding) -> frozenset[_Key]:
        for seen in self.actors.values():
            if seen.beat.role == LEARNER:
                finding = circles.unanswered(finding, seen.beat.numbers)
        self._ends.setdefault(finding.key, finding)
        return frozenset({finding.key})

    def _stuck(self, name: str, seen: Seen, wait: Wait) -> Finding:
        main = self._main(seen)
        return faults.stuck(self._label(main), main, seen, wait)

    def _main(self, seen: Seen) -> str:
        """Return the actor after which the process is named: its learner or worker."""
        if not self._mains:
            by_rank = sorted((its.beat.role not in (LEARNER, WORKER), name) for name, its in self.actors.items())
            for _, name in by_rank:
                self._mains.setdefault(_process(self.actors[name]), name)
        return self._mains[_process(seen)]

    def _label(self, name: str) -> str:
        return f"worker {name}" if self.actors[name].beat.role == WORKER else name

    def _blame(self, role: str) -> tuple[str, int]:
        """Return (host, pid) of the first process with this role."""
        beats = [seen.beat for seen in self.actors.values() if seen.beat.role == role]
        return (beats[0].host, beats[0].pid) if beats else ("", 0)


def _without_echoes(keys: set[_Key]) -> frozenset[_Key]:
    """Drop circles and ended data if there are other faults, because those leave the other actors in them."""
    causes = {key for key in keys if key[0] not in circles.ECHOES}
    return frozenset(causes or keys)


def _is_silent(seen: Seen) -> bool:
    return seen.seconds > SILENT_SECONDS


def _is_at(role: str, seen: Seen) -> bool:
    return seen.beat.role == role and seen.beat.phase != faults.QUARANTINED


def _is_stuck(wait: Wait) -> bool:
    return 0 < wait.limit < wait.seconds


def _process(seen: Seen) -> tuple[str, int]:
    return (seen.beat.host, seen.beat.pid)


def _blamed(finding: Finding) -> tuple[str, int]:
    return (finding.host, finding.pid)


def _longest_for_another(beat: Heartbeat) -> str:
    return next((wait.what for wait in beat.waits if wait.on not in PARTS), beat.waits_for)
