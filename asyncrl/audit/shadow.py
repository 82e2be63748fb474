"""A shadow learner: trains what a running run trains, with other settings, without taking prompts or publishing.

It reads the same log and follows the run's history, so each of its steps has the batch of the run's step. The policy
that sampled is the run's and not the shadow's: the correction weighs what the shadow's policy makes of each token, as
for any old token, and its metrics show how far the two have moved apart (offpolicy/*).

    SHADOW/                  RUN/shadows/NAME
      settings.json          what it changes, and its process
      metrics.jsonl          a row for each step, under the run's names
      states/step-N          newest states of its backend, to go on from, named like the checkpoints of the run
      weights/INCARNATION-N  newest weights as a model folder, for `asyncrl evaluate`

**It may lag.** A step whose groups are no longer on the log, or which lies further back than ``most_lag``, is passed
over and counted. **It goes back with the run**: when a learner that died resumes from a checkpoint, the steps behind it
are trained anew, so the shadow goes on from its own state of that step.

**It can take over** (`asyncrl promote`): the run's learner stops after a step n, the shadow trains up to that step, and
a checkpoint of an incarnation of its own joins its state with the run's groups, cursor and prompts, so none is lost or
trained twice. A new learner with the shadow's settings goes on from there. That incarnation resumed from version n - 1:
version n of the run is not the shadow's, so its tokens count as one version old at least, and never as fresh.

Tests: tests/integration/undo/test_shadow.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import shutil
import statistics
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.history import History, HistoryReader, last_incarnation
from asyncrl.audit import replay
from asyncrl.audit.metric_rows import Row, rows_of_newest_history
from asyncrl.audit.recorded_groups import is_answer
from asyncrl.audit.replay import Planned, ReplayTrainer
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.durable_files import link_or_copy
from asyncrl.errors import BusClosed, ConfigError
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES
from asyncrl.metrics.sinks import JsonLines
from asyncrl.os_process import is_alive, process_space
from asyncrl.policies.audit.entries import HistoryEntry, present, steps
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.metric import Metric

SETTINGS_FILE: Final = "settings.json"
CHANGEABLE: Final = (*replay.CHANGEABLE, "staleness.max_staleness", "staleness.discard")
"""Allowed prefixes for --set: the batches are the run's."""
LOOK_SECONDS: Final = 0.2
_KEPT_STATES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowStep:
    """One step of a shadow.  skipped: steps passed over so far;  lag: steps that the run is ahead"""

    step: int
    metrics: dict[str, Metric]
    skipped: int
    lag: int


def folder_of(recorded: RecordedRun, name: str) -> Path:
    return recorded.directory / "shadows" / name


def settings_of(shadow: Path) -> dict[str, Any]:
    """Return what a shadow's folder says of it: "overrides" and "pid". Raises ConfigError."""
    try:
        found: dict[str, Any] = json.loads((shadow / SETTINGS_FILE).read_text())
        if not (type(found["pid"]) is int and all(type(one) is str for one in [*found["overrides"]])):
            raise TypeError
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError(f"{shadow}: no shadow; `asyncrl shadow` makes one") from None
    return found


def require_up(shadow: Path) -> Sequence[str]:
    """Return the overrides of a shadow. Raises ConfigError if its process has ended."""
    said = settings_of(shadow)
    if not is_alive(said["pid"]):
        raise ConfigError(f"{shadow}: this shadow is not up; start it with `asyncrl shadow` on this machine")
    overrides: list[str] = said["overrides"]
    return overrides


def state_after(shadow: Path, entry: HistoryEntry) -> Path:
    """Return the folder of a shadow's state after a step. The same step of two incarnations has two."""
    return shadow / "states" / checkpoint.folder_name(entry.step, entry.incarnation)


