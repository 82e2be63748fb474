"""Prompt groups of a run in readable form, from its folder and its bus, for `asyncrl samples`.

There are three sources, each with bounded memory:

  samples.jsonl   some groups of every step, decoded, with advantage and staleness (actors/learner/sample_files.py)
  the bus         the trajectory log: every group that is still on it, from the running run or from the run's store
  the history     the fate of each group; from another machine, the events on the bus

With the run's folder the fate of every group is known; from the bus alone, only the fates in its events.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from asyncrl.actors.base import until_finished
from asyncrl.actors.learner import sample_files as sample_file
from asyncrl.adapters import registry
from asyncrl.adapters.bus_file import may_be_up
from asyncrl.audit.recorded_groups import Fate, fates_of
from asyncrl.audit.run_folder import Address, RecordedRun, connect, log_records
from asyncrl.bus.port import Bus, Record
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, ConfigError, NoHistory
from asyncrl.messages import Event, TrajectoryGroup
from asyncrl.messages.topics import EVENTS, TRAJECTORIES, Topic, group_id_of
from asyncrl.policies.audit.entries import HistoryEntry, present
from asyncrl.policies.groups.sample import PENDING, UNKNOWN, GroupSample, reason_of, sample_of
from asyncrl.policies.groups.states import FATES

MOST_HELD: Final = 4096
"""Maximum number of groups of a live run that have arrived and not met their fate; older ones are shown as pending."""
LOOK_SECONDS: Final = 0.25
"""Interval for checking a growing file; nothing signals that it grew."""
QUIET_LOOKS: Final = 20
"""How often a file has not grown before a reader asks whether its run is over. Groups are decoded after their step."""


class Fates:
    """Fates of all groups that have left the window, as far as known."""

    def __init__(self) -> None:
        self.of: dict[int, Fate] = {}
        self.is_complete = False
        """Whether every group that is not in ``of`` is pending."""

    def read_history(self, entries: Sequence[HistoryEntry]) -> None:
        """Read the fates from the history, which is authoritative but has no reasons."""
        self.of, self.is_complete = fates_of(present(entries)), True

    def note(self, event: Event) -> list[int]:
        """Process an event of the learner and return the groups that it is about."""
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
                self.of[group_id] = Fate(kind=event.kind, step=step if type(step) is int else 0, reason=reason)
        return groups

    def sample(self, group: TrajectoryGroup, *, stored: int = 0) -> GroupSample:
        """Return a group of the log with its fate. ``stored``: storage time of its record"""
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
            resume_points=fate.resume_points,
            bound=fate.bound,
        )

    def matches(self, recorded: GroupSample) -> bool:
        """Whether a recorded group belongs to the current history, not to a lost one."""
        fate = self.of.get(recorded.group_id)
        if fate is None or not self.is_complete:
            return not self.is_complete
        return (fate.kind, fate.step, fate.incarnation) == (recorded.fate, recorded.step, recorded.incarnation)


class RunSamples:
    """The groups of a run. ``directory``: its folder; None if only its bus can be reached"""

    is_of_evaluations = False

    def __init__(self, run: RunConfig, directory: Path | None, *, token: str) -> None:
        """Raises ConfigError for a folder that holds no run."""
        self.run = run
        self.directory = directory
        self.fates = Fates()
        self.why_no_log = ""
        """Why the log could not be read, so that only recorded groups are available; empty if it was read."""
        self._token = token
        self._recorded = RecordedRun(directory) if directory is not None else None
        if self._recorded is not None:
            with contextlib.suppress(NoHistory):
                self.fates.read_history(self._recorded.history())

    def read_file(self) -> Iterator[GroupSample]:
        """Yield the groups of samples.jsonl, each once, oldest first."""
        if self.directory is not None:
            newest = {row.group_id: row for row in sample_file.read(self.directory) if self.fates.matches(row)}
            yield from newest.values()

    def why_none(self) -> str:
        """Explain why the text of a group is not available."""
        why = self.why_no_log or "the log no longer has it"
        return f"Some groups of each step are recorded (metrics.samples_per_step); of the others: {why}"

    def require_dataset(self) -> None:
        """For evaluations: raise ConfigError for an unknown data set."""

    @contextlib.contextmanager
    def bus_address(self) -> Iterator[Address | None]:
        """Yield the address of the run's bus while the context is open.

        Yields None if nothing is left of the bus (see ``why_no_log``). Call this before the event loop runs.
        """
        if self._recorded is None:
            yield self.address
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
            yield address

    @property
    def address(self) -> Address:
        """The address of the bus without the run's folder."""
        return Address(*registry.bus_address(self.run, token=self._token))

    def connect(self, address: Address) -> contextlib.AbstractAsyncContextManager[Bus]:
        """Connect to the bus as an observer."""
        return connect(self.run, address)

    async def read_log(self, bus: Bus, *, newest: int = 0) -> AsyncGenerator[GroupSample, None]:
        """Yield the groups of the log in order; with ``newest``, only those of the last ``newest`` records.

        Not decoded.
        """
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
        """Read the fates and reasons from the remaining events. Returns the sequence number of the last event."""
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

    async def follow_log(self, bus: Bus) -> AsyncGenerator[GroupSample, None]:
        """Yield groups of a live run as they meet their fate, starting with recent ones; ends with the run.

        waits for: an event of the learner, an arrival    woken by: the bus
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
            await until_finished(bus)
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

    def follow_file(self) -> Generator[GroupSample, None, None]:
        """Yield groups that are added to samples.jsonl from now on; ends with the run. Close it to stop earlier.

        waits for: a line    woken by: the clock
        """
        assert self.directory is not None
        return growing(self.directory / sample_file.SAMPLES_FILE, self.is_over)

    def is_over(self) -> bool:
        """Whether nothing is added to the folder any more. False if the folder does not tell."""
        assert self.directory is not None
        if registry.bus_class(self.run).is_shared and not self.run.bus.url:
            return not may_be_up(self.directory)
        return self.has_written_all()

    def has_written_all(self) -> bool:
        """Whether the last line of the file was written or is about to be. False if it is not known."""
        return self._recorded is not None and self._recorded.has_trained_all()

    def _of_record(self, record: Record[TrajectoryGroup]) -> GroupSample | None:
        group = record.message
        if group is None or group_id_of(record.key) != group.group_id:  # not a group of this run
            return None
        return self.fates.sample(group, stored=record.stored)


def growing(path: Path, is_over: Callable[[], bool]) -> Generator[GroupSample, None, None]:
    """Yield samples that are added to a file from now on; ends once ``is_over`` and the file does not grow."""
    return _growing(path, _open_file(path, at_end=True), is_over)


def _growing(path: Path, file: BinaryIO | None, is_over: Callable[[], bool]) -> Generator[GroupSample, None, None]:
    """``file``: positioned at the start; None if it does not exist yet"""
    rest, quiet = b"", QUIET_LOOKS
    try:
        while True:
            is_last = quiet >= QUIET_LOOKS and is_over()  # asked before reading: nothing is written afterwards
            quiet = 0 if quiet >= QUIET_LOOKS else quiet + 1
            # checked before reading: a replaced file gets no more lines
            is_replaced = file is None or _is_another(path, file)
            *lines, rest = (rest + (b"" if file is None else file.read())).split(b"\n")
            if lines:
                is_last, quiet = False, 0
            for line in lines:
                if (sample := sample_file.parse(line)) is not None:
                    yield sample
            if is_replaced and (newer := _open_file(path)) is not None:
                if file is not None:
                    file.close()
                file, rest = newer, b""
                continue
            if is_last:
                return
            time.sleep(LOOK_SECONDS)
    finally:
        if file is not None:
            file.close()


def _open_file(path: Path, *, at_end: bool = False) -> BinaryIO | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    file.seek(0, os.SEEK_END if at_end else os.SEEK_SET)
    return file


def _is_another(path: Path, file: BinaryIO) -> bool:
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:  # between removal and replacement
        return False
