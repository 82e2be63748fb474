"""Index of the newest prompt groups of a run, for the table of `asyncrl board`.

A row of each group is kept, in bounded memory. Text is read when a group is opened:

  history.jsonl   the fate of every group, and its position on the log
  samples.jsonl   some groups of every step, with text, reward and advantage; evaluation_samples.jsonl: evaluations
  events          from the bus: why a group was not trained; without a folder, also its fate
  the log         for an opened group that was not recorded, while its run still has it

Tests: tests/unit/board/test_group_index.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.learner import history
from asyncrl.actors.learner import sample_files as samples
from asyncrl.audit.run_folder import Address
from asyncrl.audit.samples import RunSamples
from asyncrl.board.file_tail import FileTail
from asyncrl.config import RunConfig
from asyncrl.data.tokenizer import load_decode
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.messages import Event
from asyncrl.messages.evaluation import FIRST_GROUP_ID
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.audit.entries import BEGUN, HistoryEntry
from asyncrl.policies.groups.sample import EVALUATED, Decode, GroupSample, decoded, reason_of
from asyncrl.policies.groups.states import FATES
from asyncrl.policies.groups.token_text import token_texts
from asyncrl.policies.groups.turn_text import question_in

MOST_GROUPS: Final = 5000
MOST_SCANNED: Final = 2000
"""Maximum number of log records that are read for a group whose position there is not known."""
PREVIEW: Final = 120
"""Maximum number of characters of a prompt or label in its row."""
MOST_KEPT: Final = 2000
"""Maximum number of characters of a prompt that are kept, to find where it differs from others."""
LEAST_COMMON: Final = 24
"""A beginning that all prompts have in common is left out from this many characters on."""
MOST_ROWS: Final = 500
_OF_EVALUATIONS: Final = (samples.SAVED_MODELS_FILE, samples.EVALUATION_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """Everything known about a group without its text.

    position  position of its line in the history; -1 for an event
    sequence  sequence number of its record on the log; 0 if unknown
    reward    mean over ``answers`` answers
    tokens    sum over all answers

    Fields that are None were not recorded.
    """

    group_id: int
    fate: str
    step: int
    position: int = -1
    sequence: int = 0
    reason: str = ""
    worker: str | None = None
    reward: float | None = None
    lowest: float | None = None
    highest: float | None = None
    staleness: int | None = None
    seconds: float | None = None
    tokens: int | None = None
    answers: int | None = None
    prompt: str | None = None
    label: str | None = None
    dataset: str | None = None
    place: int | None = None
    model: str | None = None

    def matches(self, text: str) -> bool:
        words = (
            f"{self.group_id} {self.fate} {self.worker or ''} {self.reason} {self.dataset or ''} {self.prompt or ''} "
            f"{self.label or ''}"
        )
        return text.lower() in words.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGroup:
    """texts: for each answer, the text of each token; empty without the run's tokenizer: ``problem`` says why"""

    sample: GroupSample
    texts: Sequence[Sequence[str]] = ()
    problem: str = ""


ORDERS: Final = {
    "newest": lambda row: -row.position if row.position >= 0 else -row.group_id,
    "worst": lambda row: (row.lowest is None, row.lowest or 0.0),
    "best": lambda row: (row.highest is None, -(row.highest or 0.0)),
    "stalest": lambda row: (row.staleness is None, -(row.staleness or 0)),
    "longest": lambda row: (row.tokens is None, -(row.tokens or 0)),
}


