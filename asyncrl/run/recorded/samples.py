"""Prompt groups of a run as a person reads them, from its folder and its bus: what `asyncrl samples` shows.

Three sources, each bounded in what it holds in memory:

  samples.jsonl   some groups of every step, decoded, with advantage and staleness (state/samples.py)
  the bus         the trajectory log: every group that is still on it; of the run that is up, or of its own store
  the history     what became of each group; from another machine, the events on the bus

Who has the run's folder is told every group's fate; from the bus alone, those of its events.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, ConfigError, NoHistory
from asyncrl.messages import Event, TrajectoryGroup
from asyncrl.messages.topics import EVENTS, PROGRESS, SETTINGS, TRAJECTORIES, Topic, group_id_of
from asyncrl.policies.audit.entries import BEGUN, DAMAGED, HistoryEntry, present
from asyncrl.policies.groups.sample import PENDING, UNKNOWN, GroupSample, reason_of, sample_of
from asyncrl.policies.groups.states import FATES
from asyncrl.policies.staleness.staleness import Forks
from asyncrl.protocols import Bus, Record
from asyncrl.run import registry
from asyncrl.run.recorded.run_folder import RecordedRun, log_records
from asyncrl.state import samples as sample_file

MOST_HELD: Final = 4096
"""Groups of a live run that have arrived and not met their fate; older ones are shown as pending."""
LOOK_SECONDS: Final = 0.25
"""How often a file that grows is looked at: nobody announces that it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of a group, and at which step; ``forks``: as the learner saw them then; ``bound``: as sample_of's."""

    kind: str
    step: int
    incarnation: int
    reason: str = ""
    forks: Forks | None = None
    bound: int | None = None


class Fates:
    """Of every group that has left the window, as far as is known."""

    def __init__(self) -> None:
        self.of: dict[int, Fate] = {}
        self.is_complete = False
        """Whether a group that is not in it is pending for sure."""

    def read_history(self, entries: Sequence[HistoryEntry]) -> None:
        """What the history says is what counts; it knows no reasons."""
        forks: dict[int, int] = {}
        bound: int | None = None
        for entry in present(entries):
            if entry.kind == BEGUN:
                bound = entry.max_staleness if entry.too_old == "tokens" else None
            if entry.kind == BEGUN and entry.incarnation > 0:
                forks = forks | {entry.incarnation: entry.step}
            if entry.kind in (BEGUN, DAMAGED):
                continue
            for group_id in entry.groups:
                self.of[group_id] = Fate(
                    kind=entry.kind,
                    step=entry.step,
                    incarnation=entry.incarnation,
                    reason=entry.cause,
                    forks=forks,
                    bound=bound,
                )
        self.is_complete = True

    def note(self, event: Event) -> list[int]:
        """An event of the learner's. The groups that it is about."""
        if event.kind not in FATES:
            return []
        found = event.data.get("group_ids", [event.data.get("group_id")])
        groups = [group_id for group_id in found if type(group_id) is int] if isinstance(found, list) else []
        for group_id in groups:
            reason = reason_of(event.kind, event.data)
            if (known := self.of.get(group_id)) is not None and known.kind == event.kind:
                self.of[group_id] = dataclasses.replace(known, reason=reason or known.reason)
            elif not self.is_complete:
                step = event.data.get("step", 0)
                self.of[group_id] = Fate(
                    kind=event.kind, step=step if type(step) is int else 0, incarnation=0, reason=reason
                )
        return groups

    def sample(self, group: TrajectoryGroup, *, stored: int = 0) -> GroupSample:
        """As it is on the log, with what became of it. ``stored``: as of its record."""
        fate = self.of.get(group.group_id)
        if fate is None:
            return sample_of(group, fate=PENDING if self.is_complete else UNKNOWN, time=stored / 1e9)
        return sample_of(
            group,
            fate=fate.kind,
            step=fate.step,
            incarnation=fate.incarnation,
            reason=fate.reason,
            time=stored / 1e9,
            forks=fate.forks,
            bound=fate.bound,
        )

    def matches(self, recorded: GroupSample) -> bool:
        """Whether it is of the history that counts, and not of one that a learner lost."""
        fate = self.of.get(recorded.group_id)
        if fate is None or not self.is_complete:
            return not self.is_complete
        return (fate.kind, fate.step, fate.incarnation) == (recorded.fate, recorded.step, recorded.incarnation)


