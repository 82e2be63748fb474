"""Groups on a run's log with named fields, by which `asyncrl regrade` chooses groups and `asyncrl explain` splits them.

A group's prompt is found again in the run's data, because the log has no metadata. Group ids count the prompts that
were short enough, so a row that was skipped as too long shifts the rows behind it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.actors.learner.prompt_source import Rows
from asyncrl.bus.port import Record
from asyncrl.config import RunConfig
from asyncrl.data.prompts import PromptRow
from asyncrl.errors import ConfigError
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.topics import group_id_of
from asyncrl.policies.audit.entries import BEGUN, DAMAGED, HistoryEntry
from asyncrl.policies.groups.sample import PENDING
from asyncrl.policies.groups.validation import digest
from asyncrl.policies.staleness.staleness import ResumePoints, oldest_version

FIELDS: Final[Mapping[str, type]] = {
    "group": float,
    "step": float,
    "fate": str,
    "worker": str,
    "engine": str,
    "version": float,
    "newest_version": float,
    "incarnation": float,
    "age": float,
    "reward": float,
    "tokens": float,
    "length": float,
    "seconds": float,
    "date": str,
    "epoch": float,
    "label": str,
    "prompt": str,
    "row": float,
    "task": str,
}
"""Field -> its type.

step            step that trained the group; for other fates, the number of steps done then
engine          name and version of the engine, as "sglang 0.5.16"
fate            trained, dropped, failed, filtered, or pending
version, newest_version, incarnation  policy versions that sampled the oldest and the newest token, and the oldest
                token's incarnation
age             staleness of the oldest token when it was trained; 0 if it was not
reward          mean over its answers;  tokens: sampled, of all answers;  length: mean per answer
date            when it was begun, as 2026-05-01T12:00:00 in UTC; a date alone can be compared with it
prompt          first digits of the SHA-256 of its tokens: the same in every epoch
row             position in the run's shuffled data;  task: data set of the row, or the name of its reward
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of a group.

    step, incarnation  step as in FIELDS, and the learner of then
    reason             why it was not trained, if an event says it
    resume_points      those that the learner knew then; None: not known
    bound              as in sample_of
    sequence           the log record that was trained; 0: not known
    """

    kind: str = PENDING
    step: int = 0
    incarnation: int = 0
    reason: str = ""
    resume_points: ResumePoints | None = None
    bound: int | None = None
    sequence: int = 0

    @property
    def first_step(self) -> int:
        """The first step that the group may change: that which trained it, or the next after another fate."""
        return self.step if self.kind == "trained" else self.step + 1


def fates_of(history: Sequence[HistoryEntry]) -> dict[int, Fate]:
    """Return the fate of every group of a present history."""
    resume_points: dict[int, int] = {}
    bound: int | None = None
    found: dict[int, Fate] = {}
    for entry in history:
        if entry.kind == BEGUN:
            bound = entry.max_staleness if entry.discard == "tokens" else None
            resume_points = resume_points | ({entry.incarnation: entry.step} if entry.incarnation else {})
        elif entry.kind != DAMAGED:
            sequences = entry.sequences or (0,) * len(entry.groups)
            for group_id, sequence in zip(entry.groups, sequences, strict=True):
                found[group_id] = Fate(
                    kind=entry.kind,
                    step=entry.step,
                    incarnation=entry.incarnation,
                    resume_points=resume_points,
                    bound=bound,
                    sequence=sequence,
                )
    return found


class PromptFinder:
    """Finds the rows of groups in the run's data.  has_overlong: whether rows were skipped as too long"""

    def __init__(self, rows: Rows, run: RunConfig, *, has_overlong: bool) -> None:
        self._rows, self._run, self._has_overlong = rows, run, has_overlong
        self._positions: list[int] = []  # of group 0, 1, ..., as far as they were counted
        self._next = 0

    def position(self, group_id: int) -> int:
        """Return the position of the group's row. Raises ConfigError if the data has ended before it."""
        if not self._has_overlong:
            return group_id
        while len(self._positions) <= group_id:
            if len(self._row(self._next, group_id).tokens):
                self._positions.append(self._next)
            self._next += 1
        return self._positions[group_id]

    def find(self, group: TrajectoryGroup) -> tuple[int, PromptRow]:
        """Return position and row of a group. Raises ConfigError if the data is not that of the run any more."""
        position = self.position(group.group_id)
        row = self._row(position, group.group_id)
        if not np.array_equal(row.tokens, group.prompt_tokens):
            raise ConfigError(
                f"{self._run.data.where}: row {position} is not the prompt of group {group.group_id}: the data, its "
                "order, or the tokenizer changed since; put back what the run had, and give new labels with "
                "--label-file"
            )
        return position, row

    def task(self, row: PromptRow) -> str:
        return row.dataset or row.reward or (Path(self._run.data.path).stem if self._run.data.path else "")

    def _row(self, position: int, group_id: int) -> PromptRow:
        if (row := self._rows.at(position)) is None:
            raise ConfigError(f"{self._run.data.where}: ends before row {position}, of group {group_id}")
        return row


def is_answer(record: Record[TrajectoryGroup]) -> bool:
    """Return whether a log record holds a group that was made, under its own key."""
    group = record.message
    return group is not None and not group.error and group_id_of(record.key) == group.group_id


def prompt_id(group: TrajectoryGroup) -> str:
    """Return a short name for the group's prompt, the beginning of what `asyncrl certify` says."""
    return digest(group.prompt_tokens).hex()[:12]


def fields_of(record: Record[TrajectoryGroup], fate: Fate, *, finder: PromptFinder | None = None) -> dict[str, Any]:
    """Return the fields of a group by name. Without ``finder``, row and task are left out."""
    group = record.message
    assert group is not None
    spans = [span for one in group.trajectories for span in one.version_spans]
    oldest = min(spans, key=lambda span: (span.incarnation, span.policy_version))
    tokens = sum(int(one.response_mask.sum()) for one in group.trajectories)
    began = group.began or record.stored / 1e9
    age = 0
    if fate.kind == "trained":
        age = max(0, fate.step - 1 - min(oldest_version([span], fate.resume_points or {}) for span in spans))
    found: dict[str, Any] = {
        "group": group.group_id,
        "step": fate.step,
        "fate": fate.kind,
        "worker": group.worker,
        "engine": group.engine,
        "version": oldest.policy_version,
        "newest_version": max(span.policy_version for span in spans),
        "incarnation": oldest.incarnation,
        "age": age,
        "reward": float(np.mean(group.rewards)),
        "tokens": tokens,
        "length": tokens / len(group.rollouts),
        "seconds": group.seconds,
        "date": datetime.datetime.fromtimestamp(began, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "epoch": group.epoch,
        "label": group.label,
        "prompt": prompt_id(group),
    }
    if finder is not None:
        position, row = finder.find(group)
        found |= {"row": position, "task": finder.task(row)}
    return found
