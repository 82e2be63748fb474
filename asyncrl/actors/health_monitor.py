"""Listens to a run and says what is wrong with it: in `asyncrl run` all the time, in `asyncrl doctor` for a moment.

Every LOOK_SECONDS it reads who beat, stores a beat of its own to see that the bus still stores, and asks
policies/health/diagnosis.py. Ages are seconds in which it could hear: while the bus is away nobody gets older, and a
watcher that was frozen itself accuses nobody when it wakes. On a busy machine its looks are far apart: then the beats
of others say how much time has passed for everybody.

Tests: tests/unit/actors/test_health_monitor.py; with real processes, tests/chaos/test_liveness.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from asyncrl.actors.recent_losses import RecentLosses
from asyncrl.errors import AsyncRLError, ConfigError, Forbidden, NoAnswer
from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.topics import ACTORS, PROGRESS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import (
    BEAT_SECONDS,
    BUS_SECONDS,
    FIRST_SECONDS,
    LEARNER,
    LEARNERS_ACTORS,
    SILENT_SECONDS,
    Finding,
    Observation,
    Process,
    Seen,
)
from asyncrl.policies.health.fleet import CLOCK
from asyncrl.protocols import Bus, Loss

LOOK_SECONDS = 1.0
LARGE_FLEET = 128
"""Of more actors than this every second look is left out: one costs the bus a message an actor."""
ANSWER_SECONDS = 3.0
"""The bus has so long for one look."""
AGAIN_SECONDS = 2.0
"""And so long for the next one, which follows at once, while it has failed too briefly to be named."""
_BREATH_SECONDS = 0.2
REMEMBER_SECONDS = 60.0
"""How long an actor that is not heard of is spoken of."""
ROLE = "watcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process that the watcher's own launcher keeps up. pid 0: between two lives.  seconds: since that began.

    host: of its machine; empty is the watcher's own.  is_leaving: it was asked to, and may be silent while it ends
    """

    name: str
    role: str
    pid: int
    seconds: float
    host: str = ""
    is_leaving: bool = False


class PresenceTracker:
    """Who was heard, and how long ago on the watcher's own clock."""

    def __init__(self, *, host: str, process: Callable[[int], Process], wall: Callable[[], float] = time.time) -> None:
        """process: what this machine says of a process id;  wall: its clock"""
        self._host = host
        self._process = process
        self._wall = wall
        self._seen: dict[str, Seen] = {}
        self._lively: set[str] = set()  # of the others it is not known how old the only beat heard was
        self._unheard: dict[str, float] = {}  # seconds of the watcher's clock since the last new beat
        self._has_listened = False
        self._heard_again = math.inf  # seconds since the bus is back, if it was ever away
        self._own: dict[str, tuple[str, int]] = {}  # name -> host and pid
        self._ended: set[tuple[str, int]] = set()
        self._worked: set[tuple[str, int]] = set()
        self._left_behind: dict[str, tuple[str, int, int]] = {}  # name -> host, pid and number of its last beat

    def hear(
        self,
        beats: Mapping[str, Heartbeat],
        *,
        seconds: float,
        elapsed: float | None = None,
        launched: Iterable[Launched] = (),
    ) -> None:
        """Take in one look, ``seconds`` of listening after the one before.  elapsed: on the watcher's clock, of which
        it may have been frozen for some; None: as many"""
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
        self._seen = {name: seen for name, seen in self._seen.items() if name in beats or self._is_missed(name, seen)}
        passed = self._passed(beats, seconds=seconds, elapsed=elapsed)
        self._seen |= {name: self._heard(beats.get(name), name, passed(name)) for name in {*self._seen, *beats}}
        self._seen = {name: seen for name, seen in self._seen.items() if not self._is_over(seen.beat)}
        self._has_listened = True
        for one in own.values():
            if one.is_leaving or up.get(one.name) in self._worked:  # it took its entry away, and ends
                continue
            if one.name not in self._seen or self._seen[one.name].beat.pid != one.pid:
                self._seen[one.name] = self._starting(one)

    def excuse(self) -> None:
        """The bus was away: who could not be heard gets its time again to be."""
        self._seen = {name: replace(seen, seconds=0.0) for name, seen in self._seen.items()}
        self._lively.clear()
        self._heard_again = 0.0

    def has_worked(self, host: str, pid: int) -> bool:
        """Whether an own process was ever heard to be past its start. ``host``: empty is the watcher's own."""
        return (host or self._host, pid) in self._worked

    def names(self) -> set[str]:
        return set(self._seen)

    def present(self) -> dict[str, Seen]:
        """All of them, with what this machine says of the silent ones' processes."""
        return {
            name: replace(seen, process=self._process(seen.beat.pid))
            if seen.seconds > SILENT_SECONDS and seen.beat.host == self._host
            else seen
            for name, seen in self._seen.items()
        }

    def _passed(self, beats: Mapping[str, Heartbeat], *, seconds: float, elapsed: float) -> Callable[[str], float]:
        """Seconds of this look for each name: those of listening, or as many as another process has beat in."""
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
        """Whether somebody whose entry is gone did not take it away when it left in order."""
        if not seen.beat.beat:  # never heard: still starting
            return False
        may_have_expired = self._unheard.get(name, 0.0) >= ACTORS.seconds_to_live
        if name in self._lively and seen.seconds <= SILENT_SECONDS and not may_have_expired:
            return False
        is_own = self._own.get(name) == (seen.beat.host, seen.beat.pid)  # and is a process still
        return is_own or seen.seconds < REMEMBER_SECONDS

    def _heard(self, beat: Heartbeat | None, name: str, seconds: float) -> Seen:
        before = self._seen.get(name)
        if before is not None and beat is not None and number_of(beat) == number_of(before.beat):
            return replace(before, seconds=before.seconds + seconds)
        self._unheard[name] = 0.0 if beat is not None else self._unheard.get(name, 0.0)
        if self._has_listened and beat is not None:
            self._lively.add(name)
        if before is not None and beat is None:  # its entry has expired
            unheard = min(self._heard_again, ACTORS.seconds_to_live)  # it could not renew it while the bus was away
            return replace(before, seconds=max(before.seconds + seconds, unheard))
        assert beat is not None
        shown = beat.numbers.get(CLOCK)
        return Seen(beat=beat, clock=None if shown is None else shown - self._wall())

    def _is_over(self, beat: Heartbeat) -> bool:
        return beat.role == ROLE or (beat.host, beat.pid) in self._ended

    def _is_of_before(self, beat: Heartbeat) -> bool:
        """Left on this machine by a life of the run before this launcher's, which was killed."""
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
    """Whether it says that it is a process or an actor of the run that it is not: what it waits for would be laid to
    that one, which would be killed for it. ``places``: names of own processes by host and pid."""
    owner = places.get((beat.host, beat.pid), name)
    is_learners = name in LEARNERS_ACTORS
    if beat.role in LEARNERS_ACTORS.values() and not is_learners:
        return True
    return owner != name and not (owner == LEARNER and is_learners)