class RunSamples:
    """The groups of a run. ``directory``: its folder; None: only its bus can be reached."""

    is_of_evaluations = False

    def __init__(self, run: RunConfig, directory: Path | None, *, token: str) -> None:
        """Raises ConfigError for a folder that holds no run."""
        self.run = run
        self.directory = directory
        self.fates = Fates()
        self.why_no_log = ""
        """Why the log could not be read, so that only what was recorded is there; empty when it was."""
        self._token = token
        self._recorded = RecordedRun(directory) if directory is not None else None
        if self._recorded is not None:
            with contextlib.suppress(NoHistory):
                self.fates.read_history(self._recorded.history())

    def recorded(self) -> Iterator[GroupSample]:
        """Those of samples.jsonl, each once, the oldest first."""
        if self.directory is not None:
            newest = {row.group_id: row for row in sample_file.read(self.directory) if self.fates.matches(row)}
            yield from newest.values()

    def why_none(self) -> str:
        """Why a group's text is not here."""
        why = self.why_no_log or "the log no longer has it"
        return f"Some groups of each step are recorded (metrics.samples_per_step); of the others: {why}"

    def require_dataset(self) -> None:
        """Where they are of evaluations: raises ConfigError for a data set that nobody knows."""

    @contextlib.contextmanager
    def bus_address(self) -> Iterator[RunConfig | None]:
        """The run file with the address of its bus while this is open, None when nothing is left of it (``why_no_log``
        says why). Call it before the event loop runs."""
        if self._recorded is None:
            yield self.run
            return
        with contextlib.ExitStack() as stack:
            try:
                address = stack.enter_context(self._recorded.server(self.run, token=self._token))
            except ConfigError as error:
                self.why_no_log, address = str(error), None
            if address is None:
                self.why_no_log = self.why_no_log or self._recorded.why_no_log(self.run)
                yield None
                return
            self._token = address.token
            yield dataclasses.replace(self.run, bus=dataclasses.replace(self.run.bus, url=address.url))

    def connected(self, there: RunConfig) -> contextlib.AbstractAsyncContextManager[Bus]:
        """The bus at ``bus_address``, as an observer."""
        return observing(there, token=self._token)

    async def logged(self, bus: Bus, *, newest: int = 0) -> AsyncGenerator[GroupSample, None]:
        """Those of the log, in its order; with ``newest`` only the last so many records.  Not decoded."""
        await self.read_events(bus)
        last = await bus.last_sequence(TRAJECTORIES)
        if not last:
            self.why_no_log = "its log is empty: no group has arrived yet"
            return
        if not await bus.depth(TRAJECTORIES):
            self.why_no_log = "its log is empty: what was trained is trimmed unless checkpoint.keep_log = true"
            return
        after = max(0, last - newest) if newest else 0
        async with contextlib.aclosing(log_records(bus, TRAJECTORIES, after=after)) as records:
            async for record in records:
                if (sample := self._of_record(record)) is not None:
                    yield sample

    async def read_events(self, bus: Bus) -> int:
        """The fates and reasons of the events that are still there. Sequence of the last one."""
        last = await bus.last_sequence(EVENTS)
        if not last or not await bus.depth(EVENTS):
            return last
        async with bus.read(EVENTS) as records:
            async for record in records:
                if record.message is not None:
                    self.fates.note(record.message)
                if record.sequence >= last:
                    break
        return last

    async def arriving(self, bus: Bus) -> AsyncGenerator[GroupSample, None]:
        """Groups of a live run as they meet their fate, those that just did first; ends with the run.

        waits for: an event of the learner's, an arrival    woken by: the bus
        """
        held: dict[int, GroupSample] = {}
        found: asyncio.Queue[tuple[str, Record[Any]] | dict[str, int] | Exception] = asyncio.Queue(maxsize=MOST_HELD)
        since: dict[Topic[Any], int] = {EVENTS: await self.read_events(bus)}
        since[TRAJECTORIES] = max(0, await bus.last_sequence(TRAJECTORIES) - self.run.window)
        seen = {topic.name: after for topic, after in since.items()}

        async def feed(topic: Topic[Any]) -> None:
            async with bus.read(topic, after=since[topic]) as records:
                async for record in records:
                    await found.put((topic.name, record))

        async def end() -> None:
            async with bus.watch(PROGRESS) as progress:
                async for said in progress:
                    if said.finished:
                        break
            await found.put({topic.name: await bus.last_sequence(topic) for topic in since})

        async def telling(work: Coroutine[Any, Any, None]) -> None:
            try:
                await work
            except AsyncRLError as error:
                await found.put(error)

        tasks = [asyncio.create_task(telling(work)) for work in (feed(TRAJECTORIES), feed(EVENTS), end())]
        until: Mapping[str, int] | None = None
        try:
            while until is None or any(seen[name] < last for name, last in until.items()):
                item = await found.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, dict):
                    until = item
                    continue
                name, record = item
                seen[name] = record.sequence
                if isinstance(record.message, Event):
                    for group_id in self.fates.note(record.message):
                        if (sample := held.pop(group_id, None)) is not None:
                            fate = self.fates.of[group_id]
                            yield dataclasses.replace(sample, fate=fate.kind, step=fate.step, reason=fate.reason)
                elif (sample := self._of_record(record)) is not None and sample.fate in FATES:
                    yield sample
                elif sample is not None:
                    held[sample.group_id] = dataclasses.replace(sample, fate=PENDING)
                    if len(held) > MOST_HELD:
                        yield held.pop(next(iter(held)))
            for sample in held.values():
                yield sample
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def growing(self) -> Generator[GroupSample, None, None]:
        """Groups that samples.jsonl gets from now on, without end; close it.

        waits for: a line    woken by: the clock
        """
        assert self.directory is not None
        return growing(self.directory / sample_file.SAMPLES_FILE)

    def _of_record(self, record: Record[TrajectoryGroup]) -> GroupSample | None:
        group = record.message
        if group is None or group_id_of(record.key) != group.group_id:  # no group of the run's
            return None
        return self.fates.sample(group, stored=record.stored)


