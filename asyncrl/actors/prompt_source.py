"""Publishes prompt groups, never more than the admission window allows.

What is outstanding is counted on the bus when the source starts: the ids it finds on ``prompts`` and in the log. From
there each id is published once, so ids count. Kill everything, start the same commands, and the window is right.

Where a policy samples, a group asks for a version that is announced already (test_no_prompt_asks_for_weights_that_
nobody_can_get): a learner that dies leaves no prompt that workers cannot begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.base import Actor
from asyncrl.checkpoint import PromptState
from asyncrl.errors import BusFull
from asyncrl.messages import Progress, PromptGroup, Sampling, VersionSpan
from asyncrl.policies.admission import Admission
from asyncrl.policies.faults import LEARNER, ROOM_IN_WINDOW, WORKER
from asyncrl.policies.ledger import Ledger
from asyncrl.policies.staleness import effective_version
from asyncrl.protocols import Bus
from asyncrl.topics import PROGRESS, PROMPTS, SENT, TRAJECTORIES, WEIGHTS, group_id_of

FULL_QUEUE_SECONDS = 0.5


class Row(Protocol):
    """One prompt as the data gives it. ``tokens`` is empty when it is over max_prompt_tokens."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def prompt(self) -> str: ...
    @property
    def label(self) -> Any: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def epoch(self) -> int: ...
    @property
    def response(self) -> NDArray[np.int32]: ...


class Rows(Protocol):
    """The endless shuffled data: the same row at the same position for ever; None after the last epoch."""

    def at(self, position: int) -> Row | None: ...


@dataclass(frozen=True, slots=True)
class _Numbered:
    group_id: int
    row: Row