class GroupIndex:
    """directory: None if only the bus can be reached"""

    def __init__(self, settings: Callable[[], RunConfig], directory: Path | None, *, token: str) -> None:
        """settings: returns the run's settings as recorded now"""
        self._settings, self._directory, self._token = settings, directory, token
        self._rows: dict[int, GroupRow] = {}
        self._evaluated: dict[int, GroupRow] = {}
        # sample identity -> number in the table, because a group id names a prompt of one evaluation only
        self._numbers: dict[Hashable, int] = {}
        self._places: dict[int, tuple[int, int, int]] = {}  # place in a samples file: inode, position, bytes
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one read of the log at a time, because it may start a nats-server
        self._decode: Decode | None = None
        self._has_older = False
        if directory is not None:
            self._history = FileTail(directory / history.HISTORY_FILE)
            self._samples = FileTail(directory / samples.SAMPLES_FILE)
            self._evaluations = [FileTail(directory / name) for name in _OF_EVALUATIONS]

    # -- what is known -----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what is new in the folder. Blocks."""
        if self._directory is None:
            return
        is_other = self._read_samples(self._samples)
        if is_other or not self._has_older:  # lines that were written last before the file was rotated
            self._read_samples(FileTail(self._directory / samples.OLDER_FILE))
        if not self._has_older:
            for name in _OF_EVALUATIONS:
                self._read_evaluations(FileTail(self._directory / samples.older_name(name)))
        for tail in self._evaluations:
            self._read_evaluations(tail)
        self._has_older = True

    def note(self, event: Event) -> None:
        """Process an event of the learner."""
        if event.kind not in FATES:
            return
        step, found = event.data.get("step", 0), event.data.get("group_ids", [event.data.get("group_id")])
        with self._lock:
            for group_id in found if isinstance(found, list) else ():
                if type(group_id) is not int:
                    continue
                reason = reason_of(event.kind, event.data)
                if (row := self._rows.get(group_id)) is not None and row.fate == event.kind:
                    self._rows[group_id] = replace(row, reason=reason or row.reason)
                elif self._directory is None:
                    step = step if type(step) is int else 0
                    self._put(GroupRow(group_id=group_id, fate=event.kind, step=step, reason=reason))

    def rows(
        self, *, fate: str = "", text: str = "", order: str = "newest", has_text: bool = False, limit: int = 100
    ) -> tuple[list[GroupRow], int]:
        """Return (at most ``limit`` rows, total number).

        text: part of the number, fate, worker, reason, data set or prompt

        Prompts of evaluations are listed only with fate "evaluated".
        """
        with self._lock:
            rows = list((self._evaluated if fate == EVALUATED else self._rows).values())
        found = [row for row in rows if (not fate or row.fate == fate) and (not has_text or row.answers is not None)]
        found = [row for row in found if row.matches(text)] if text else found
        found.sort(key=ORDERS.get(order, ORDERS["newest"]))
        return found[: min(limit, MOST_ROWS)], len(found)

    def _read_samples(self, tail: FileTail) -> bool:
        """Read new samples and return whether the file was replaced since the last time."""
        is_other, has_more = False, True
        while has_more:
            lines, has_more = tail.read()  # read before the history, which has a group's line first
            is_other |= tail.is_replaced
            self._take_history()
            self._take_samples(tail.inode, lines)
        return is_other

    def _take_history(self) -> None:
        has_more = True
        while has_more:
            lines, has_more = self._history.read()
            with self._lock:
                if self._history.is_replaced:
                    self._rows.clear()
                for position, line in lines:
                    if (entry := history.parse(line + b"\n", position=position)) is not None:
                        self._take_entry(entry)

    def _take_entry(self, entry: HistoryEntry) -> None:
        if entry.kind == BEGUN:  # lines after its checkpoint do not belong to the history of the weights
            lost = [row.group_id for row in self._rows.values() if row.position >= entry.kept]
            for group_id in lost:
                del self._rows[group_id]
            return
        places = dict(zip(entry.groups, entry.sequences, strict=False))
        for group_id in entry.groups:
            self._put(
                GroupRow(
                    group_id=group_id,
                    fate=entry.kind,
                    step=entry.step,
                    position=entry.position,
                    sequence=places.get(group_id, 0),
                )
            )

    def _put(self, row: GroupRow) -> None:
        self._rows.pop(row.group_id, None)
        self._rows[row.group_id] = row
        while len(self._rows) > MOST_GROUPS:
            oldest = next(iter(self._rows))
            del self._rows[oldest]
            self._places.pop(oldest, None)

    def _take_samples(self, inode: int, lines: Sequence[tuple[int, bytes]]) -> None:
        for position, line in lines:
            if (sample := samples.parse(line)) is None:
                continue
            with self._lock:
                row = self._rows.get(sample.group_id)
                if row is not None and (row.fate, row.step) == (sample.fate, sample.step):
                    self._rows[sample.group_id] = _with(row, sample)
                    self._places[sample.group_id] = (inode, position, len(line))

    def _read_evaluations(self, tail: FileTail) -> None:
        has_more = True
        while has_more:
            lines, has_more = tail.read()
            for position, line in lines:
                if (sample := samples.parse(line)) is None:
                    continue
                with self._lock:
                    number = self._numbers.setdefault(sample.identity, FIRST_GROUP_ID + len(self._numbers))
                    row = GroupRow(group_id=number, fate=sample.fate, step=sample.step)
                    self._evaluated.pop(number, None)
                    self._evaluated[number] = _with(row, sample)
                    self._places[number] = (tail.inode, position, len(line))
                    if len(self._evaluated) > MOST_GROUPS:
                        oldest = next(iter(self._evaluated))
                        del self._evaluated[oldest], self._places[oldest]

    # -- one of them -------------------------------------------------------------------------------------------------

    def open(self, group_id: int) -> OpenedGroup:
        """Return the group with its text. Blocks; takes seconds if it must be read from the log of a finished run.

        Raises ConfigError that says why its text is not available.
        """
        with self._lock:
            row, place = self._rows.get(group_id), self._places.get(group_id)
        sample = self._recorded(*place) if place is not None else None
        settings = self._settings()
        path = settings.model.path
        if sample is not None and self._number(sample) != group_id:  # the file was replaced
            sample = None
        if sample is None and group_id >= FIRST_GROUP_ID:
            raise ConfigError("these answers of an evaluation are not here any more: their file was replaced")
        if sample is None:
            with self._reading:
                sample, path = self._logged(settings, group_id, row)
        try:
            self._decode = self._decode or load_decode(path)
        except ConfigError as error:
            return OpenedGroup(sample=sample, problem=str(error))
        if sample.prompt is None:
            sample = decoded(sample, self._decode)
        decode = self._decode
        return OpenedGroup(sample=sample, texts=[token_texts(answer.tokens, decode) for answer in sample.answers])

    def _number(self, sample: GroupSample) -> int | None:
        """Return the number under which a sample is listed."""
        return self._numbers.get(sample.identity) if sample.fate == EVALUATED else sample.group_id

    def _recorded(self, inode: int, position: int, length: int) -> GroupSample | None:
        assert self._directory is not None
        newer = (samples.SAMPLES_FILE, *_OF_EVALUATIONS)
        for name in (*newer, *map(samples.older_name, newer)):
            with contextlib.suppress(OSError):
                path = self._directory / name
                if path.stat().st_ino == inode:
                    with path.open("rb") as file:
                        file.seek(position)
                        return samples.parse(file.read(length))
        return None

    def _logged(self, settings: RunConfig, group_id: int, row: GroupRow | None) -> tuple[GroupSample, str]:
        """Return (group, path of its model)."""
        source = RunSamples(settings, self._directory, token=self._token)
        try:
            with source.bus_address() as address:
                if address is not None:
                    found = asyncio.run(self._read(source, address, group_id, row))
                    if found is not None:
                        return found
        except (AsyncRLError, OSError, TimeoutError) as error:
            source.why_no_log = source.why_no_log or str(error)
        why = source.why_no_log or "its log no longer has it: checkpoint.keep_log = true keeps it"
        raise ConfigError(
            f"the text of group {group_id} is not here. metrics.samples_per_step groups of each step are recorded; "
            f"of the others: {why}"
        )

    async def _read(
        self, source: RunSamples, address: Address, group_id: int, row: GroupRow | None
    ) -> tuple[GroupSample, str] | None:
        async with source.connect(address) as bus:
            last = await bus.last_sequence(TRAJECTORIES)
            newest = last - row.sequence + 1 if row is not None and row.sequence else MOST_SCANNED
            async with contextlib.aclosing(source.read_log(bus, newest=newest)) as groups:
                async for sample in groups:
                    if sample.group_id == group_id:
                        return sample, source.run.model.path
                    if row is not None and row.sequence:  # the record was trimmed, and this is a later one
                        return None
        return None