@contextlib.asynccontextmanager
async def observing(run: RunConfig, *, token: str) -> AsyncIterator[Bus]:
    """The run's bus for somebody who only looks. Raises ConfigError."""
    bus = await registry.observe(run, token=token)
    try:
        yield bus
    finally:
        await bus.close()


async def model_path(bus: Bus, run: RunConfig) -> str:
    """Where the run's model is, by its run file or by what its learner left on the bus."""
    if run.model.path:
        return run.model.path
    settings = (await bus.states(SETTINGS)).get("")
    model: Mapping[str, Any] = settings.sections.get("model", {}) if settings is not None else {}
    return str(model.get("path", ""))


def growing(path: Path) -> Generator[GroupSample, None, None]:
    """What a file of samples gets from now on, without end; close it."""
    return _growing(path, _opened(path, at_end=True))


def _growing(path: Path, file: BinaryIO | None) -> Generator[GroupSample, None, None]:
    """``file``: at the place to begin from; None: it is not there yet."""
    rest = b""
    try:
        while True:
            is_replaced = file is None or _is_another(path, file)  # asked first: it gets no line after it was replaced
            *lines, rest = (rest + (b"" if file is None else file.read())).split(b"\n")
            for line in lines:
                if (sample := sample_file.parsed(line)) is not None:
                    yield sample
            if is_replaced and (newer := _opened(path)) is not None:
                if file is not None:
                    file.close()
                file, rest = newer, b""
                continue
            time.sleep(LOOK_SECONDS)
    finally:
        if file is not None:
            file.close()


def _opened(path: Path, *, at_end: bool = False) -> BinaryIO | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    file.seek(0, os.SEEK_END if at_end else os.SEEK_SET)
    return file


def _is_another(path: Path, file: BinaryIO) -> bool:
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:  # between two
        return False
