"""Writes a branch of a run: its recorded groups with other rewards, or without some, trained again up to its newest
step. The branch is a run of its own that `asyncrl run --resume` goes on with.

    BRANCH/
      history.jsonl, metrics.jsonl, files.jsonl, tickets    as of the run, up to the step it branches off; then new
      checkpoints/step-N                                    the state to go on from
      weights/INCARNATION-N                                 its weights as a model folder
      nats/                                                 its log, unless bus.url names a server
      lineage.json                                          the parent, the step, what was changed; written last

**What is trained.** Groups are trained in the order of the run's history, ``groups_per_batch`` at a time. If no group
is retracted and no filter decides otherwise, each batch is the recorded one. If one is left out, the next takes its
place. Filters decide again about groups with new rewards. A group that is too old for its step is dropped. What is left
over goes on with the branch, with everything on the log that was not trained yet.

**Ages.** A token keeps the version that sampled it, so it is as old as in the run, and its logprob stays that of the
policy that sampled it; the correction weighs what the branch's policy makes of it. So the weights are those of a run
that had these rewards from the start and sampled the same answers
(tests/integration/undo/test_regrade.py::test_the_branch_has_the_weights_of_a_run_that_had_the_right_rewards).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.group_filters import GroupFilters
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.adapters import registry
from asyncrl.audit.metric_rows import metrics_of
from asyncrl.audit.regrade import Regraded, no_longer_logged
from asyncrl.audit.replay import ReplayTrainer
from asyncrl.audit.run_folder import BEGUN_FILE, LINEAGE_FILE, RecordedRun, log_records
from asyncrl.bus.port import Bus, LogMark
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.durable_files import write_whole
from asyncrl.errors import ConfigError, FilterError
from asyncrl.images.store import share_images
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.metrics.sinks import JsonLines
from asyncrl.policies.audit.entries import BEGUN, HistoryEntry, damage, promotions
from asyncrl.policies.groups import saved_table
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.groups.states import Fate as FateName
from asyncrl.policies.groups.states import PublishedPrompt
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.metric import Metric

_COPIED: Final = ("files.jsonl", "tickets")
_NO_BATCH: Final = (
    "regrade: without the groups that are retracted or cannot be graded no batch is left to train, so the branch would "
    "be a new run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """What a branch shares with its run.

    history        present history of the run
    step           last step of it, up to which the branch is trained
    next_group_id  ids below it were published, as far as the history and the newest checkpoint say
    prompts        of the newest checkpoint;  groups_per_batch: of every step
    """

    recorded: RecordedRun
    history: Sequence[HistoryEntry]
    step: int
    next_group_id: int
    prompts: PromptState
    groups_per_batch: int


def trunk_of(recorded: RecordedRun, history: Sequence[HistoryEntry]) -> Trunk:
    """Return what can be branched off a run. ``history``: its present history. Raises ConfigError."""
    if problems := damage(history):
        raise ConfigError(f"{recorded.directory}: {problems[0]}; so the record does not say what was trained")
    trained = [entry.step for entry in history if entry.kind == "trained"]
    if not trained:
        raise ConfigError(f"{recorded.directory}: has trained no step yet")
    found = recorded.checkpoint()
    prompts = PromptState() if found is None else found[0].prompts
    return Trunk(
        recorded=recorded,
        history=history,
        step=trained[-1],
        next_group_id=max([prompts.next_group_id, *(1 + max(entry.groups) for entry in history if entry.groups)]),
        prompts=prompts,
        groups_per_batch=recorded.newest_settings().learner.groups_per_batch,
    )


@contextlib.contextmanager
def holding(trunk: Trunk, out: Path) -> Iterator[None]:
    """Hold the run's checkpoints for its branch in ``out``: a run that is up removes them while groups are graded.

    They are hard links in BRANCH/regrade/checkpoints, which also a command that is interrupted leaves for the next;
    where files cannot be linked none is held.
    """
    held = _held(out).directory / "checkpoints"
    for folder in checkpoint.list_complete(trunk.recorded.directory / "checkpoints"):
        partial = held / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        if not (held / folder.name).exists():
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(folder, partial, copy_function=os.link)
                partial.rename(held / folder.name)
    try:
        yield
    except ConfigError:
        if not (out / BEGUN_FILE).exists():
            shutil.rmtree(held, ignore_errors=True)
        raise
    shutil.rmtree(held, ignore_errors=True)


def _held(out: Path) -> RecordedRun:
    """Return a folder with the checkpoints that a branch holds."""
    return RecordedRun(out / "regrade")


def starting_point(trunk: Trunk, out: Path, *, first: int) -> tuple[int, Path | None]:
    """Return (steps done, backend folder) of the checkpoint from which ``first`` can start; (0, None) without one."""
    places = (_held(out), trunk.recorded)
    return max((one.checkpoint_before(first, trunk.history) for one in places), key=lambda found: found[0])


def first_own_step(trunk: Trunk, out: Path) -> int:
    """Return the first step that a branch can change. Behind a promotion it needs a checkpoint from there."""
    if not (promoted := promotions(trunk.history)):
        return 1
    places = (_held(out), trunk.recorded)
    behind = (done for one in places for done, _ in one.checkpoints(trunk.history) if done >= promoted[-1])
    return 1 + min(behind, default=trunk.step)


def require_own_states(trunk: Trunk, step: int, *, first: int) -> None:
    """Raise ConfigError if a branch that changes ``step`` would have to train across a promotion.

    first  the first step that it can change (first_own_step)
    """
    if step < first:
        promoted = promotions(trunk.history)[-1]
        raise ConfigError(
            f"{trunk.recorded.directory}: step {promoted + 1} goes on from the state of a shadow (`asyncrl promote`), "
            f"which a branch that changes step {step} does not have; leave what is older than the first checkpoint "
            f"behind it with --where or --retract '... and step > {first - 1}'"
        )


def require_batch(trunk: Trunk, regraded: Regraded, out: Path, *, first: int) -> None:
    """Raise ConfigError if there is no checkpoint before step ``first``, and too few groups are left for a step."""
    if starting_point(trunk, out, first=first)[1] is not None:
        return
    lost = regraded.retracted | {grade.group for grade in regraded.grades.values() if grade.error}
    trained = (entry for entry in trunk.history if entry.kind in ("trained", "filtered"))
    if len({group_id for entry in trained for group_id in entry.groups} - lost) < trunk.groups_per_batch:
        raise ConfigError(_NO_BATCH)


async def copy_log(source: Bus, target: Bus, regraded: Regraded) -> dict[int, int]:
    """Publish the records of the run on the branch's log, with new rewards. Return old -> new sequence.

    A retracted group that was not trained yet is left out: the branch asks its prompt again. What an interrupted
    command has published is not published again.
    """
    known = {sequence for sequence, _, _ in regraded.records}
    done = await target.last_sequence(TRAJECTORIES)
    sequences: dict[int, int] = {}
    async with contextlib.aclosing(log_records(source, TRAJECTORIES)) as records:
        async for record in records:
            group = record.message
            if record.sequence not in known or group is None:
                continue
            if group.group_id in regraded.retracted and group.group_id not in regraded.fates:
                continue
            sequences[record.sequence] = len(sequences) + 1
            if len(sequences) > done:
                grade = regraded.grades.get(record.sequence)
                await target.publish(TRAJECTORIES, group if grade is None else grade.apply(group), key=record.key)
    return sequences


async def write_branch(
    trunk: Trunk,
    regraded: Regraded,
    *,
    run: RunConfig,
    bus: Bus,
    sequences: Mapping[int, int],
    position: Callable[[int], int],
    lineage: Mapping[str, Any],
    say: Callable[[int, Mapping[str, Metric]], None] = lambda step, metrics: None,
) -> LearnerState:
    """Train the branch and write its folder. Return the state that it goes on from.

    run        the run file of the branch: the run's newest, with the branch's name, and the new reward
    bus        the branch's;  sequences: of its log, by those of the run's
    position   group -> position of its row;  lineage: what to record besides the parent and the steps
    say        called after each step that is trained again

    Raises ConfigError if a group that is to be trained is no longer on the log.
    """
    out = run.run_directory
    for name in (HISTORY_FILE, "metrics.jsonl", "checkpoints", "weights"):  # of an interrupted command
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name in _COPIED:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(trunk.recorded.directory / name, out / name)
    await asyncio.to_thread(share_images, trunk.recorded.directory, out)
    first = regraded.first_step(trained=trunk.step)
    done, folder = starting_point(trunk, out, first=first)
    # a checkpoint that could not be held may be gone
    require_own_states(trunk, done + 1, first=1 + max(promotions(trunk.history), default=0))
    retraining = _Retraining(trunk, regraded, run=run, sequences=sequences, position=position, done=done)
    loop = asyncio.get_running_loop()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="backend") as thread:
            on_thread = functools.partial(loop.run_in_executor, thread)

            async def train() -> None:
                while (step := retraining.next_step()) is not None:
                    metrics = await on_thread(functools.partial(step, folder))
                    say(retraining.table.step, metrics)

            try:
                async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
                    async for record in records:
                        group = record.message
                        assert group is not None, record.problem  # published by us
                        if record.sequence in retraining.needed:
                            retraining.held[record.sequence] = group
                        await train()
                await train()
                if retraining.missing is not None:
                    raise no_longer_logged(trunk.recorded.directory, *retraining.missing)
                found = await bus.log_state(TRAJECTORIES, mark=LogMark())
                retraining.table.log = found.identity
                state = retraining.finish()
                save = functools.partial(_save, state, run, retraining.trainer, folder=folder)
                await on_thread(save)
            finally:
                await on_thread(retraining.trainer.close)
    finally:
        retraining.close()
    parent = hashlib.sha256(trunk.recorded.history_file.read_bytes()).hexdigest()
    about = {
        "parent": str(trunk.recorded.directory.absolute()),
        "parent_history_sha256": parent,
        "branched_off_at_step": first - 1,
        "trained_again_from_step": done,
        "parent_step": trunk.step,
        "step": state.step,
        **lineage,
    }
    write_whole(out / LINEAGE_FILE, json.dumps(about, indent=1))
    return state


class _Retraining:
    """Goes through the run's history once, and makes the branch's: in its table, history and metrics."""

    def __init__(
        self,
        trunk: Trunk,
        regraded: Regraded,
        *,
        run: RunConfig,
        sequences: Mapping[int, int],
        position: Callable[[int], int],
        done: int,
    ) -> None:
        """done: steps that the branch shares with the run"""
        self._trunk, self._regraded, self._run, self._sequences = trunk, regraded, run, sequences
        self._done, out = done, run.run_directory
        self.held: dict[int, TrajectoryGroup] = {}
        """Groups read from the branch's log, by sequence, until they are trained."""
        self.missing: tuple[int, int] | None = None
        """(group, step) that is needed next, and not read yet."""
        self.trainer = ReplayTrainer(out)
        prompts, published = trunk.prompts, trunk.next_group_id
        place = prompts.position if published == prompts.next_group_id else position(published - 1) + 1
        self.table = GroupTable(
            next_group_id=published,
            position=place,
            overlong=place - published,
            outstanding={group_id: PublishedPrompt(position=position(group_id)) for group_id in range(published)},
        )
        for group_id, at in prompts.outstanding.items():
            start = prompts.oldest_start.get(group_id)
            self.table.outstanding[group_id] = PublishedPrompt(position=at, oldest_start=start)
        # the record of a group that counts; a second answer is passed over
        self._records: dict[int, int] = {}
        for sequence, _, group_id in regraded.records:
            if (new := sequences.get(sequence)) is not None:
                fate = regraded.fates.get(group_id)
                if fate is not None and fate.sequence == sequence:
                    self._records[group_id] = new
                else:
                    self._records.setdefault(group_id, new)
        again = (entry for entry in trunk.history if entry.kind in ("trained", "filtered") and entry.step >= done)
        self.needed = {self._records.get(group_id, 0) for entry in again for group_id in entry.groups}
        """Sequences of the branch's log that may be trained again."""
        self._metrics = JsonLines(out / "metrics.jsonl")
        self._rows = trunk.recorded.metrics()
        self._history: History | None = None
        self._entries = iter(trunk.history)
        self._entry: HistoryEntry | None = None
        self._left: list[int] = []  # groups of the entry that are not dealt with yet
        self._begun: HistoryEntry
        self._settings: RunConfig
        self._filters: GroupFilters
        self._selection: Selection

    def close(self) -> None:
        self._metrics.close()
        if self._history is not None:
            self._history.close()

    def next_step(self) -> Callable[[Path | None], dict[str, Metric]] | None:
        """Go on to the next step to train, and return what trains it; it takes the folder to start from.

        None: at the end, or ``missing`` says which group has to be read first.
        """
        while True:
            if (step := self._batch()) is not None:
                return step
            if not self._left and not self._next_entry():
                return None
            if not self._go_through():
                return None

    def finish(self) -> LearnerState:
        """Return the state to go on from. The history is on disk."""
        table = self.table
        for waiting in list(table.buffered.values()):  # too few for a batch: read again by the learner
            table.outstanding[waiting.group_id] = table.buffered.pop(waiting.group_id).prompt
        for sequence, _, group_id in self._regraded.records:
            if (new := self._sequences.get(sequence)) is not None and group_id in table.done:
                table.consumed.add(new)
        assert self._history is not None
        self._history.sync()
        state = saved_table.save(table, groups_per_batch=self._trunk.groups_per_batch, history=self._history.position)
        return dataclasses.replace(state, log={"identity": table.log, "sequence": 0, "stored": 0})

    # -- the history, line by line -------------------------------------------------------------------------------------

    def _next_entry(self) -> bool:
        self._entry = entry = next(self._entries, None)
        if entry is None:
            return False
        if entry.kind == BEGUN:
            self._begin(entry)
        elif entry.kind == "trained" and entry.step <= self._done:
            self._repeat(entry)
        else:
            self._left = list(entry.groups)
        return True

    def _begin(self, entry: HistoryEntry) -> None:
        """A learner begins, in the branch as in the run: at the branch's step."""
        table, name = self.table, self._run.run.name
        settings = json.loads(json.dumps(dict(entry.settings)))
        settings["run"] |= {"name": name, "directory": self._run.run.directory}
        settings["reward"] = config_record.as_table(self._run)["reward"]
        table.incarnation = entry.incarnation
        # a promotion begins one version before the newest step; a branch has none behind ``done``
        step = min(table.step, entry.step) if table.step <= self._done else table.step
        if entry.incarnation:
            table.resume_points = {**table.resume_points, entry.incarnation: step}
        kept = 0
        if self._history is not None:
            kept = self._history.position
            self._history.close()
        self._history = History(self._run.run_directory / HISTORY_FILE, incarnation=entry.incarnation)
        self._history.begin(
            step=step,
            kept=kept,
            max_staleness=entry.max_staleness,
            settings=settings,
            data=entry.data,
            host=entry.host,
        )
        self._begun, self._settings = entry, self._trunk.recorded.settings(entry)
        section = self._settings.algorithm
        self._filters = GroupFilters(
            registry.filters(self._settings),
            max_in_a_row=2**62,
            cap=section.filter_cap,
            keeps_at_cap=section.filter_cap_action == "keep",
        )
        self._selection = Selection(max_staleness=entry.max_staleness, discard=self._settings.staleness.discard)
        for waiting in list(table.buffered.values()):  # their versions count anew
            table.outstanding[waiting.group_id] = table.buffered.pop(waiting.group_id).prompt
            self._buffer(waiting.group_id, waiting.group)

    def _repeat(self, entry: HistoryEntry) -> None:
        """A step that the branch shares with the run."""
        table = self.table
        sequences = [self._sequences.get(sequence, 0) for sequence in entry.sequences]
        for group_id in entry.groups:
            self._end("trained", group_id)
        table.step = table.batches_taken = entry.step
        table.counts_before_step = dict(table.counts)
        assert self._history is not None
        self._history.record_trained(
            entry.groups,
            sequences=sequences if all(sequences) else (),  # some may be trimmed
            step=entry.step,
            max_staleness=entry.max_staleness,
            old_trajectories=entry.old_trajectories,
            old_tokens=entry.old_tokens,
        )
        if (row := self._rows.get((entry.incarnation, entry.step))) is not None:
            self._metrics.write(entry.step, metrics_of(row))

    def _go_through(self) -> bool:
        """Deal with the groups of an entry, until a batch is full. Return False if one of them has to be read first."""
        entry = self._entry
        assert entry is not None
        while self._left and len(self.table.buffered) < self._count:
            group_id = self._left[0]
            if group_id in self._regraded.retracted:
                self._lose("dropped", group_id)
            elif entry.kind in ("dropped", "failed"):
                self._lose("failed" if entry.kind == "failed" else "dropped", group_id)
            elif entry.kind == "filtered" and group_id not in self._regraded.changed:
                self._lose("filtered", group_id)
            else:
                sequence = self._records.get(group_id, 0)
                if sequence not in self.held:
                    self.missing = (group_id, entry.step)
                    return False
                self._decide(group_id, self.held.pop(sequence))
            self._left.pop(0)
        self.missing = None
        return True

    @property
    def _count(self) -> int:
        return self._trunk.groups_per_batch

    def _decide(self, group_id: int, group: TrajectoryGroup) -> None:
        """Buffer a group that was trained or filtered, unless its new rewards fail it or a filter rejects it."""
        if group.error:
            self._lose("failed", group_id)
            return
        if group_id in self._regraded.changed:
            since = self.table.lost_since_step("filtered")
            try:
                changed = self.trainer.hooks_of(self._settings).group(group)  # the trainer changes it again
                is_kept = self._filters.keep(changed, since_step=since, is_counted=False)
            except FilterError:
                self._lose("failed", group_id)
                return
            if not is_kept:
                self._lose("filtered", group_id)
                return
        self._buffer(group_id, group)

    def _buffer(self, group_id: int, group: TrajectoryGroup) -> None:
        self.table.arrive(self._records[group_id], group, now=0.0)

    def _lose(self, fate: FateName, group_id: int) -> None:
        self._end(fate, group_id)
        assert self._history is not None
        self._history.record_lost(fate, [group_id], step=self.table.step)

    def _end(self, fate: FateName, group_id: int) -> None:
        table = self.table
        table.outstanding.pop(group_id, None)
        table.done.add(group_id)
        table.counts[fate] += 1

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _batch(self) -> Callable[[Path | None], dict[str, Metric]] | None:
        """Take the next batch, if there are enough groups that are young enough."""
        if self._entry is None or len(self.table.buffered) < self._count:
            return None
        for stale in self._selection.stale(self.table):
            outcome = self.table.drop([stale])
            assert self._history is not None
            self._history.record_lost("dropped", outcome.group_ids, step=outcome.step)
        if len(self.table.buffered) < self._count:
            return None
        self.table.take(list(self.table.buffered.values())[: self._count])
        return self._train

    def _train(self, folder: Path | None) -> dict[str, Metric]:
        table, begun = self.table, self._begun
        batch, metrics = self.trainer.step(
            [one.group for one in table.training.values()],
            run=self._settings,
            folder=folder,
            step=table.step + 1,
            max_staleness=begun.max_staleness,
            resume_points=table.resume_points,
        )
        outcome = table.trained(
            max_staleness=batch.max_staleness, old_trajectories=batch.old_trajectories, old_tokens=batch.old_tokens
        )
        assert self._history is not None
        self._history.record_trained(
            outcome.group_ids,
            sequences=outcome.sequences,
            step=outcome.step,
            max_staleness=outcome.max_staleness,
            old_trajectories=outcome.old_trajectories,
            old_tokens=outcome.old_tokens,
        )
        metrics["learner/incarnation"] = float(begun.incarnation)
        self._metrics.write(outcome.step, metrics)
        return metrics


def _save(state: LearnerState, run: RunConfig, trainer: ReplayTrainer, *, folder: Path | None) -> None:
    """Write the branch's checkpoint and weights. Without a trained step the checkpoint in ``folder`` is copied."""

    def save_backend(target: Path) -> None:
        if trainer.has_trained:
            trainer.save(target)
        elif folder is not None:
            shutil.copytree(folder, target, dirs_exist_ok=True)
        else:
            raise ConfigError(_NO_BATCH)

    unfinished = checkpoint.begin(run.run_directory / "checkpoints", state, save_backend=save_backend)
    checkpoint.finish(unfinished, finish_backend=dict, keep=1)
    if trainer.has_trained:
        trainer.export(incarnation=state.incarnation, version=state.step)


def lineage_of(directory: Path) -> dict[str, Any] | None:
    """Return where a branch comes from; None for a run that is no branch, or one that is not written completely."""
    try:
        found: dict[str, Any] = json.loads((directory / LINEAGE_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found
