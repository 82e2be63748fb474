"""Records when things happened, one line per step, for `asyncrl trace` (metrics/trace.py draws it).

    RUN_DIR/timeline.jsonl, and timeline.1.jsonl, which is older
    {"step": 7, "incarnation": 0, "time": 1795424064.9, "seconds": {"wait": 0.1, "train": 0.4, ...},
     "groups": [[12, "w0", published, began, seconds, reward_seconds, arrived], ...],
     "loads": [["w0", 6, ended, load_seconds, pause_seconds], ...], "waits": [["w0", "prompts", "learner", since], ...],
     "ranks": [tokens, ...]}

``ranks``: tokens trained by each rank of the learner, if there are several. Times are Unix seconds of the learner's
clock; only ``began`` and the end of a load are from the worker's clock. Groups, loads and waits per step are bounded,
and so are the bytes (metrics.timeline_max_bytes). Lines are written while the next step runs.

Tests: tests/actors/learner/test_timeline.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrl.actors.learner.sample_files import RotatedLines
from asyncrl.messages import Heartbeat
from asyncrl.messages.validation import MOST_SECONDS
from asyncrl.metrics.trace import rank_tokens
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.metric import Metric

MOST_GROUPS: Final = 512
MOST_ACTORS: Final = 128
LEAST_WAIT_SECONDS: Final = 0.5
"""Shorter waits are routine and left out."""

SECONDS: Final = {
    "wait": "learner/wait_seconds",
    "train": "learner/step_seconds",
    "prepare": "learner/prepare_seconds",
    "export": "learner/export_seconds",
    "publish": "weights/publish_seconds",
    "checkpoint": "learner/checkpoint_seconds",
}
"""Name in a line -> metric."""

log = logging.getLogger("asyncrl.learner")


class Timeline:
    """The lines of one incarnation."""

    def __init__(self, lines: RotatedLines) -> None:
        self._lines = lines
        self._loads: dict[str, tuple[str, float]] = {}
        self._is_said = False

    async def record(
        self, step: int, metrics: Mapping[str, Metric], groups: Sequence[BufferedGroup], beats: Sequence[Heartbeat]
    ) -> None:
        """Record a finished step.  groups: the groups it trained;  beats: of the workers, up to some seconds old"""
        line = self._line(step, metrics, groups, beats[:MOST_ACTORS])
        try:
            await asyncio.to_thread(self._lines.write, json.dumps(line, allow_nan=False))
            self._is_said = False
        except (OSError, ValueError) as error:  # the timeline must not end a run
            if not self._is_said:
                log.warning("timeline.jsonl: a step is left out: %s", error)
            self._is_said = True

    def _line(
        self, step: int, metrics: Mapping[str, Metric], groups: Sequence[BufferedGroup], beats: Sequence[Heartbeat]
    ) -> dict[str, Any]:
        of_clock = time.time() - time.monotonic()  # from the clock of ``BufferedGroup.arrived``
        seconds = {name: metrics[metric] for name, metric in SECONDS.items() if _is_number(metrics.get(metric))}
        return {
            "step": step,
            "incarnation": int(_number(metrics.get("learner/incarnation"))),
            "time": _number(metrics.get("time")) or time.time(),
            "seconds": {name: round(_number(value), 6) for name, value in seconds.items()},
            **({"ranks": tokens} if (tokens := rank_tokens(metrics)) else {}),
            "groups": [_group(one, of_clock) for one in groups[:MOST_GROUPS]],
            "loads": [load for beat in beats if (load := self._load(beat)) is not None],
            "waits": [
                [beat.actor, wait.what, wait.on, round(time.time() - wait.seconds, 3)]
                for beat in beats
                for wait in beat.waits
                if wait.seconds >= LEAST_WAIT_SECONDS
            ],
        }

    def _load(self, beat: Heartbeat) -> list[Any] | None:
        """Return the worker's last load, if it is new since the last look."""
        numbers = {
            name: _number(beat.numbers.get(f"weights/{name}"))
            for name in ("loads", "loaded_at", "load_seconds", "pause_seconds")
        }
        before, self._loads[beat.actor] = self._loads.get(beat.actor), (beat.life, numbers["loads"])
        if not numbers["loads"] or not numbers["loaded_at"] or before == self._loads[beat.actor]:
            return None
        ended, load, pause = (round(numbers[name], 6) for name in ("loaded_at", "load_seconds", "pause_seconds"))
        return [beat.actor, beat.policy_version, ended, load, pause]


def _group(one: BufferedGroup, of_clock: float) -> list[Any]:
    group = one.group
    times = (one.prompt.published, group.began, group.seconds, group.reward_seconds, one.arrived + of_clock)
    return [group.group_id, group.worker, *(round(_number(value), 3) for value in times)]


def _is_number(value: Any) -> bool:
    """Return whether a viewer can draw this number: workers may report anything."""
    return isinstance(value, float | int) and abs(value) <= MOST_SECONDS


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0
