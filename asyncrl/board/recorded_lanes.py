"""Lanes of a finished run, from the timeline that its learner recorded (timeline.jsonl). Pure.

A worker counts as generating while one of its groups is in progress, and as loading during its recorded loads.
Otherwise it waits. What it waits for is known only for waits of half a second or more.

Tests: tests/unit/board/test_lanes.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.board.lanes import LONGEST_TEXT, number_of

MOST_STEPS: Final = 400
MOST_SEGMENTS: Final = 600
"""Number of parts into which a lane's time is divided; shorter segments are merged into the previous one."""

Span = tuple[float, float, str]
"""(begin, end, text)"""


@dataclass(frozen=True, slots=True)
class Step:
    """end: Unix seconds;  wait, train, write: seconds (write: of a checkpoint);  ranks: tokens of each rank"""

    step: int
    end: float
    wait: float
    train: float
    write: float
    ranks: Sequence[int] = ()


def recorded_lanes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last MOST_STEPS rows of a timeline in the format of Lanes.as_json."""
    if not rows:
        return {"begin": 0.0, "end": 0.0, "left_out": 0, "source": "timeline", "lanes": []}
    rows = rows[-MOST_STEPS:]
    steps = [_step(row) for row in rows]
    begin, end = steps[0].end - steps[0].wait - steps[0].train - steps[0].write, steps[-1].end
    lanes = [{"id": 0, "name": "learner", "role": "learner", "version": steps[-1].step}]
    lanes[0]["segments"] = list(_learner_segments(steps, begin))
    groups, loads, waits, versions = _of_workers(rows)
    lanes += _rank_lanes(steps, begin)
    for number, name in enumerate(sorted(groups.keys() | loads.keys() | waits.keys()), len(lanes)):
        segments = flattened(
            begin,
            end,
            (("loading", loads.get(name, [])), ("generating", groups.get(name, [])), ("waiting", waits.get(name, []))),
        )
        head = {"id": number, "name": name, "role": "rollout-worker", "version": versions.get(name, 0)}
        lanes.append(head | {"segments": list(_as_json(segments, begin, end))})
    return {"begin": begin, "end": end, "left_out": 0, "source": "timeline", "lanes": lanes}


def rank_name(rank: int) -> str:
    return f"learner rank {rank}"


def _rank_lanes(steps: Sequence[Step], begin: float) -> list[dict[str, Any]]:
    """Return lanes of all ranks except the first, which has the learner's lane. They wait and train with it."""
    count = max((len(step.ranks) for step in steps), default=0)
    return [
        {
            "id": rank,
            "name": rank_name(rank),
            "role": "learner",
            "version": steps[-1].step,
            "segments": list(_learner_segments(steps, begin, rank=rank)),
        }
        for rank in range(1, count)
    ]


def _learner_segments(steps: Sequence[Step], begin: float, *, rank: int = 0) -> Iterator[list[Any]]:
    """Yield segments of a rank's lane, in seconds since ``begin``."""
    before = begin
    for step in steps:
        parts = (("writing", step.write, "a checkpoint"), ("waiting", step.wait, "trajectories"))
        tokens = f": {step.ranks[rank]:,} tokens" if rank < len(step.ranks) else ""
        tokens += ", in rank 0's time" if rank else ""  # times of other ranks are not recorded
        at = max(before, step.end - step.wait - step.write - step.train)
        for state, seconds, text in (*parts, ("training", step.train, f"step {step.step}{tokens}")):
            if seconds > 0:
                yield [round(at - begin, 2), number_of(state), text]
                at += seconds
        before = step.end
    yield [round(before - begin, 2), -1]


def flattened(begin: float, end: float, layers: Iterable[tuple[str, Sequence[Span]]]) -> list[tuple[float, str, str]]:
    """Flatten layers of spans to (begin, state, text) segments from ``begin`` to ``end``.

    Earlier layers hide later ones.
    """
    stacked = [(state, _merged(begin, end, spans)) for state, spans in layers]
    cuts = sorted({begin, *(cut for _, spans in stacked for span in spans for cut in span[:2])} - {end})
    at = [0] * len(stacked)
    found: list[tuple[float, str, str]] = []
    for cut in cuts:
        state, text = "waiting", ""
        for index, (name, spans) in reversed(list(enumerate(stacked))):
            while at[index] < len(spans) and spans[at[index]][1] <= cut:
                at[index] += 1
            if at[index] < len(spans) and spans[at[index]][0] <= cut:
                state, text = name, spans[at[index]][2]
        if not found or found[-1][1:] != (state, text):
            found.append((cut, state, text))
    return found


def _merged(begin: float, end: float, spans: Sequence[Span]) -> list[Span]:
    """Sort spans and remove overlaps; where two overlap, the earlier one takes precedence."""
    found: list[Span] = []
    for since, until, text in sorted(spans):
        since, until = max(begin, since), min(end, until)
        if found and since < found[-1][1]:
            if text == found[-1][2]:
                found[-1] = (found[-1][0], max(found[-1][1], until), text)
                continue
            since = found[-1][1]
        if until > since:
            found.append((since, until, text))
    return found


def _of_workers(
    rows: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, list[Span]], dict[str, list[Span]], dict[str, list[Span]], dict[str, int]]:
    """Return (groups, loads, waits, newest version) of each worker."""
    groups, loads, waits = dict[str, list[Span]](), dict[str, list[Span]](), dict[str, list[Span]]()
    versions: dict[str, int] = {}
    for row in rows:
        for _, name, _, began, seconds, _, arrived in row.get("groups", ()):
            since = began if 0 < began <= arrived + 1 else arrived - seconds
            groups.setdefault(str(name), []).append((since, since + seconds, ""))
        for name, version, ended, seconds, _ in row.get("loads", ()):
            loads.setdefault(str(name), []).append((ended - seconds, ended, f"version {version}"))
            versions[str(name)] = int(version)
        for name, what, on, since in row.get("waits", ()):
            text = f"{what}, from {on}" if on else str(what)
            waits.setdefault(str(name), []).append((since, float(row["time"]), text[:LONGEST_TEXT]))
    return groups, loads, waits, versions


def _as_json(segments: Sequence[tuple[float, str, str]], begin: float, end: float) -> Iterator[list[Any]]:
    least = (end - begin) / MOST_SEGMENTS
    last = begin - 2 * least
    for since, state, text in segments:
        if since - last >= least:
            yield [round(since - begin, 2), number_of(state), *([text] if text else [])]
            last = since
    yield [round(end - begin, 2), -1]


def _step(row: Mapping[str, Any]) -> Step:
    seconds = {name: float(value) for name, value in row["seconds"].items() if isinstance(value, float | int)}
    wait, train, write = (max(0.0, seconds.get(name, 0.0)) for name in ("wait", "train", "checkpoint"))
    ranks = [int(tokens) for tokens in row.get("ranks", ()) if isinstance(tokens, int | float)]
    return Step(step=row["step"], end=float(row["time"]), wait=wait, train=train, write=write, ranks=ranks)
