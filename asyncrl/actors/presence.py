"""Which actors of a run have sent heartbeats recently: the health monitor's memory of heartbeats, on its own clock.

Tests: tests/unit/actors/test_presence.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.roles import LEARNERS_ACTORS, WATCHER, process_name
from asyncrl.os_process import process_state
from asyncrl.policies.health.faults import SILENT_SECONDS, ActorStatus, Process
from asyncrl.policies.health.waits import UNKNOWN_SECONDS

REMEMBER_SECONDS = 60.0
"""How long a silent actor is still reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProcess:
    """A process that the monitor's own launcher keeps up.

    pid         0: between an exit and the next start
    seconds     since this start, or since that exit
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
    """Which actors have sent heartbeats, and how long ago, in seconds of listening."""

    def __init__(self, *, host: str = socket.gethostname(), process: Callable[[int], Process] = process_state) -> None:
        """process: state of a process id on this machine"""
        self._host = host
        self._process = process
        self._actors: dict[str, ActorStatus] = {}
        self._renewed: set[str] = set()  # sent a heartbeat while we listened; the age of other entries is unknown
        self._has_listened = False
        self._own: dict[str, OwnProcess] = {}
        self._worked: set[tuple[str, int]] = set()  # (host, pid) of own processes that got past their start
        self._ended: set[tuple[str, int]] = set()  # (host, pid) of own processes whose entries may be left

    def update(self, beats: Mapping[str, Heartbeat], *, seconds: float, own: Iterable[OwnProcess] = ()) -> None:
        """Take in one poll, ``seconds`` of listening after the previous one."""
        processes = {one.name: one for one in own}
        places = {self._place(one) for one in processes.values()}
        self._ended |= {place for one in self._own.values() if (place := self._place(one)) not in places}
        self._ended -= places
        self._own = processes
        believed = {name: beat for name, beat in beats.items() if self._is_believed(name, beat)}
        self._worked |= {
            self._place(processes[name])
            for name in processes.keys() & believed.keys()
            if believed[name].phase != "starting"
        }
        updated = {
            name: self._update(name, self._actors.get(name), believed.get(name), seconds)
            for name in self._actors.keys() | believed.keys()
        }
        self._actors = {name: status for name, status in updated.items() if status is not None}
        self._has_listened = True
        for one in processes.values():
            if one.name not in self._actors and not one.is_leaving and self._place(one) not in self._worked:
                self._actors[one.name] = self._starting(one)

    def restart_silences(self) -> None:
        """No heartbeat could arrive while the bus was away: silence counts from now on."""
        self._actors = {name: replace(status, seconds=0.0) for name, status in self._actors.items()}
        self._renewed.clear()

    def has_worked(self, host: str, pid: int) -> bool:
        """Return whether an own process ever sent a heartbeat after its startup. ``host``: "" is the monitor's own."""
        return (host or self._host, pid) in self._worked

    @property
    def own_roles(self) -> frozenset[str]:
        """Roles of own processes that are up, have worked, and are to stay."""
        return frozenset(
            one.role for one in self._own.values() if self._place(one) in self._worked and not one.is_leaving
        )

    def statuses(self) -> dict[str, ActorStatus]:
        """Return all remembered actors, with the process state of silent ones on this machine."""
        return {
            name: replace(status, process=self._process(status.beat.pid))
            if status.seconds > SILENT_SECONDS and status.beat.host == self._host
            else status
            for name, status in self._actors.items()
        }

    def _update(
        self, name: str, before: ActorStatus | None, beat: Heartbeat | None, seconds: float
    ) -> ActorStatus | None:
        """Return the actor's status after this poll; None if it is no longer reported.  beat: None if there is none"""
        if beat is not None and (before is None or heartbeat_id(beat) != heartbeat_id(before.beat)):
            if self._has_listened:
                self._renewed.add(name)
            return ActorStatus(beat=beat)
        assert before is not None
        older = replace(before, seconds=before.seconds + seconds)
        if beat is not None:
            return older
        # The entry is gone. An actor that leaves in order removes it; an actor that died leaves it to expire, and it
        # has been silent for longer than SILENT_SECONDS by then.
        if not before.beat.beat or (before.beat.host, before.beat.pid) in self._ended:
            return None
        has_left = name in self._renewed and before.seconds <= SILENT_SECONDS
        is_up = (one := self._own.get(name)) is not None and self._place(one) == (before.beat.host, before.beat.pid)
        return None if has_left or (older.seconds > REMEMBER_SECONDS and not is_up) else older

    def _is_believed(self, name: str, beat: Heartbeat) -> bool:
        """Whether a heartbeat counts. Left out are other monitors, what an earlier start of an own process has left,
        and actors that claim to be another."""
        if beat.role == WATCHER or (beat.host, beat.pid) in self._ended or beat.actor != name:
            return False
        if (beat.role in LEARNERS_ACTORS.values()) != (name in LEARNERS_ACTORS):
            return False
        one = self._own.get(process_name(name, beat.role))
        return one is None or self._place(one) == (beat.host, beat.pid)

    def _place(self, one: OwnProcess) -> tuple[str, int]:
        return (one.host or self._host, one.pid)

    def _starting(self, one: OwnProcess) -> ActorStatus:
        wait = Wait(what="its first heartbeat", on="start", seconds=one.seconds, limit=UNKNOWN_SECONDS)
        host, pid = self._place(one)
        return ActorStatus(
            beat=Heartbeat(actor=one.name, role=one.role, phase="starting", waits=(wait,), host=host, pid=pid)
        )


def heartbeat_id(beat: Heartbeat) -> tuple[str, int, int]:
    """Return a key that differs for each heartbeat of each process."""
    return (beat.host, beat.pid, beat.beat)