class PromptSource(Actor):
    """consumes: progress, weights    publishes: prompts    woken by: the learner, when groups leave the window"""

    role = "prompt-source"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        rows: Rows,
        admission: Admission,
        sampling: Sampling,
        group_size: int,
        state: PromptState,
        groups: Ledger,
        policy_version: int = 0,
        run_epoch: int = 0,
        forks: Mapping[int, int] | None = None,
        are_sampled: bool = True,
    ) -> None:
        """policy_version: that the learner starts with; forks: see staleness.py; are_sampled: engines need weights"""
        super().__init__(name, bus)
        self._policy_version = policy_version
        self._rows = rows
        self._admission = admission
        self._sampling = sampling
        self._group_size = group_size
        self._groups = groups  # the learner's ledger of groups disposed of; read only here
        self._next, self._position, self.overlong = state.next_group_id, state.position, state.overlong
        self._outstanding = dict(state.outstanding)
        self._run_epoch = run_epoch
        self._forks = dict(forks or {})
        self._are_sampled = are_sampled
        self._progress: Progress | None = None
        self._announced = (0, 0)  # newest (run epoch, policy version); engines start with version 0
        self._changed = asyncio.Event()
        self.oldest_start = dict(state.oldest_start)
        """group id -> oldest policy version that may sample it, of outstanding groups that this history published."""
        self.exhausted = asyncio.Event()
        """Set when the data has ended: no group will be published any more."""
        self.reconciled = asyncio.Event()
        """Set when it is known which groups were ever published; ``is_published`` waits for that."""

        self.taken: set[int] = set()
        """Groups not asked for yet whose place in the log somebody has taken: no answer of theirs can be stored."""
        self.unanswerable: asyncio.Queue[int] = asyncio.Queue()
        """Those of them whose turn has come; the learner buries them."""

    def is_published(self, group_id: int) -> bool:
        """Whether this run ever asked for the group."""
        return 0 <= group_id < self._next

    def state(self) -> PromptState:
        """For the checkpoint: consistent with the ledger at this instant."""
        self._outstanding = {i: position for i, position in self._outstanding.items() if i not in self._groups}
        self.oldest_start = {i: version for i, version in self.oldest_start.items() if i not in self._groups}
        return PromptState(
            next_group_id=self._next,
            position=self._position,
            overlong=self.overlong,
            outstanding=dict(self._outstanding),
            oldest_start=dict(self.oldest_start),
        )

    async def run(self) -> None:
        await self._reconcile()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_progress(), name=f"{self.name}.watch-progress")
            for key in ("", SENT) if self._are_sampled else ():
                group.create_task(self._watch_weights(key), name=f"{self.name}.watch-{key or 'folders'}")
            while True:
                what, on = ("more data", "data") if self.exhausted.is_set() else (ROOM_IN_WINDOW, LEARNER)
                with self.waiting(what, on=on):
                    await self._changed.wait()
                self._changed.clear()
                if self._progress is not None:
                    await self._fill(self._progress)

    async def _watch_progress(self) -> None:
        async with self.bus.watch(PROGRESS) as states:
            async for progress in states:
                if progress.run_epoch == self._run_epoch:
                    self._progress = progress
                    self._changed.set()
                elif progress.run_epoch > self._run_epoch:  # an older one was there before our learner spoke
                    problem = f"of run epoch {progress.run_epoch}, and this is {self._run_epoch}"
                    self.bus.refusals.note(PROGRESS.name, problem, kind="epoch")

    async def _watch_weights(self, key: str) -> None:
        async with self.bus.watch(WEIGHTS, key=key) as versions:
            async for version in versions:
                self._announced = max(self._announced, version.order)
                self._changed.set()

    @property
    def _obtainable(self) -> int | None:
        """The newest version that workers can get, as this history counts it; None where they need none."""
        if not self._are_sampled:
            return None
        run_epoch, policy_version = self._announced
        return effective_version(VersionSpan(start=0, run_epoch=run_epoch, policy_version=policy_version), self._forks)

    async def _reconcile(self) -> None:
        """Publish again what the bus lost, and go on behind what it has: it may be ahead of our checkpoint."""
        on_bus = await self.bus.keys(PROMPTS)  # this one first: a group moves from prompts to trajectories
        in_log = await self.bus.keys(TRAJECTORIES)
        present = self._group_ids(on_bus | in_log)
        strange = {group_id for key in in_log if (group_id := group_id_of(key)) is not None} - present
        self.taken |= {group_id for group_id in strange if group_id >= self._next}
        missing: list[_Numbered] = []
        for group_id in sorted(self._outstanding.keys() - present):
            if group_id not in self._groups:
                row = await asyncio.to_thread(self._rows.at, self._outstanding[group_id])
                assert row is not None, "the data changed since the checkpoint"
                missing.append(_Numbered(group_id, row))
        while self._next <= max(present, default=-1):
            numbered = await asyncio.to_thread(self._read)
            if numbered is None:
                break
            if numbered.group_id not in present and numbered.group_id not in self._groups:
                missing.append(numbered)
        self.reconciled.set()
        for numbered in missing:
            self.oldest_start[numbered.group_id] = self._policy_version
            await self._publish(numbered, min_policy_version=0)

    def _group_ids(self, keys: set[str]) -> set[int]:
        """The groups among ``keys``. They are a window wide: one far beyond all others was put there by another."""
        ids: set[int] = set()
        last = self._next - 1
        for key in sorted(keys, key=lambda key: (len(key), key)):
            group_id = group_id_of(key)
            if group_id is None or group_id > last + self._admission.most:
                self.bus.refusals.note(PROMPTS.name, f"key {key!r}: no group of this run", kind="key")
                continue
            last = max(last, group_id)
            ids.add(group_id)
        return ids

    async def _fill(self, progress: Progress) -> None:
        """Publish up to the window."""
        self._policy_version = progress.policy_version
        obtainable = self._obtainable
        oldest = progress.policy_version if obtainable is None else min(progress.policy_version, obtainable)
        count = self._admission.may_publish(
            published=self._next,
            lost=progress.groups_lost,
            batches_taken=progress.batches_taken,
            steps_done=progress.step,
            bound=progress.bound,
            obtainable=obtainable,
        )
        count = min(count, self._admission.most)  # whatever a learner claims to have done
        rows = await asyncio.to_thread(self._read_many, count)
        async with asyncio.TaskGroup() as group:  # side by side: one round trip, not one per prompt
            for numbered in rows:
                if numbered.group_id in self.taken:
                    self.unanswerable.put_nowait(numbered.group_id)
                    continue
                self.oldest_start[numbered.group_id] = oldest
                group.create_task(self._publish(numbered, min_policy_version=oldest))
        if len(rows) < count:
            self.exhausted.set()

    def _read_many(self, count: int) -> list[_Numbered]:
        """The next ``count`` rows that are short enough; fewer when the data ends."""
        rows = (self._read() for _ in range(count))
        return [row for row in rows if row is not None]

    def _read(self) -> _Numbered | None:
        """The next row that is short enough, and its group id. None when the data has ended."""
        while (row := self._rows.at(self._position)) is not None:
            self._position += 1
            if len(row.tokens) == 0:
                self.overlong += 1
                continue
            numbered = _Numbered(self._next, row)
            self._outstanding[self._next] = self._position - 1
            self._next += 1
            return numbered
        return None

    async def _publish(self, numbered: _Numbered, *, min_policy_version: int) -> None:
        row = numbered.row
        message = PromptGroup(
            group_id=numbered.group_id,
            prompt_tokens=row.tokens,
            group_size=self._group_size,
            sampling=self._sampling,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            epoch=row.epoch,
            min_policy_version=min_policy_version,
            response_tokens=row.response,
            policy_version=self._policy_version,
            run_epoch=self._run_epoch,
        )
        if await self._is_published(message):
            return
        with self.waiting("space on prompts", on=WORKER):
            while True:
                await asyncio.sleep(FULL_QUEUE_SECONDS)
                if await self._is_published(message):
                    return

    async def _is_published(self, message: PromptGroup) -> bool:
        """Now; False when the queue is full."""
        try:
            await self.bus.publish(PROMPTS, message, key=str(message.group_id))
        except BusFull:
            return False
        return True