@contextlib.contextmanager
def claim(shadow: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Hold the lock of a shadow's folder.

    Raises ConfigError while another process holds it, and for other overrides than those of its states.
    """
    shadow.mkdir(parents=True, exist_ok=True)
    with (shadow / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{shadow}: a shadow of this name is up; choose another --name, or end that one"
            ) from None
        if (shadow / SETTINGS_FILE).exists() and (there := settings_of(shadow)["overrides"]) != list(overrides):
            raise ConfigError(
                f"{shadow}: was made with {' '.join(f'--set {one}' for one in there) or 'no --set'}; go on with that, "
                "choose another --name, or remove the folder"
            )
        yield


def changed_settings(begun: HistoryEntry, overrides: Sequence[str]) -> RunConfig:
    """Return the run file of an incarnation with a shadow's changes. Raises ConfigError."""
    for item in overrides:
        if not item.startswith(CHANGEABLE) or item.startswith("learner.groups_per_batch"):
            raise ConfigError(f"--set {item}: a shadow trains the run's batches; change {', '.join(CHANGEABLE)}...")
    run = replay.change_settings(begun, overrides)
    if run.max_staleness != begun.max_staleness and run.staleness.discard != "tokens":
        raise ConfigError(
            f"--set staleness.max_staleness={run.max_staleness}: the run's batches have tokens up to "
            f"{begun.max_staleness} versions old; add --set staleness.discard=tokens, so that older ones train nothing"
        )
    return run


class Shadow:
    """Follows one run, in a folder that this process has claimed."""

    def __init__(
        self,
        recorded: RecordedRun,
        folder: Path,
        *,
        overrides: Sequence[str],
        most_lag: int,
    ) -> None:
        """most_lag: a step further behind the run is passed over; 0: none is"""
        self._recorded = recorded
        self._folder = folder
        self._overrides = tuple(overrides)
        self._most_lag = most_lag
        self._skipped = 0
        self._start = folder / ".start"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "promote").unlink(missing_ok=True)  # of an earlier start
        content = {"overrides": self._overrides, "pid": os.getpid()}
        (folder / SETTINGS_FILE).write_text(json.dumps(content))

    @property
    def _last_step(self) -> int | None:
        """The step after which a promotion wants the state; None without one."""
        try:
            return int((self._folder / "promote").read_text())
        except (OSError, ValueError):
            return None

    async def follow(self, bus: Bus) -> AsyncGenerator[ShadowStep, None]:
        """Train every step of the run from its newest checkpoint on, until the run is finished or this is promoted."""
        sink = JsonLines(self._folder / "metrics.jsonl")
        try:
            while True:
                async with contextlib.aclosing(self._follow_history(bus)) as trained:
                    async for one in trained:
                        sink.write(one.step, {**one.metrics, "shadow/skipped": float(one.skipped)})
                        yield one
                if not self._has_fallen_back:
                    return
        finally:
            sink.close()

    async def _follow_history(self, bus: Bus) -> AsyncGenerator[ShadowStep, None]:
        """Train the steps of the present history. Ends when the run falls back behind the newest of them."""
        self._has_fallen_back = False
        loop = asyncio.get_running_loop()
        newest_done, done, state = self._starting_point()
        log = _Log(bus)
        reader, num_read = HistoryReader(self._recorded.history_file), 0
        with ThreadPoolExecutor(1, thread_name_prefix="backend") as thread:
            on_thread = functools.partial(loop.run_in_executor, thread)
            trainer = ReplayTrainer(self._folder, recorded=self._recorded.directory)
            reading = asyncio.create_task(log.read())
            try:
                while True:
                    entries = await asyncio.to_thread(reader.read)
                    history = present(entries) if len(entries) > num_read else []
                    num_read = len(entries)
                    todo = list(steps(history))
                    newest = todo[-1][0].step if todo else 0
                    if history and (newest < done or newest_done not in (None, *(entry for entry, _, _ in todo))):
                        self._has_fallen_back = True
                        return
                    last = self._last_step
                    for entry, begun, resume_points in todo:
                        if entry.step <= done:
                            continue
                        lag = newest - entry.step
                        groups = await log.take(entry, reading) if self._is_near(lag, last) else None
                        done, newest_done = entry.step, entry
                        if groups is None:
                            self._skipped += 1
                            continue
                        run = changed_settings(begun, self._overrides)
                        planned = Planned(entry, begun, resume_points, run)
                        train = functools.partial(_train, trainer, planned, groups, folder=state)
                        metrics = await on_thread(train)
                        if entry.step % max(1, run.checkpoint.every_steps) == 0 or entry.step == last:
                            await on_thread(functools.partial(self._keep_state, trainer, entry))
                        yield ShadowStep(step=entry.step, metrics=metrics, skipped=self._skipped, lag=lag)
                    log.forget(history)
                    if (last is not None and done >= last) or await self._is_over(bus, done):
                        if trainer.has_trained and newest_done is not None and not self._state(newest_done).exists():
                            await on_thread(functools.partial(self._keep_state, trainer, newest_done))
                        return
                    await asyncio.sleep(LOOK_SECONDS)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                await on_thread(trainer.close)

    async def _is_over(self, bus: Bus, done: int) -> bool:
        """Whether the run trains no further step."""
        try:
            progress = (await bus.states(PROGRESS)).get("")
        except BusClosed:  # with the run
            return True
        return progress is not None and progress.finished and done >= progress.step

    def _is_near(self, lag: int, last: int | None) -> bool:
        return not self._most_lag or lag <= self._most_lag or last is not None

    # -- states --------------------------------------------------------------------------------------------------------

    def _state(self, entry: HistoryEntry) -> Path:
        return state_after(self._folder, entry)

    def _starting_point(self) -> tuple[HistoryEntry | None, int, Path | None]:
        """Return the step to go on from, as an entry and a number, and its state: our newest, else a checkpoint's."""
        history = present(self._recorded.history())
        trained = [entry for entry, _, _ in steps(history)]
        ours = {self._state(entry): entry for entry in trained}
        for state in (self._folder / "states").glob("step-*"):
            if state not in ours:
                shutil.rmtree(state)  # of a step that the run has rolled back
        if kept := [(entry, entry.step, state) for state, entry in ours.items() if state.exists()]:
            return kept[-1]
        done, folder = self._checkpoint(trained[-1].step + 1 if trained else 1, history)
        return next((entry for entry in trained if entry.step == done), None), done, folder

    def _checkpoint(self, before: int, history: Sequence[HistoryEntry]) -> tuple[int, Path | None]:
        """Return (steps done, folder) of the run's newest checkpoint. The folder is ours: the run removes its own."""
        own = self._start
        while True:
            shutil.rmtree(own, ignore_errors=True)
            done, folder = self._recorded.checkpoint_before(before, history)
            if folder is None:
                return done, None
            try:
                shutil.copytree(folder, own, copy_function=link_or_copy)
                return done, own
            except (OSError, shutil.Error):
                if folder.exists():
                    raise

    def _keep_state(self, trainer: ReplayTrainer, entry: HistoryEntry) -> None:
        """Save state and weights after a step. Blocks."""
        final = self._state(entry)
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        trainer.save(partial)
        trainer.export(incarnation=entry.incarnation, version=entry.step)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        shutil.rmtree(self._start, ignore_errors=True)  # restored by now
        for old in sorted(final.parent.glob("step-*"))[:-_KEPT_STATES]:
            shutil.rmtree(old)