def _is_past_start(beat: Heartbeat, life: tuple[str, int]) -> bool:
    return (beat.host, beat.pid) == life and beat.phase != "starting"


def number_of(beat: Heartbeat) -> tuple[str, int, int]:
    """Another one for each heartbeat of each process."""
    return (beat.host, beat.pid, beat.beat)


class HealthMonitor:
    """consumes: actors, progress    waits for: the next look    woken by: its own clock, and nobody else's"""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        *,
        launched: Callable[[], Iterable[Launched]] = lambda: (),
        server: Callable[[], int] = lambda: 0,
    ) -> None:
        """connect: opens the bus, tried again until it works;  launched: own processes;  server: pid of an own one"""
        self._connect = connect
        self._launched = launched
        self._server = server
        self._bus: Bus | None = None
        self._sightings = PresenceTracker(host=socket.gethostname(), process=process_state)
        self._name = f"{ROLE}-{uuid.uuid4().hex[:12]}"
        self._beats = 0
        self._stored = -math.inf  # monotonic time at which the last own beat was stored, or before
        self._is_seen = False  # an own beat, at the last look
        self._answered: float | None = None  # monotonic time of the last look that was; before it nobody is heard
        self._looked = time.monotonic()
        self._silent = self._refuses = 0.0
        self._server_pid = 0
        self._listened = 0.0
        self._pause = LOOK_SECONDS
        self._is_finished = False
        self._since = Since()
        self._losses = RecentLosses()
        self.error: Exception | None = None
        """Of the last look, if the bus failed it."""

    async def run(self, report: Callable[[list[Finding]], None]) -> None:
        """Hand every look's findings to ``report`` until cancelled."""
        try:
            while True:
                observation = await self.look()
                report(self._since.counted(diagnose(observation), observation.listened))
                await asyncio.sleep(_BREATH_SECONDS if self._is_in_doubt else self._pause)
        finally:
            await self.close()

    @property
    def _is_in_doubt(self) -> bool:
        """Whether the last look failed, and nothing can be said of it yet."""
        return 0.0 < max(self._silent, self._refuses) <= BUS_SECONDS

    async def look(self) -> Observation:
        """One look at everything. Never raises for a bus that is away: that is an observation."""
        try:
            async with asyncio.timeout(AGAIN_SECONDS if self._is_in_doubt else ANSWER_SECONDS):
                await self._find_losses()
                beats, self._is_finished = ({}, self._is_finished) if self._losses.is_blind else await self._read()
                self._miss_own(beats)
        except (AsyncRLError, OSError, TimeoutError) as error:
            self.error = error
            self._silent += self._passed()  # and of what it stores nothing is known
        else:
            now = time.monotonic()
            self._silent = 0.0
            elapsed = 0.0 if self._answered is None else now - self._answered
            heard = min(elapsed, 2 * self._pause)
            self._pause = LOOK_SECONDS if len(beats) <= LARGE_FLEET else 2 * LOOK_SECONDS
            if self.error is not None or self._losses.hides_beats:
                self._sightings.excuse()
            self._answered = now
            if not self._losses.is_blind:
                self._listened += heard
                self._sightings.hear(beats, seconds=heard, elapsed=elapsed, launched=self._launched())
            is_stored = self._losses.is_blind or await self._stores()
            self._refuses = 0.0 if is_stored else self._refuses + self._passed()
        self._looked = time.monotonic()
        if self._server_pid != (pid := self._server()):  # another life of it
            self._server_pid, self._silent, self._refuses = pid, 0.0, 0.0
        return Observation(
            actors=self._sightings.present(),
            listened=self._listened,
            bus_silent=self._silent,
            bus_refuses=self._refuses,
            bus_problem=str(self.error or ""),
            bus_process=process_state(pid),
            bus_losses=self._losses.lately(self._looked),
            is_bus_blind=self._losses.is_blind,
            is_finished=self._is_finished,
        )

    def _passed(self) -> float:
        """Seconds since the last look in which it could hear: of a time in which it was frozen, those of one look."""
        return min(time.monotonic() - self._looked, ANSWER_SECONDS + 2 * self._pause)

    def has_worked(self, host: str, pid: int) -> bool:
        """Whether an own process was ever past its start. ``host``: empty is this one."""
        return self._sightings.has_worked(host, pid)

    def names(self) -> set[str]:
        """Of the actors that were heard lately."""
        return self._sightings.names()

    async def close(self) -> None:
        bus, self._bus = self._bus, None
        if bus is not None:
            with contextlib.suppress(AsyncRLError, OSError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await bus.forget(ACTORS, key=self._name)
            await bus.close()

    async def _find_losses(self) -> None:
        if self._bus is None:
            self._bus = await self._connect()
        self._losses.note(await self._bus.losses(), now=time.monotonic())

    async def _read(self) -> tuple[dict[str, Heartbeat], bool]:
        assert self._bus is not None
        progress = (await self._bus.states(PROGRESS)).get("")
        return await self._bus.states(ACTORS), progress is not None and progress.finished

    def _miss_own(self, beats: Mapping[str, Heartbeat]) -> None:
        """An own beat has gone before its time: somebody removed all, and by now the others have sent new ones."""
        was_seen, self._is_seen = self._is_seen, self._name in beats
        is_young = time.monotonic() - self._stored < ACTORS.seconds_to_live / 2
        if was_seen and not self._is_seen and is_young and not self._losses.hides_beats:
            removed = Loss(name="heartbeats", topics=(ACTORS.name,), problem="were removed", is_mended=True)
            self._losses.note([removed], now=time.monotonic())

    async def _stores(self) -> bool:
        assert self._bus is not None
        self._beats += 1
        own = Heartbeat(actor=self._name, role=ROLE, beat=self._beats, host=socket.gethostname(), pid=os.getpid())
        now = time.monotonic()
        try:
            async with asyncio.timeout(AGAIN_SECONDS if self._is_in_doubt else ANSWER_SECONDS):
                await self._bus.put(ACTORS, own, key=self._name)
            self._stored = now
        except Forbidden:  # an observer's role: whether the bus stores is for others to find out
            pass
        except (AsyncRLError, OSError, TimeoutError) as error:
            self.error = error
            return False
        self.error = None
        return True


class Since:
    """How long faults last that are concluded from waits: who waits long for one who works is not long in a deadlock.

    A worker has written a long answer while all others waited for it, and dies: only then does everybody wait for
    everybody, and most often its prompts come back before long.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], float] = {}

    def counted(self, findings: Iterable[Finding], listened: float) -> list[Finding]:
        """``listened``: seconds that the watcher has heard until this look."""
        found = list(findings)
        self._first = {finding.key: self._first.get(finding.key, listened) for finding in found}
        return [
            replace(finding, seconds=min(finding.seconds, listened - self._first[finding.key]))
            if finding.is_joint
            else finding
            for finding in found
        ]


class Lasting:
    """Findings from their first look to the second one without them: each begins once and ends once."""

    def __init__(self) -> None:
        self._now: dict[tuple[str, str], Finding] = {}
        self._missed: set[tuple[str, str]] = set()

    def update(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """(begun, ended)."""
        present = {finding.key: finding for finding in findings}
        begun = [finding for key, finding in present.items() if key not in self._now]
        ended = [finding for key, finding in self._now.items() if key in self._missed and key not in present]
        self._missed = self._now.keys() - present.keys() - {finding.key for finding in ended}
        self._now = {key: self._now[key] for key in self._missed} | present
        return begun, ended


def refusal(error: Exception | None) -> ConfigError | None:
    """What waiting does not mend of what failed a look: a wrong token stays wrong, a server that is away may come."""
    if isinstance(error, Forbidden):
        return ConfigError(str(error))
    return error if isinstance(error, ConfigError) and not isinstance(error, NoAnswer) else None


def process_state(pid: int) -> Process:
    """What this machine says of a process; "" for pid 0 and off Linux."""
    if not pid or not os.path.isdir("/proc/self"):
        return ""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return "stopped" if letter in "Tt" else "gone" if letter in "ZX" else "running"
