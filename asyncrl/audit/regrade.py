"""Grades recorded answers again, for `asyncrl regrade`: with another reward, or other labels. Nothing is sampled.

Grades are written to a file as they are made, so that a command that was interrupted goes on where it stopped:

    BRANCH/regrade/grades-9f0c....jsonl         digest of the reward, its code, and the labels
    {"sequence": 7, "group": 3, "rewards": [[1.0, {}], [0.0, {}]]}
    {"sequence": 9, "group": 5, "error": "reward my_rewards:score_v2: raised KeyError: 'x'"}

Tests: tests/integration/undo/test_regrade.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.actors.rollout.group_maker import with_reward
from asyncrl.audit.recorded_groups import Fate, PromptFinder, fates_of, fields_of, is_answer
from asyncrl.audit.run_folder import BEGUN_FILE, log_records
from asyncrl.bus.port import Bus, Record
from asyncrl.config import RunConfig
from asyncrl.data.prompts import PromptRow
from asyncrl.durable_files import write_whole
from asyncrl.environments import load as rollout_functions
from asyncrl.errors import ConfigError, MaybeOutage, Outage, RewardError, leaves
from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.messages.rollout import failed_group, label_text
from asyncrl.messages.topics import TRAJECTORIES, group_id_of
from asyncrl.policies.audit.entries import HistoryEntry
from asyncrl.policies.groups.predicate import Predicate
from asyncrl.rewards.completions import CompletionReader
from asyncrl.rewards.port import Reward, RewardFn, Sample

log = logging.getLogger("asyncrl.check")

AWAY_SECONDS: Final = 5.0
MAYBE_ATTEMPTS: Final = 3

Labels = Callable[[int, int, PromptRow], Any]
"""(group, position, row) -> the label to grade with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The new rewards of one record: (value, parts) of each rollout; or why it has none."""

    sequence: int
    group: int
    rewards: tuple[tuple[float, Mapping[str, float]], ...] = ()
    error: str = ""
    label: str = ""

    def apply(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with these rewards; a failed one if it has none."""
        if self.error:
            failed = failed_group(group.group_id, worker=group.worker, error=self.error)
            return dataclasses.replace(failed, prompt_tokens=group.prompt_tokens, epoch=group.epoch)
        parts: list[Trajectory] = []
        for rollout, (value, named) in zip(group.rollouts, self.rewards, strict=True):
            parts += with_reward(rollout, Reward(value=value, parts=named))
        return dataclasses.replace(group, trajectories=tuple(parts), label=self.label)

    def changes(self, group: TrajectoryGroup) -> bool:
        """Return whether a reward differs from the recorded one."""
        return bool(self.error) or [value for value, _ in self.rewards] != group.rewards


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let no other command work on this branch in this context. Raises ConfigError if one does.

    What is empty at the end is removed.
    """
    work = folder / "regrade"
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {folder}: another command is at work on this branch; wait for it, or name another folder"
            ) from None
        except OSError as error:
            log.debug("%s: not locked, for its disk has no locks: %s", work, error)
        yield
    finally:
        os.close(lock)
        with contextlib.suppress(OSError):
            work.rmdir()
            folder.rmdir()


def require_unclaimed(folder: Path, command: Mapping[str, Any]) -> None:
    """Raise ConfigError if another command has begun to write the branch."""
    path = folder / BEGUN_FILE
    if path.exists() and path.read_text() != json.dumps(command, sort_keys=True):
        raise ConfigError(
            f"{folder}: another reward, other labels, or another predicate began to write this branch; give that "
            "command again, remove the folder, or name another with --out"
        )


def claim(folder: Path, command: Mapping[str, Any]) -> None:
    """Record what the branch is written with, once that is known to be possible. Raises ConfigError."""
    require_unclaimed(folder, command)
    write_whole(folder / BEGUN_FILE, json.dumps(command, sort_keys=True))


def grades_path(folder: Path, *, graded_by: str) -> Path:
    """Return the file of a branch with its grades.  graded_by: digest of what they are made with"""
    return folder / "regrade" / f"grades-{graded_by[:16]}.jsonl"


class GradesFile:
    """The grades so far, by sequence.

    Until the branch is begun, groups that an earlier command could not grade are left out, as what failed may be
    mended. Then they are on the branch's log, and stay as they are.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_begun = (path.parents[1] / BEGUN_FILE).exists()
        self.grades: dict[int, Grade] = {}
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        *lines, torn = self._file.read().split(b"\n")
        try:
            for line in lines:
                table = json.loads(line)
                rewards = tuple((value, parts) for value, parts in table.pop("rewards", ()))
                grade = Grade(rewards=rewards, **table)
                if is_begun or not grade.error:
                    self.grades[grade.sequence] = grade
        except (ValueError, TypeError, KeyError, AttributeError):
            self._file.close()
            raise ConfigError(f"{path}: is damaged; remove it, and its groups are graded again") from None
        if torn:  # of a killed command
            self._file.truncate(self._file.tell() - len(torn))

    def add(self, grade: Grade) -> None:
        self.grades[grade.sequence] = grade
        table = {name: value for name, value in dataclasses.asdict(grade).items() if value != "" and value != ()}
        self._file.write(json.dumps(table).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class Grader:
    """Grades groups as a rollout worker does.  grades: those so far;  labels: None: those of the rows"""

    def __init__(
        self,
        run: RunConfig,
        *,
        reward: RewardFn,
        tokenizer: Any,
        finder: PromptFinder,
        grades: GradesFile,
        labels: Labels | None = None,
    ) -> None:
        self._run, self._reward, self._finder, self._grades = run, reward, finder, grades
        self._labels = labels or (lambda group_id, position, row: row.label)
        self._completions = CompletionReader(tokenizer)
        self._is_away = False

    async def close(self) -> None:
        self._grades.close()
        await self._reward.close()

    async def grade(self, sequence: int, group: TrajectoryGroup) -> Grade:
        """Return the group's new rewards, which are kept. Waits while a service that the reward needs is away."""
        if (grade := self._grades.grades.get(sequence)) is None:
            grade = await self._grade(sequence, group)
            self._grades.add(grade)
        return grade

    async def _grade(self, sequence: int, group: TrajectoryGroup) -> Grade:
        position, row = self._finder.find(group)
        label = self._labels(group.group_id, position, row)
        samples = [self._sample(parts, row, label) for parts in group.rollouts]
        attempt = 0
        while True:
            attempt += 1
            try:
                found = await self._reward(samples)
                errors = [one for one in found if isinstance(one, RewardError)]
                if errors:
                    raise errors[0]
            except Outage as error:
                if isinstance(error, MaybeOutage) and attempt >= MAYBE_ATTEMPTS:
                    return Grade(sequence=sequence, group=group.group_id, error=str(error))
                if not self._is_away:
                    self._is_away = True
                    log.warning("a service is away: %s; what it grades is asked again until it is back", error)
                await asyncio.sleep(AWAY_SECONDS)
            except RewardError as error:
                return Grade(sequence=sequence, group=group.group_id, error=str(error))
            else:
                rewards = [one for one in found if isinstance(one, Reward)]
                return Grade(
                    sequence=sequence,
                    group=group.group_id,
                    rewards=tuple((float(one.value), dict(one.parts)) for one in rewards),
                    label=label_text(label),
                )

    def _sample(self, parts: Sequence[Trajectory], row: PromptRow, label: Any) -> Sample:
        given = tuple(self._as_given(one) for one in parts)
        completion, plain = self._completions.read(given[-1])
        return Sample(
            prompt=row.prompt,
            completion=completion,
            label=label,
            metadata=row.metadata,
            trajectory=given[-1],
            prompt_tokens=row.tokens,
            dataset=row.dataset,
            reward=row.reward,
            parts=given,
            plain=plain,
        )

    def _as_given(self, one: Trajectory) -> Trajectory:
        """Return a trajectory as the rollout function gave it, without what the old reward function added."""
        section = self._run.reward
        if section.kind == "none":
            return one
        given = next((name for name, part in section.parts.items() if part.kind == "none"), "")
        is_ours = rollout_functions.traits(self._run.rollout.function).gives_one  # it sets no parts
        return dataclasses.replace(
            one,
            reward=one.reward_parts.get(given, math.nan),
            reward_parts={} if is_ours else one.reward_parts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What regrading means for one group.  new: mean reward, NaN if the group has none now"""

    group: int
    step: int
    fate: str
    task: str
    old: float
    new: float
    is_changed: bool
    has_other_advantages: bool


@dataclass(slots=True, kw_only=True)
class Regraded:
    """What `asyncrl regrade` found out about a run's groups.

    records   (sequence, key, group) of every record of a group that was made, in the order of the log
    grades    sequence -> grade
    changes   one for each group that was graded
    retracted ids of groups that are not to be trained
    """

    records: list[tuple[int, str, int]] = field(default_factory=list)
    grades: dict[int, Grade] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    retracted: set[int] = field(default_factory=set)
    fates: dict[int, Fate] = field(default_factory=dict)

    @property
    def changed(self) -> set[int]:
        """Ids of groups that are trained otherwise, or not at all."""
        return {one.group for one in self.changes if one.is_changed} | self.retracted

    @property
    def first_error(self) -> str:
        """Why the first group of the log that cannot be graded cannot; "" if every group can."""
        return next((grade.error for _, grade in sorted(self.grades.items()) if grade.error), "")

    @property
    def all_failed(self) -> bool:
        """Whether groups were graded, and none of them can be."""
        return bool(self.grades) and all(grade.error for grade in self.grades.values())

    def first_step(self, *, trained: int) -> int:
        """Return the first step that differs, of ``trained`` steps; ``trained`` + 1 if none of them does."""
        steps = (self.fates[group_id].first_step for group_id in self.changed if group_id in self.fates)
        return min([*steps, trained + 1])


async def regrade(
    bus: Bus,
    history: Sequence[HistoryEntry],
    *,
    directory: Path,
    finder: PromptFinder | None,
    grader: Grader | None,
    where: Predicate | None = None,
    retract: Predicate | None = None,
    parallel: int = 16,
    require: Callable[[int], None] = lambda step: None,
    say: Callable[[int], None] = lambda done: None,
) -> Regraded:
    """Grade the groups on the log for which ``where`` holds, and choose those to retract.

    history    present history;  directory: of the run, for messages
    grader     None: no group is graded;  finder: None if no predicate needs a row
    parallel   groups graded at once;  say: called with the number of groups graded so far
    require    called with the first step that a group may change, before it is graded; raises ConfigError to refuse it

    Raises ConfigError if a group that may be meant is no longer on the log.
    """
    found = Regraded(fates=fates_of(history))
    there = {group_id_of(key) for key in await bus.keys(TRAJECTORIES)}
    for group_id, fate in sorted(found.fates.items()):
        if group_id in there or fate.kind in ("failed", "dropped"):
            continue
        known = {"group": group_id, "step": fate.step, "fate": fate.kind}
        is_meant = grader is not None and (where is None or where.may_hold(known))
        if is_meant or (retract is not None and retract.may_hold(known)):
            raise no_longer_logged(directory, group_id, fate.step)
    fresh = Fate(resume_points={})
    seen: set[int] = set()
    places = asyncio.Semaphore(parallel)

    async def work(record: Record[TrajectoryGroup], group: TrajectoryGroup, fate: Fate, facts: dict[str, Any]) -> None:
        assert grader is not None
        try:
            grade = await grader.grade(record.sequence, group)
        finally:
            places.release()
        found.grades[record.sequence] = grade
        found.changes.append(_change(group, grade, fate, task=str(facts.get("task", ""))))
        say(len(found.changes))

    try:
        async with asyncio.TaskGroup() as tasks, contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
            async for record in records:
                if not is_answer(record):
                    continue
                group = record.message
                assert group is not None
                found.records.append((record.sequence, record.key, group.group_id))
                fate = found.fates.get(group.group_id, fresh)
                if group.group_id in seen or fate.sequence not in (0, record.sequence):
                    continue  # a second answer, which was not trained
                seen.add(group.group_id)
                facts = fields_of(record, fate, finder=finder)
                is_retracted = retract is not None and retract(facts)
                is_graded = not is_retracted and grader is not None and (where is None or where(facts))
                if (is_retracted or is_graded) and group.group_id in found.fates:
                    require(fate.first_step)
                if is_retracted:
                    found.retracted.add(group.group_id)
                elif is_graded:
                    await places.acquire()
                    tasks.create_task(work(record, group, fate, facts))
    except* ConfigError as errors:
        raise leaves(errors)[0] from None
    found.changes.sort(key=lambda one: (one.step, one.group))
    return found


def no_longer_logged(directory: Path, group_id: int, step: int) -> ConfigError:
    return ConfigError(
        f"{directory}: group {group_id} of step {step} is no longer on its log, which is trimmed behind checkpoints; "
        "checkpoint.keep_log = true keeps it from the start, and --where 'step > N' leaves older steps as they are"
    )


def _change(group: TrajectoryGroup, grade: Grade, fate: Fate, *, task: str) -> Change:
    old, new = np.asarray(group.rewards), np.asarray([value for value, _ in grade.rewards])
    is_other = bool(grade.error) or not np.allclose(old - old.mean(), new - new.mean(), rtol=0, atol=1e-12)
    return Change(
        group=group.group_id,
        step=fate.step,
        fate=fate.kind,
        task=task,
        old=float(old.mean()),
        new=float(new.mean()) if len(new) else math.nan,
        is_changed=grade.changes(group),
        has_other_advantages=is_other if len(group.rollouts) > 1 else grade.changes(group),
    )
