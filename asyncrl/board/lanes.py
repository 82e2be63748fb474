"""Activity of each actor over the last minutes: a lane of segments, from heartbeats. Pure.

A heartbeat reports what an actor does and waits for at one instant. The actor is assumed to continue until the next
look. A segment ends when the next one begins. Lanes and segments are bounded for any fleet size and any uptime of the
board.

Tests: tests/unit/board/test_lanes.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

STATES: Final = (
    "silent",
    "quarantined",
    "starting",
    "draining",
    "waiting",
    "loading",
    "rewarding",
    "generating",
    "training",
    "writing",
    "working",
)
"""States of a lane; the browser receives their index."""
WINDOW_SECONDS: Final = 900.0
MOST_LANES: Final = 4096
MOST_SEGMENTS: Final = 60_000
"""Limit for all lanes together. Each lane may have at least LEAST_SEGMENTS and at most LARGEST_LANE segments."""
LEAST_SEGMENTS: Final = 16
LARGEST_LANE: Final = 300
LONGEST_TEXT: Final = 120

_LOADS: Final = frozenset({"load", "folder", "weight-sender"})
_TRAINS: Final = frozenset({"step", "backend"})
_WRITES: Final = frozenset({"disk", "room"})


@dataclass(frozen=True, slots=True)
class Activity:
    """state: one of STATES;  text: what the actor waits for, and from whom"""

    state: str
    text: str = ""


def activity_of(beat: Any, *, silent_seconds: float = 0.0) -> Activity:
    """Derive an actor's activity from its heartbeat.

    silent_seconds: time without a heartbeat, if too long; otherwise 0
    """
    if silent_seconds:
        return Activity("silent")
    if beat.phase in ("starting", "quarantined", "draining"):
        return Activity(beat.phase, _text(beat.waits[0]) if beat.waits else "")
    if beat.role in ("rollout-worker", "evaluation-worker"):
        return _of_worker(beat)
    for state, parts in (("training", _TRAINS), ("writing", _WRITES)):
        if (wait := _first(beat.waits, parts)) is not None:
            return Activity(state, wait.what[:LONGEST_TEXT])
    return Activity("waiting", _text(beat.waits[0])) if beat.waits else Activity("working")


def _of_worker(beat: Any) -> Activity:
    if (wait := _first(beat.waits, _LOADS)) is not None:
        return Activity("loading", wait.what[:LONGEST_TEXT])
    if beat.numbers.get("rollout/running", 0) > 0:
        return Activity("generating")
    if (wait := _first(beat.waits, frozenset({"reward"}))) is not None:
        return Activity("rewarding")
    return Activity("waiting", _text(beat.waits[0])) if beat.waits else Activity("waiting")


def _first(waits: Iterable[Any], parts: frozenset[str]) -> Any:
    return next((wait for wait in waits if wait.on in parts), None)


def _text(wait: Any) -> str:
    return f"{wait.what}, from {wait.on}"[:LONGEST_TEXT] if wait.on else wait.what[:LONGEST_TEXT]


@dataclass(slots=True)
class Lane:
    """segments: (begin in Unix seconds, state, text), oldest first"""

    number: int
    name: str
    role: str
    life: str = ""
    version: int = 0
    segments: deque[tuple[float, str, str]] = field(default_factory=deque)
    is_gone: bool = False

    @property
    def now(self) -> tuple[str, str]:
        _, state, text = self.segments[-1]
        return state, text


class Lanes:
    """The lanes of one run, on the board's clock."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.left_out = 0
        """Number of actors beyond MOST_LANES."""
        self.end = 0.0
        """Time of the last look."""
        self._next = 0

    def update(
        self, actors: Mapping[str, tuple[Any, Activity]], *, now: float
    ) -> tuple[list[Lane], list[Lane], list[str]]:
        """Record one look, given name -> (heartbeat, activity).

        Returns (new lanes, changed lanes, names of restarted actors).
        """
        new, changed, restarted = list[Lane](), list[Lane](), list[str]()
        self.left_out = 0
        for name, (beat, does) in actors.items():
            lane = self.lanes.get(name)
            if lane is None:
                if len(self.lanes) >= MOST_LANES:
                    self.left_out += 1
                    continue
                lane = self.lanes[name] = Lane(self._next, name, beat.role, life=beat.life)
                self._next += 1
                new.append(lane)
            elif beat.life and beat.life != lane.life:
                if lane.life:
                    restarted.append(name)
                lane.life = beat.life
            if self._note(lane, does, version=beat.policy_version, now=now):
                changed.append(lane)
        for name, lane in self.lanes.items():
            if name not in actors and not lane.is_gone:
                lane.is_gone = True
                lane.segments.append((now, "", ""))
                changed.append(lane)
        self.end = now
        self._forget(now - WINDOW_SECONDS)
        return new, changed, restarted

    def _note(self, lane: Lane, does: Activity, *, version: int, now: float) -> bool:
        lane.is_gone = False
        is_other = not lane.segments or lane.now != (does.state, does.text)
        if is_other:
            lane.segments.append((now, does.state, does.text))
        has_version = version != lane.version
        lane.version = version
        return is_other or has_version

    def _forget(self, begin: float) -> None:
        """Drop segments before the window, the oldest ones of overfull lanes, and lanes of actors gone before it."""
        most = min(LARGEST_LANE, max(LEAST_SEGMENTS, MOST_SEGMENTS // max(1, len(self.lanes))))
        for lane in self.lanes.values():
            while len(lane.segments) > most or (len(lane.segments) > 1 and lane.segments[1][0] <= begin):
                lane.segments.popleft()
        gone = [name for name, lane in self.lanes.items() if lane.is_gone and lane.segments[-1][0] <= begin]
        for name in gone:
            del self.lanes[name]

    def totals(self) -> dict[str, int]:
        """Return the number of rollout workers in each state."""
        found: dict[str, int] = {}
        for lane in self.lanes.values():
            if not lane.is_gone and lane.role == "rollout-worker":
                found[lane.now[0]] = found.get(lane.now[0], 0) + 1
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all lanes. A segment is [seconds since ``begin``, index of its state (-1: gone), text]."""
        begin = self.end - WINDOW_SECONDS
        return {
            "begin": begin,
            "end": self.end,
            "left_out": self.left_out,
            "source": "heartbeats",
            "lanes": [head(lane) | {"segments": list(_segments(lane, begin))} for lane in self.lanes.values()],
        }


def head(lane: Lane) -> dict[str, Any]:
    return {"id": lane.number, "name": lane.name, "role": lane.role, "version": lane.version}


def change(lane: Lane) -> list[Any]:
    """Return [id, index of the state, text, version]."""
    state, text = lane.now
    return [lane.number, number_of(state), text, lane.version]


def number_of(state: str) -> int:
    return STATES.index(state) if state else -1


def _segments(lane: Lane, begin: float) -> Iterator[list[Any]]:
    for since, state, text in lane.segments:
        yield [round(max(0.0, since - begin), 1), number_of(state), *([text] if text else [])]