def _train(
    trainer: ReplayTrainer, planned: Planned, groups: Sequence[TrajectoryGroup], *, folder: Path | None
) -> dict[str, Metric]:
    discards_tokens = planned.run.staleness.discard == "tokens"
    bound = min(planned.begun.max_staleness, planned.run.max_staleness)
    _, metrics = trainer.step(
        groups,
        run=planned.run,
        folder=folder,
        step=planned.entry.step,
        max_staleness=bound if discards_tokens else planned.begun.max_staleness,
        resume_points=planned.resume_points,
    )
    return metrics


class _Log:
    """Groups of the run's log that have no fate yet, as they arrive."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._held: dict[int, dict[int, TrajectoryGroup]] = {}
        """group -> record -> the group; a late worker may add a second record."""
        self._newest = 0
        self._done: set[int] = set()
        self._forgotten = -1  # position of the last line of the history that is dealt with
        self._news = asyncio.Event()

    async def read(self) -> None:
        async with self._bus.read(TRAJECTORIES) as records:
            async for record in records:
                self._newest = record.sequence
                self._news.set()
                if not is_answer(record):
                    continue
                group = record.message
                assert group is not None
                if group.group_id not in self._done:
                    self._held.setdefault(group.group_id, {})[record.sequence] = group

    async def take(self, entry: HistoryEntry, reading: asyncio.Task[None]) -> list[TrajectoryGroup] | None:
        """Return the groups of a step in its order, once they are read; None if one is no longer on the log."""
        while missing := [one for one in zip(entry.groups, entry.sequences, strict=True) if not self._has(*one)]:
            is_gone = self._newest >= max(sequence for _, sequence in missing)
            try:
                if is_gone or not await self._bus.depth(TRAJECTORIES):
                    return None
                if reading.done():
                    reading.result()
            except BusClosed:  # with the run
                return None
            self._news.clear()
            with contextlib.suppress(TimeoutError):  # a log that was trimmed meanwhile brings no news
                await asyncio.wait_for(self._news.wait(), LOOK_SECONDS)
        return [self._held[group][sequence] for group, sequence in zip(entry.groups, entry.sequences, strict=True)]

    def _has(self, group: int, sequence: int) -> bool:
        return sequence in self._held.get(group, {})

    def forget(self, history: Sequence[HistoryEntry]) -> None:
        """Drop the groups that have a fate."""
        for entry in history:
            if entry.position > self._forgotten:  # others were dealt with before
                self._forgotten = entry.position
                self._done.update(entry.groups)
                for group in entry.groups:
                    self._held.pop(group, None)


# -- comparison --------------------------------------------------------------------------------------------------------


def compare(recorded: RecordedRun, shadow: Path) -> tuple[list[int], list[tuple[str, float, float]]]:
    """Return the steps that a run and its shadow have trained, and (metric, mean of the run, mean of the shadow).

    The means are over these steps. Only metrics that differ, but for those of the process: first those that differ
    most, in standard deviations of the run's.
    """
    run, own = (_rows(one) for one in (recorded, RecordedRun(shadow)))
    common = sorted(run.keys() & own.keys())
    found: list[tuple[float, str, float, float]] = []
    names = set[str]().union(*(run[step].keys() & own[step].keys() for step in common))
    for name in sorted(one for one in names if one != "time" and not one.startswith("learner/")):
        pairs = [(run[step].get(name), own[step].get(name)) for step in common]
        numbers = [(float(a), float(b)) for a, b in pairs if isinstance(a, float | int) and isinstance(b, float | int)]
        if not any(a != b for a, b in numbers):
            continue
        of_run, its = (statistics.fmean(one) for one in zip(*numbers, strict=True))
        spread = statistics.pstdev(a for a, _ in numbers) or abs(of_run) or 1.0
        found.append((-abs(its - of_run) / spread, name, of_run, its))
    return common, [row[1:] for row in sorted(found)]


def _rows(recorded: RecordedRun) -> dict[int, Row]:
    return {row["step"]: row for row in rows_of_newest_history(recorded.metrics())}


# -- promotion ---------------------------------------------------------------------------------------------------------


async def promote(recorded: RecordedRun, shadow: Path, *, keep: int, say: Callable[[str], object] = print) -> int:
    """Write a checkpoint with the shadow's state at the run's newest step, and return the step. No learner may have
    the run. Raises ConfigError if the shadow is not up and has not trained that step.
    """
    found = recorded.checkpoint()
    if found is None:
        raise ConfigError(f"{recorded.directory}: has no checkpoint to put the shadow's state into")
    state, backend = found
    if not state.step:
        raise ConfigError(f"{recorded.directory}: has trained no step yet")
    trained = [entry for entry, _, _ in steps(present(recorded.history())) if entry.step == state.step]
    if not trained:
        raise ConfigError(f"{recorded.history_file}: the line of step {state.step} is gone")
    ready = state_after(shadow, trained[-1])
    wanted = shadow / "promote"
    wanted.write_text(str(state.step))  # even if its state is there already: the shadow ends then
    while not ready.exists():
        if not wanted.exists():  # the shadow has started again meanwhile
            wanted.write_text(str(state.step))
        if not is_alive(settings_of(shadow)["pid"]) and not ready.exists():
            raise ConfigError(f"{shadow}: is not up, and has no state of step {state.step}; start it again")
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.to_thread(_write_checkpoint, recorded, state, ready, folder=backend.parent.parent, keep=keep)
    say(f"shadow {shadow.name} is the learner's state from step {state.step} on")
    return state.step


def _write_checkpoint(recorded: RecordedRun, state: LearnerState, ready: Path, *, folder: Path, keep: int) -> None:
    incarnation, begun = last_incarnation(recorded.history_file) + 1, recorded.last_start()
    history = History(recorded.history_file, incarnation=incarnation)
    history.begin(
        step=state.step - 1,
        kept=state.history,
        max_staleness=begun.max_staleness,
        settings=begun.settings,
        data=begun.data,
        host=process_space(),
    )
    history.sync()
    resume_points = state.resume_points | {incarnation: state.policy_version - 1}
    changed = dataclasses.replace(state, incarnation=incarnation, resume_points=resume_points, history=history.position)
    history.close()
    copy = functools.partial(shutil.copytree, ready, dirs_exist_ok=True)
    checkpoint.finish(checkpoint.begin(folder, changed, save_backend=copy), finish_backend=dict, keep=keep)
