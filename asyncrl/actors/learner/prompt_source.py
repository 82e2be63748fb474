"""Publishes prompt groups, never more than the admission window allows.

At the start the source counts outstanding groups from the bus: the ids on ``prompts`` and in the log. From then on each
id is published once, so counting ids is enough. After killing everything and starting again, the window is right.

If a policy samples, a group asks only for an announced version (test_no_prompt_asks_for_weights_that_nobody_can_get):
a learner that dies leaves no prompt that workers cannot begin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.base import Actor
from asyncrl.actors.learner.prompt_link import Exhausted, PromptLink, Published, Reconciled
from asyncrl.bus.port import Bus
from asyncrl.errors import BusError, BusFull, HopelessError
from asyncrl.messages import Progress, PromptGroup, SamplingParams, VersionSpan, replace
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.messages.topics import PROGRESS, PROMPTS, SENT, TRAJECTORIES, WEIGHTS, group_id_of
from asyncrl.policies.groups.saved import LearnerState
from asyncrl.policies.health.waits import ROOM_IN_WINDOW
from asyncrl.policies.staleness.admission import Admission
from asyncrl.policies.staleness.staleness import effective_version
from asyncrl.policies.trust.tickets import Tickets
from asyncrl.policies.trust.validation import Asked, digest

FULL_QUEUE_SECONDS = 0.5


class Row(Protocol):
    """One prompt from the data. ``tokens`` is empty if it is longer than max_prompt_tokens."""

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
    @property
    def response_mask(self) -> NDArray[np.bool_]: ...
    @property
    def sampling(self) -> Mapping[str, Any]: ...
    @property
    def reward(self) -> str: ...
    @property
    def dataset(self) -> str: ...
    @property
    def messages(self) -> tuple[dict[str, Any], ...]: ...


class Rows(Protocol):
    """The endless shuffled data. A position always has the same row; None after the last epoch."""

    def at(self, position: int) -> Row | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    """A row of acceptable length with its position and group id. overlong: rows skipped so far as too long."""

    group_id: int
    position: int
    overlong: int
    row: Row


class PromptSource(Actor):
    """consumes: progress, weights    publishes: prompts    woken by: the learner, when groups leave the window

    Owns what is published next. The learner (policies/groups/table.py) owns what happens to it, and receives a
    report of each group through ``link`` before its prompt is on the bus.
    """

    role = "prompt-source"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        rows: Rows,
        admission: Admission,
        sampling: SamplingParams,
        group_size: int,
        state: LearnerState,
        link: PromptLink,
        tickets: Tickets | None = None,
        max_tokens: int | None = None,
        are_sampled: bool = True,
    ) -> None:
        """
        state        state that the learner starts from
        tickets      None for prompts without tickets
        max_tokens   limit of an answer over all its turns; sampling.max_new_tokens if None
        are_sampled  whether engines sample the answers and need weights
        """
        super().__init__(name, bus)
        self._rows = rows
        self._admission = admission
        self._sampling = sampling
        self._group_size = group_size
        self._max_tokens = sampling.max_new_tokens if max_tokens is None else max_tokens
        self._link = link
        self._tickets = tickets or Tickets()
        self._are_sampled = are_sampled
        self._incarnation, self._policy_version = state.incarnation, state.policy_version
        self._forks = state.forks
        self._outstanding = state.prompts.outstanding
        self._next, self._position = state.prompts.next_group_id, state.prompts.position
        self._overlong = state.prompts.overlong
        self._is_exhausted = False
        self._taken: set[int] = set()  # unpublished groups whose place in the log was taken by someone else
        self._progress: Progress | None = None
        self._announced = (0, 0)  # newest (incarnation, policy version); engines start with version 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        await self._reconcile()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_progress(), name=f"{self.name}.watch-progress")
            group.create_task(self._publish_overdue(), name=f"{self.name}.publish-overdue")
            for key in ("", SENT) if self._are_sampled else ():
                group.create_task(self._watch_weights(key), name=f"{self.name}.watch-{key or 'folders'}")
            while True:
                what, on = ("more data", "data") if self._is_exhausted else (ROOM_IN_WINDOW, LEARNER)
                with self.waiting(what, on=on):
                    await self._changed.wait()
                self._changed.clear()
                if self._progress is not None:
                    await self._fill(self._progress)

    async def _watch_progress(self) -> None:
        async with self.bus.watch(PROGRESS) as states:
            async for progress in states:
                if progress.incarnation == self._incarnation:
                    self._progress = progress
                    self._changed.set()
                elif progress.incarnation > self._incarnation:  # an older one is left over from before our learner
                    problem = f"of incarnation {progress.incarnation}, but this is incarnation {self._incarnation}"
                    self.bus.rejections.note(PROGRESS.name, problem, kind="incarnation")

    async def _watch_weights(self, key: str) -> None:
        async with self.bus.watch(WEIGHTS, key=key) as versions:
            async for version in versions:
                self._announced = max(self._announced, version.order)
                self._changed.set()

    @property
    def _obtainable(self) -> int | None:
        """The newest version that workers can load, as this history counts it; None if they need none."""
        if not self._are_sampled:
            return None
        incarnation, policy_version = self._announced
        return effective_version(
            VersionSpan(start=0, incarnation=incarnation, policy_version=policy_version), self._forks
        )

    async def _reconcile(self) -> None:
        """Publish lost prompts again and continue after the newest group on the bus, which may be ahead of our
        checkpoint."""
        on_bus = await self.bus.keys(PROMPTS)  # read first: a group moves from prompts to trajectories
        keys = await self.bus.keys(TRAJECTORIES)
        in_log = {group_id for key in keys if (group_id := self._tickets.group_answered(key)) is not None}
        present = self._group_ids(on_bus | {str(group_id) for group_id in in_log})
        strange = in_log - present
        self._taken |= {group_id for group_id in strange if group_id >= self._next}
        lost = await asyncio.to_thread(
            self._read_again, {group_id: at for group_id, at in self._outstanding.items() if group_id not in present}
        )
        ahead = await self._read(max(present, default=-1) + 1 - self._next)
        missing = [*lost, *(numbered for numbered in ahead if numbered.group_id not in present)]
        starts = {numbered.group_id: self._policy_version for numbered in missing}
        for numbered in (*lost, *ahead):
            self._report(numbered, oldest_start=starts.get(numbered.group_id))
        self._link.reports.put_nowait(Reconciled())
        for numbered in missing:
            await self._publish(numbered, min_policy_version=0, again=True)

    async def _publish_overdue(self) -> None:
        """consumes: prompts that were not answered    waits for: the learner, which misses the answers

        They ask for the same versions as before, so an answer by the first taker still counts.
        """
        while True:
            overdue = {one.group_id: one for one in await self._link.overdue.get()}
            positions = {group_id: one.position for group_id, one in overdue.items()}
            for numbered in await asyncio.to_thread(self._read_again, positions):
                try:
                    await self.bus.withdraw(PROMPTS, key=str(numbered.group_id))
                except BusError as error:  # a full disk allows no removals
                    self.log.warning("group %d: its prompt cannot be issued again now: %s", numbered.group_id, error)
                    continue
                oldest = overdue[numbered.group_id].oldest_start or 0
                await self._publish(numbered, min_policy_version=oldest, again=True)

    def _group_ids(self, keys: set[str]) -> set[int]:
        """Return the groups among ``keys``. A group far beyond all others does not fit the window and is not ours."""
        ids: set[int] = set()
        last = self._next - 1
        for key in sorted(keys, key=lambda key: (len(key), key)):
            group_id = group_id_of(key)
            if group_id is None or group_id > last + self._admission.most:
                self.bus.rejections.note(PROMPTS.name, f"key {key!r}: no group of this run", kind="key")
                continue
            last = max(last, group_id)
            ids.add(group_id)
        return ids

    async def _fill(self, progress: Progress) -> None:
        """Publish prompts until the window is full."""
        self._policy_version = progress.policy_version
        obtainable = self._obtainable
        oldest = progress.policy_version if obtainable is None else min(progress.policy_version, obtainable)
        count = self._admission.may_publish(
            published=self._next,
            lost=progress.groups_lost,
            batches_taken=progress.batches_taken,
            steps_done=progress.step,
            obtainable=obtainable,
        )
        count = min(count, self._admission.most)  # whatever progress the learner claims
        rows = await self._read(count)
        while not self._link.taken.empty():
            self._taken.add(self._link.taken.get_nowait())
        async with asyncio.TaskGroup() as group:  # in parallel: one round trip in total, not one per prompt
            for numbered in rows:
                can_be_answered = numbered.group_id not in self._taken
                asked = self._asked(numbered.row)
                self._report(
                    numbered,
                    oldest_start=oldest,
                    can_be_answered=can_be_answered,
                    asked=asked,
                )
                if can_be_answered:
                    group.create_task(self._publish(numbered, min_policy_version=oldest))
        if len(rows) < count:
            self._is_exhausted = True
            self._link.reports.put_nowait(self._exhausted())

    def _exhausted(self) -> Exhausted:
        return Exhausted(position=self._position, overlong=self._overlong)

    def _asked(self, row: Row) -> Asked:
        """Return what this row's prompt asks for in this incarnation."""
        return Asked(
            samples=frozenset({self._group_size}),
            max_tokens=self._max_tokens,
            max_prompt_tokens=len(row.tokens),
            prompt_digest=digest(row.tokens),
            epoch=row.epoch,
        )

    def _report(
        self,
        numbered: _Numbered,
        *,
        oldest_start: int | None,
        can_be_answered: bool = True,
        asked: Asked | None = None,
    ) -> None:
        """Report a group to the learner before its prompt is on the bus."""
        report = Published(
            group_id=numbered.group_id,
            position=numbered.position,
            oldest_start=oldest_start,
            overlong=numbered.overlong,
            can_be_answered=can_be_answered,
            asked=asked,
            time=time.time(),
        )
        self._link.reports.put_nowait(report)

    async def _read(self, count: int) -> list[_Numbered]:
        """Return the next ``count`` rows that are short enough, numbered; fewer if the data ends."""
        first, position, overlong = self._next, self._position, self._overlong

        def read() -> tuple[list[_Numbered], int, int]:
            rows: list[_Numbered] = []
            place, skipped = position, overlong
            while len(rows) < count and (row := self._rows.at(place)) is not None:
                if len(row.tokens) == 0:
                    skipped += 1
                else:
                    group_id = first + len(rows)
                    rows.append(_Numbered(group_id=group_id, position=place, overlong=skipped, row=row))
                place += 1
            return rows, place, skipped

        rows, self._position, self._overlong = await asyncio.to_thread(read)
        self._next += len(rows)
        return rows

    def _read_again(self, positions: Mapping[int, int]) -> list[_Numbered]:
        """Return the rows of groups that were published before, by position. Raises HopelessError if the data no longer
        has one of them."""
        found = []
        for group_id, position in sorted(positions.items()):
            if (row := self._rows.at(position)) is None:
                raise HopelessError(
                    f"data.path: row {position} of group {group_id} is gone: the data changed since the checkpoint; "
                    "resume with the same file, or start another run"
                )
            if len(row.tokens) == 0:
                raise HopelessError(
                    f"data.path: row {position} of group {group_id} is longer than prompts may be now; resume with the "
                    "data.max_prompt_tokens and rollout.max_new_tokens that the run had, or with fewer new tokens"
                )
            found.append(_Numbered(group_id=group_id, position=position, overlong=self._overlong, row=row))
        return found

    async def _publish(self, numbered: _Numbered, *, min_policy_version: int, again: bool = False) -> None:
        row = numbered.row
        message = PromptGroup(
            group_id=numbered.group_id,
            prompt_tokens=row.tokens,
            group_size=self._group_size,
            sampling=replace(self._sampling, **row.sampling) if row.sampling else self._sampling,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            epoch=row.epoch,
            min_policy_version=min_policy_version,
            response_tokens=row.response,
            policy_version=self._policy_version,
            incarnation=self._incarnation,
            dataset=row.dataset,
            response_mask=row.response_mask,
            reward=row.reward,
            ticket=self._tickets.of(numbered.group_id),
            messages=row.messages,
        )
        if await self._try_publish(message, again=again):
            return
        with self.waiting("space on prompts", on=WORKER):
            while True:
                await asyncio.sleep(FULL_QUEUE_SECONDS)
                if await self._try_publish(message, again=again):
                    return

    async def _try_publish(self, message: PromptGroup, *, again: bool) -> bool:
        """Publish a prompt. Return False if the topic is full."""
        try:
            await self.bus.publish(PROMPTS, message, key=str(message.group_id), again=again)
        except BusFull:
            return False
        return True