def _with(row: GroupRow, sample: GroupSample) -> GroupRow:
    rewards = [answer.reward for answer in sample.answers if answer.reward is not None]
    return replace(
        row,
        reason=sample.reason or row.reason,
        worker=sample.worker,
        reward=sample.reward,
        lowest=min(rewards, default=None),
        highest=max(rewards, default=None),
        staleness=sample.staleness,
        seconds=sample.seconds,
        tokens=sum(len(answer.tokens) for answer in sample.answers),
        answers=len(sample.answers),
        prompt=question_in(sample.prompt or "")[:MOST_KEPT],
        label=sample.label[:PREVIEW] or None,
        dataset=sample.dataset or None,
        place=sample.place,
        model=sample.model or None,
    )


def rows_as_json(rows: Sequence[GroupRow]) -> Iterator[dict[str, Any]]:
    """Yield rows for a browser, with the part of each prompt in which it differs from the others."""
    common = common_beginning({row.prompt for row in rows if row.prompt})
    for row in rows:
        shown = {name: getattr(row, name) for name in row.__slots__ if name not in ("position", "sequence")}
        if row.prompt is not None:
            shown["prompt"] = ("… " if common else "") + row.prompt[common : common + PREVIEW]
        yield shown


def common_beginning(texts: Collection[str]) -> int:
    """Return how many characters of all texts are the same, up to a space; 0 for few of them, or for one text."""
    if len(texts) < 2:
        return 0
    common = os.path.commonprefix([*texts])
    end = 1 + max(common.rfind(" "), common.rfind("\n"))
    return end if end >= LEAST_COMMON else 0
