"""Who holds up whom, and why: turns what the actors of a run report into findings with a cause and a remedy.

An actor that waits names a role ("rollout-worker") or a part of its own process ("engine"). A wait is a stall if its
chain ends in one of these:

  a process whose heartbeats have stopped          frozen, blocked, silent, gone
  a part that takes longer than its limit          engine, reward, rollout, load, ...
  a role that no process has                       no worker (quarantined: not counted), no learner
  an actor that is already in the chain            deadlock
  data that has ended                              deadlock

A wait is not a stall while any actor at the end of its chain still works: a learner that waits for busy engines is only
faster than they are. Example: the learner waits for trajectories (on: rollout-worker), w1 waits for prompts (on:
prompt-source), the prompt source waits for room in the window (on: learner), and w2 has waited 12 s for its engine.
All chains end in w2's engine; it is the one finding, and the others are its victims.

All ages are seconds on the monitor's own monotonic clock during which it could receive (actors/health_monitor.py). So a
wrong clock on any machine can neither fake nor hide a stall.

Tests: tests/unit/policies/health/test_diagnosis.py, a table of faults and the name each must get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.roles import FOLLOWER, LEARNER, PROMPT_SOURCE, QUARANTINED, SENDER, WORKER, process_name
from asyncrl.policies.health import conditions, faults
from asyncrl.policies.health.faults import BUS_SECONDS, ActorStatus, Finding, Observation
from asyncrl.policies.health.waits import PARTS, PATIENCE_SECONDS, STRAGGLERS

_Key = tuple[str, str]
_Path = tuple[tuple[str, Wait], ...]

DEADLOCK: Final[_Key] = ("deadlock", LEARNER)


def diagnose(observation: Observation) -> list[Finding]:
    """Return all faults, those that hold up the learner first; empty if the run makes progress."""
    seen = observation
    if seen.is_finished:
        return []  # its server may be gone as well
    if seen.bus_silent > BUS_SECONDS:
        return [faults.bus_silent(seen)]  # without the bus, nothing is known about any actor
    if seen.bus_refuses > BUS_SECONDS:
        return [faults.bus_refuses(seen)]
    return [
        *_Chains(seen).findings(),
        *faults.quarantined(seen),
        *faults.other_settings(seen),
        *faults.nothing_to_train(seen),
        *conditions.findings(seen),
    ]


class _Chains:
    """Follows waits through one observation."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._actors: Mapping[str, ActorStatus] = observation.actors
        self._ends: dict[_Key, Finding] = {}  # findings at the ends of chains
        self._by_role: dict[str, list[str]] = {}
        for name, seen in self._actors.items():
            if seen.beat.phase != QUARANTINED:
                self._by_role.setdefault(seen.beat.role, []).append(name)

    def findings(self) -> list[Finding]:
        roots = {name: self._roots(name, ()) or frozenset() for name in self._actors}
        found = {finding.key: finding for finding in (*self._silent(), *self._timeouts())}
        found |= {key: self._ends[key] for key in frozenset().union(*roots.values()) if key in self._ends}
        if not self._by_role.get(LEARNER) and self._is_learner_missed:  # the run stands still, or soon will
            finding = faults.role_missing(LEARNER)
            found.setdefault(finding.key, finding)
        blamed = [replace(finding, victims=self._victims(finding, roots)) for finding in found.values()]
        return sorted(blamed, key=lambda finding: (not finding.victims, finding.key))

    def _silent(self) -> Iterable[Finding]:
        """Yield one finding per process whose heartbeats have stopped."""
        for name, seen in self._actors.items():
            if seen.is_silent and name == self._process(name):
                yield faults.silent(self._label(name), name, seen)

    def _timeouts(self) -> Iterable[Finding]:
        """Yield one finding per part that exceeds its limit."""
        for name, seen in self._actors.items():
            if not seen.is_silent:
                yield from (self._timeout(name, seen, wait) for wait in seen.beat.waits if _is_stuck(wait))

    def _timeout(self, name: str, seen: ActorStatus, wait: Wait) -> Finding:
        process = self._process(name)
        return faults.wait_timeout(self._label(process), process, seen, wait)

    @property
    def _is_learner_missed(self) -> bool:
        """Whether the learner has been missing for too long; one that has just left may have ended its run."""
        return LEARNER not in self._observation.own_roles and self._observation.leaderless > PATIENCE_SECONDS

    def _victims(self, finding: Finding, roots: Mapping[str, frozenset[_Key]]) -> tuple[str, ...]:
        """Return sentences on the actors that wait for the finding: the learner, then workers, by name."""
        waiting = []
        for name, seen in sorted(self._actors.items(), key=lambda item: (item[1].beat.role != LEARNER, item[0])):
            is_main = seen.beat.role in (LEARNER, WORKER)
            if is_main and finding.key in roots[name] and finding.key != DEADLOCK and name != finding.actor:
                waiting.append(f"{self._label(name)} waits for {_longest_for_another(seen.beat)}")
        return tuple(waiting) if len(waiting) <= 2 else (waiting[0], f"{len(waiting) - 1} others wait too")

    def _roots(self, name: str, path: _Path) -> frozenset[_Key] | None:
        """Return what holds up this actor for good; None if it, or an actor that it waits for, still works.

        path  the actors and their waits that led here
        """
        seen = self._actors[name]
        if seen.is_silent:
            process = self._process(name)
            return frozenset({(faults.SILENCE[self._actors.get(process, seen).process], process)})
        waits = [wait for wait in seen.beat.waits if wait.on]
        return self._union(self._roots_of_wait(name, seen, wait, path) for wait in waits) if waits else None

    def _roots_of_wait(self, name: str, seen: ActorStatus, wait: Wait, path: _Path) -> frozenset[_Key] | None:
        path = (*path, (name, wait))
        if wait.on == "data":  # if no other actor waits for it, the run is ending normally
            return self._deadlock(path) if len(path) > 1 else None
        if wait.on in PARTS:
            return frozenset({self._timeout(name, seen, wait).key}) if _is_stuck(wait) else None
        if wait.seconds + seen.seconds <= PATIENCE_SECONDS:
            return None
        others = [other for other in self._by_role.get(wait.on, ()) if other != name]
        if not others and wait.on in (PROMPT_SOURCE, SENDER):  # part of the learner, which may be starting
            others = [other for other in self._by_role.get(LEARNER, ()) if other != name]
        if not others:
            return self._missing(wait.on)
        visited = {other: i for i, (other, _) in enumerate(path)}
        return self._union(
            self._deadlock(path[visited[other] :]) if other in visited else self._roots(other, path) for other in others
        )

    @staticmethod
    def _union(roots: Iterable[frozenset[_Key] | None]) -> frozenset[_Key] | None:
        """Return all roots; None if one of the actors still works. A deadlock beside another fault is its echo."""
        found: set[_Key] = set()
        for one in roots:
            if one is None:
                return None
            found |= one
        return frozenset(found - {DEADLOCK} or found)

    def _missing(self, role: str) -> frozenset[_Key] | None:
        is_up = role == FOLLOWER or role in self._observation.own_roles
        if is_up or (role != WORKER and not self._is_learner_missed):
            return None
        return self._end(faults.role_missing(role))

    def _deadlock(self, path: _Path) -> frozenset[_Key]:
        """Return a deadlock; nothing if the learner holds a full batch, because that wait ends by itself, or if a
        worker cannot read the weights that it waits for, which is a finding of its own (conditions.py)."""
        if any(wait.what.endswith(STRAGGLERS) for _, wait in path):
            return frozenset()
        if any(self._actors[name].beat.numbers.get("weights/failed_reads") for name, _ in path):
            return frozenset()
        if DEADLOCK in self._ends:  # each of many workers may be in it
            return frozenset({DEADLOCK})
        return self._end(
            faults.deadlock("; ".join(f"{self._label(name)} waits for {wait.what}" for name, wait in path))
        )

    def _end(self, finding: Finding) -> frozenset[_Key]:
        self._ends.setdefault(finding.key, finding)
        return frozenset({finding.key})

    def _process(self, name: str) -> str:
        return process_name(name, self._actors[name].beat.role)

    def _label(self, name: str) -> str:
        return f"worker {name}" if name in self._actors and self._actors[name].beat.role == WORKER else name


def _is_stuck(wait: Wait) -> bool:
    return 0 < wait.limit < wait.seconds


def _longest_for_another(beat: Heartbeat) -> str:
    return next((wait.what for wait in beat.waits if wait.on not in PARTS), beat.waits_for)
