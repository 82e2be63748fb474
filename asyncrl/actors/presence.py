"""Which actors of a run were heard recently: the health monitor's memory of heartbeats, on its own clock.

Tests: tests/unit/actors/test_presence.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.topics import ACTORS
from asyncrl.os_process import state_letter
from asyncrl.policies.health.faults import (
    BEAT_SECONDS,
    FIRST_SECONDS,
    LEARNER,
    LEARNERS_ACTORS,
    SILENT_SECONDS,
    Process,
    Seen,
)

REMEMBER_SECONDS = 60.0
"""How long a silent actor is still reported."""
WATCHER = "watcher"
"""Role of health monitors, which are not part of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process that the monitor's own launcher keeps up.

    pid         0: between two lives
    seconds     since this life, or the time between two lives, began
    host        its machine; "" is the monitor's own
    is_leaving  it was asked to leave and may be silent while it ends
    """

    name: str
    role: str
    pid: int
    seconds: float
    host: str = ""
    is_leaving: bool = False


class PresenceTracker:
    """Which actors were heard, and how long ago on the monitor's own clock."""

    def __init__(self, *, host: str, process: Callable[[int], Process]) -> None:
        """process: state of a process id on this machine"""
        self._host = host
        self._process = process
        self._seen: dict[str, Seen] = {}
        self._lively: set[str] = set()  # names with a new heartbeat while we listened; for others its age is unknown
        self._unheard: dict[str, float] = {}  # seconds of the monitor's clock since the last new heartbeat
        self._has_listened = False
        self._heard_again = math.inf  # seconds since the bus came back; inf if it was never away
        self._own: dict[str, tuple[str, int]] = {}  # name -> host and pid
        self.own_roles: frozenset[str] = frozenset()
        """Roles of own processes that are up, have worked, and are to stay."""
        self._ended: set[tuple[str, int]] = set()
        self._worked: set[tuple[str, int]] = set()
        self._left_behind: dict[str, tuple[str, int, int]] = {}  # name -> host, pid and number of its last heartbeat

    def hear(
        self,
        beats: Mapping[str, Heartbeat],
        *,
        seconds: float,
        elapsed: float | None = None,
        launched: Iterable[Launched] = (),
    ) -> None:
        """Take in one look, ``seconds`` of listening after the previous one.  elapsed: seconds on the monitor's clock,
        which include any freeze of the monitor; None: the same as ``seconds``"""
        elapsed = seconds if elapsed is None else elapsed
        self._heard_again += seconds
        self._unheard = {name: self._unheard.get(name, 0.0) + elapsed for name in self._seen}
        own = {one.name: one for one in launched}
        up = {name: (one.host or self._host, one.pid) for name, one in own.items() if one.pid}
        self._ended |= {life for name, life in self._own.items() if up.get(name) != life}
        self._own = up
        self._ended -= set(self._own.values())
        if own and not self._has_listened:
            self._left_behind = {name: number_of(beat) for name, beat in beats.items() if self._is_of_before(beat)}
        places = {life: name for name, life in up.items()}
        beats = {name: beat for name, beat in beats.items() if not _is_false(name, beat, places)}
        beats = {name: beat for name, beat in beats.items() if self._left_behind.get(name) != number_of(beat)}
        self._worked |= {life for name, life in up.items() if name in beats and _is_past_start(beats[name], life)}
        working = (one for one in own.values() if up.get(one.name) in self._worked and not one.is_leaving)
        self.own_roles = frozenset(one.role for one in working)
        self._seen = {name: seen for name, seen in self._seen.items() if name in beats or self._is_missed(name, seen)}
        passed = self._passed(beats, seconds=seconds, elapsed=elapsed)
        self._seen |= {name: self._heard(beats.get(name), name, passed(name)) for name in {*self._seen, *beats}}
        self._seen = {name: seen for name, seen in self._seen.items() if not self._is_over(seen.beat)}
        self._has_listened = True
        for one in own.values():
            if one.is_leaving or up.get(one.name) in self._worked:  # it removed its entry and is ending
                continue
            if one.name not in self._seen or self._seen[one.name].beat.pid != one.pid:
                self._seen[one.name] = self._starting(one)

    def excuse(self) -> None:
        """Restart the silence of all actors, which could not be heard while the bus was away."""
        self._seen = {name: replace(seen, seconds=0.0) for name, seen in self._seen.items()}
        self._lively.clear()
        self._heard_again = 0.0

    def has_worked(self, host: str, pid: int) -> bool:
        """Return whether an own process was ever heard past its startup. ``host``: "" is the monitor's own."""
        return (host or self._host, pid) in self._worked

    def names(self) -> set[str]:
        return set(self._seen)

    def present(self) -> dict[str, Seen]:
        """Return all remembered actors, with the process state of silent ones on this machine."""
        return {
            name: replace(seen, process=self._process(seen.beat.pid))
            if seen.seconds > SILENT_SECONDS and seen.beat.host == self._host
            else seen
            for name, seen in self._seen.items()
        }

    def _passed(self, beats: Mapping[str, Heartbeat], *, seconds: float, elapsed: float) -> Callable[[str], float]:
        """Return a function: name -> seconds of this look, as listened or as shown by another process's heartbeats."""
        beaten: dict[tuple[str, int], float] = {}
        for name, beat in beats.items():
            before, process = self._seen.get(name), (beat.host, beat.pid)
            if before is not None and (before.beat.host, before.beat.pid) == process and beat.phase != "starting":
                beaten[process] = max(beaten.get(process, 0.0), BEAT_SECONDS * (beat.beat - before.beat.beat))
        most = sorted(beaten.items(), key=lambda item: -item[1])[:2]

        def passed(name: str) -> float:
            seen = self._seen.get(name)
            own = None if seen is None else (seen.beat.host, seen.beat.pid)
            others = max((heard for process, heard in most if process != own), default=0.0)
            return max(seconds, min(elapsed, others))

        return passed

    def _is_missed(self, name: str, seen: Seen) -> bool:
        """Return whether an actor whose entry is gone is missed: it did not remove the entry by leaving in order."""
        if not seen.beat.beat:  # not heard yet: still starting
            return False
        may_have_expired = self._unheard.get(name, 0.0) >= ACTORS.seconds_to_live
        if name in self._lively and seen.seconds <= SILENT_SECONDS and not may_have_expired:
            return False
        is_own = self._own.get(name) == (seen.beat.host, seen.beat.pid)  # and its process still exists
        return is_own or seen.seconds < REMEMBER_SECONDS

    def _heard(self, beat: Heartbeat | None, name: str, seconds: float) -> Seen:
        before = self._seen.get(name)
        if before is not None and beat is not None and number_of(beat) == number_of(before.beat):
            return replace(before, seconds=before.seconds + seconds)
        self._unheard[name] = 0.0 if beat is not None else self._unheard.get(name, 0.0)
        if self._has_listened and beat is not None:
            self._lively.add(name)
        if before is not None and beat is None:  # its entry has expired
            unheard = min(self._heard_again, ACTORS.seconds_to_live)  # no renewal was possible while the bus was away
            return replace(before, seconds=max(before.seconds + seconds, unheard))
        assert beat is not None
        return Seen(beat=beat)

    def _is_over(self, beat: Heartbeat) -> bool:
        return beat.role == WATCHER or (beat.host, beat.pid) in self._ended

    def _is_of_before(self, beat: Heartbeat) -> bool:
        """Return whether an earlier, killed life of the run on this machine left the heartbeat."""
        return beat.host == self._host and self._process(beat.pid) == "gone"

    def _starting(self, one: Launched) -> Seen:
        wait = Wait(what="its first heartbeat", on="start", seconds=one.seconds, limit=FIRST_SECONDS)
        return Seen(
            beat=Heartbeat(
                actor=one.name,
                role=one.role,
                phase="starting",
                waits=(wait,),
                host=one.host or self._host,
                pid=one.pid,
            )
        )


def _is_false(name: str, beat: Heartbeat, places: Mapping[tuple[str, int], str]) -> bool:
    """Return whether a heartbeat claims to be a process or actor that its sender is not, or stands under another name.
    Believing it would blame, and kill, the named process for the sender's waits. ``places``: names of own processes by
    host and pid."""
    if beat.actor != name:
        return True
    owner = places.get((beat.host, beat.pid), name)
    is_learners = name in LEARNERS_ACTORS
    if beat.role in LEARNERS_ACTORS.values() and not is_learners:
        return True
    return owner != name and not (owner == LEARNER and is_learners)


def _is_past_start(beat: Heartbeat, life: tuple[str, int]) -> bool:
    return (beat.host, beat.pid) == life and beat.phase != "starting"


def number_of(beat: Heartbeat) -> tuple[str, int, int]:
    """Return a key that differs for each heartbeat of each process."""
    return (beat.host, beat.pid, beat.beat)


def process_state(pid: int) -> Process:
    """Return the state of a process on this machine; "" for pid 0 and off Linux."""
    if not pid or not os.path.isdir("/proc/self"):
        return ""
    letter = state_letter(pid)
    return "stopped" if letter in ("T", "t") else "gone" if letter in ("", "Z", "X") else "running"
