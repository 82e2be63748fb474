"""Publishes prompt groups, never more than the admission window allows.

The group table says what is outstanding; the source and the learner share it, in one event loop. The source puts a
group into the table before its prompt is on the bus, so the table knows every group that a log record can answer. At
the start it counts the groups on the bus: the ids on ``prompts`` and in the log, which may be ahead of the checkpoint.

If a policy samples, a group asks only for an announced version (test_no_prompt_asks_for_weights_that_nobody_can_get):
a learner that dies leaves no prompt that workers cannot begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from asyncrl.actors.base import Actor
from asyncrl.bus.port import Bus
from asyncrl.data.prompts import PromptRow
from asyncrl.errors import BusError, BusFull, ConfigError, HopelessError
from asyncrl.images.store import ImageStore
from asyncrl.messages import Progress, PromptGroup, SamplingParams, VersionSpan, replace
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.messages.topics import ACTORS, PROGRESS, PROMPTS, SENT, TRAJECTORIES, WEIGHTS, group_id_of
from asyncrl.outage import is_outage
from asyncrl.policies.groups.overdue import Overdue, all_wait_for_prompts
from asyncrl.policies.groups.states import PublishedPrompt
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.groups.tickets import Tickets
from asyncrl.policies.groups.validation import PromptSpec, digest
from asyncrl.policies.health.waits import ROOM_IN_WINDOW, SERVICE
from asyncrl.policies.staleness.admission import Admission
from asyncrl.policies.staleness.staleness import effective_version
from asyncrl.policies.staleness.window import NeededWindow

T = TypeVar("T")

FULL_QUEUE_SECONDS = 0.5
LOOK_SECONDS = 2.0
AWAY_SECONDS = 5.0


class Rows(Protocol):
    """The endless shuffled data. A position always has the same row; None after the last epoch."""

    def at(self, position: int) -> PromptRow | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _NumberedRow:
    """A row of acceptable length with its position and group id. overlong: rows skipped so far as too long."""

    group_id: int
    position: int
    overlong: int
    row: PromptRow


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
        sampling: SamplingParams,
        group_size: int,
        table: GroupTable,
        changed: asyncio.Event | None = None,
        reconciled: asyncio.Event | None = None,
        tickets: Tickets | None = None,
        max_tokens: int | None = None,
        are_sampled: bool = True,
        reissue_seconds: float = 0.0,
        window: NeededWindow | None = None,
        images: ImageStore | None = None,
    ) -> None:
        """
        table            shared with the learner
        changed          set when the data has ended
        reconciled       set when the table has every group that was ever published
        tickets          None for prompts without tickets
        max_tokens       limit of an answer over all its turns; sampling.max_new_tokens if None
        are_sampled      whether engines sample the answers and need weights
        reissue_seconds  as in ``Overdue``
        window           None: always full
        images           images of the data, kept on the bus while a prompt shows them; None: the data shows none
        """
        super().__init__(name, bus)
        self._rows = rows
        self._admission = admission
        self._window = window
        self._images = images
        self._shown: dict[int, frozenset[str]] = {}  # images of the groups that this incarnation published
        self._inherited: frozenset[int] = frozenset()  # groups that earlier ones published, whose images are unknown
        self._first_step = table.step
        self._observed = table.step  # the step after which ``window`` last looked
        self._sampling = sampling
        self._group_size = group_size
        self._max_tokens = sampling.max_new_tokens if max_tokens is None else max_tokens
        self._table = table
        self._table_changed = changed or asyncio.Event()
        self._reconciled = reconciled or asyncio.Event()
        self._tickets = tickets or Tickets()
        self._are_sampled = are_sampled
        self._overdue = Overdue(reissue_seconds, next_group_id=table.next_group_id, now=time.monotonic())
        self._num_reissued = 0  # prompts issued again in this incarnation
        self._extra: set[int] = set()  # groups whose prompt was issued again
        self._policy_version = table.policy_version
        self._progress: Progress | None = None
        self._announced = (0, 0)  # newest (incarnation, policy version); engines start with version 0
        self._changed = asyncio.Event()
        self._read_to = (0, 0)  # position after the last row read, and overlong rows before it

    async def run(self) -> None:
        await self._reconcile()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_progress(), name=f"{self.name}.watch-progress")
            group.create_task(self._watch_overdue(), name=f"{self.name}.watch-overdue")
            for key in ("", SENT) if self._are_sampled else ():
                group.create_task(self._watch_weights(key), name=f"{self.name}.watch-{key or 'folders'}")
            while True:
                what, on = ("more data", "data") if self._table.is_exhausted else (ROOM_IN_WINDOW, LEARNER)
                with self.waits.waiting(what, on=on):
                    await self._changed.wait()
                self._changed.clear()
                if self._progress is not None:
                    await self._fill(self._progress)

    def numbers(self) -> dict[str, float]:
        return {"prompts/reissued": float(self._num_reissued)}

    async def _watch_progress(self) -> None:
        async with self.bus.watch(PROGRESS) as states:
            async for progress in states:
                if progress.incarnation == self._table.incarnation:  # an older one is left over from before our learner
                    self._progress = progress
                    self._changed.set()

    async def _watch_weights(self, key: str) -> None:
        async with self.bus.watch(WEIGHTS, key=key) as versions:
            async for version in versions:
                self._announced = max(self._announced, version.version)
                self._changed.set()

    @property
    def _obtainable(self) -> int | None:
        """The newest version that workers can load, as this history counts it; None if they need none."""
        if not self._are_sampled:
            return None
        incarnation, policy_version = self._announced
        return effective_version(
            VersionSpan(start=0, incarnation=incarnation, policy_version=policy_version), self._table.resume_points
        )

    async def _reconcile(self) -> None:
        """Publish lost prompts again and continue after the newest group on the bus, which may be ahead of our
        checkpoint.

        Example: the checkpoint knows groups 0 to 3, of which 2 is outstanding; the bus has prompt 4. Then 2 was lost
        and is published again, 4 is put into the table as it is, and 5 is the next group.
        """
        on_bus = await self.bus.keys(PROMPTS)  # read first: a group moves from prompts to trajectories
        keys = await self.bus.keys(TRAJECTORIES)
        in_log = {group_id for key in keys if (group_id := self._tickets.group_answered(key)) is not None}
        present = self._group_ids(on_bus | {str(group_id) for group_id in in_log})
        outstanding = {group_id: prompt.position for group_id, prompt in self._table.outstanding.items()}
        lost_at = {group_id: at for group_id, at in outstanding.items() if group_id not in present}
        lost = await self._in_thread(lambda: self._read_again(lost_at))
        ahead = await self._read(max(present, default=-1) + 1 - self._table.next_group_id)
        missing = [*lost, *(numbered for numbered in ahead if numbered.group_id not in present)]
        starts = {numbered.group_id: self._policy_version for numbered in missing}
        for numbered in (*lost, *ahead):
            self._put_into_table(numbered, oldest_start=starts.get(numbered.group_id))
        self._inherited = frozenset(self._table.outstanding)
        self._reconciled.set()
        for numbered in missing:
            await self._publish(numbered, min_policy_version=0, again=True)

    async def _watch_overdue(self) -> None:
        """waits for: the clock, to look for prompts that are taken but not answered, and for a learner that waits"""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._observed > self._first_step and not self._table.training:  # not while engines start
                self._observe_need()  # slow workers may hold all that is admitted, while others have nothing to do
                self._changed.set()
            await self.reissue_overdue(now=time.monotonic())

    async def reissue_overdue(self, *, now: float) -> None:
        """Issue overdue prompts again, and remove the extra prompts of groups that are done. Raises BusError.

        They ask for the same versions as before, so an answer by the first taker still counts.
        """
        outstanding = self._table.outstanding
        self._overdue.look(outstanding, next_group_id=self._table.next_group_id, now=now)
        if self._overdue.is_quiet:
            due = self._overdue.due(all_wait=all_wait_for_prompts((await self.bus.states(ACTORS)).values()))
            await self._reissue({group_id: outstanding[group_id] for group_id in due if group_id in outstanding})
        for group_id in sorted(self._extra - outstanding.keys()):
            if await self._withdraw(group_id):
                self._extra.discard(group_id)

    async def _reissue(self, prompts: Mapping[int, PublishedPrompt]) -> None:
        if not prompts:
            return
        self.log.warning(
            "%d prompts are not answered while every worker waits for prompts (groups %s): issued again; the first"
            " answer counts (rollout.reissue_seconds)",
            len(prompts),
            ", ".join(map(str, sorted(prompts)[:5])) + (", ..." if len(prompts) > 5 else ""),
        )
        self._num_reissued += len(prompts)
        positions = {group_id: prompt.position for group_id, prompt in prompts.items()}
        for numbered in await self._in_thread(lambda: self._read_again(positions)):
            if await self._withdraw(numbered.group_id):
                self._extra.add(numbered.group_id)
                oldest = prompts[numbered.group_id].oldest_start or 0
                await self._publish(numbered, min_policy_version=oldest, again=True)

    async def _withdraw(self, group_id: int) -> bool:
        """Remove a prompt from the bus. Return False if it cannot be removed now."""
        try:
            await self.bus.withdraw(PROMPTS, key=str(group_id))
        except BusError as error:  # a full disk allows no removals
            self.log.warning("group %d: its prompt cannot be removed now: %s", group_id, error)
            return False
        return True

    def _group_ids(self, keys: set[str]) -> set[int]:
        """Return the groups among ``keys``. A group far beyond all others does not fit the window and is not ours."""
        ids: set[int] = set()
        last = self._table.next_group_id - 1
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
        # Window 12 (bound 2, batches of 4), step 5 done: 32 groups may have been published by now. If 30 are, 2 follow.
        # They ask for version 5, or for the newest one that is announced: a learner that dies before it has announced 5
        # would leave prompts that no engine can begin.
        self._policy_version = progress.policy_version
        if self._shown:
            await self._withdraw_images()
        obtainable = self._obtainable
        oldest = progress.policy_version if obtainable is None else min(progress.policy_version, obtainable)
        if self._table.step > self._observed:
            self._observe_need()
        count = self._admission.may_publish(
            published=self._table.next_group_id,
            lost=progress.groups_lost,
            batches_taken=progress.batches_taken,
            steps_done=progress.step,
            obtainable=obtainable,
            window=None if self._window is None else self._window.size,
        )
        count = min(count, self._admission.most)  # whatever progress the learner claims
        rows = await self._read(count)
        async with asyncio.TaskGroup() as group:  # in parallel: one round trip in total, not one per prompt
            for numbered in rows:
                self._put_into_table(numbered, oldest_start=oldest, asked=self._prompt_spec(numbered.row))
                group.create_task(self._publish(numbered, min_policy_version=oldest))
        if len(rows) < count:
            self._table.exhaust(position=self._read_to[0], overlong=self._read_to[1])
            self._table_changed.set()

    def _observe_need(self) -> None:
        """Let the window see what is there for the next step; the learner may have taken it already."""
        table = self._table
        self._observed = table.step
        if self._window is not None:
            finished = len(table.buffered) + len(table.training)
            self._window.observe(finished=finished, unfinished=len(table.outstanding), waited=table.has_waited)
            table.window = self._window.size

    def _prompt_spec(self, row: PromptRow) -> PromptSpec:
        """Return what this row's prompt asks for in this incarnation."""
        sampling = self._sampling_of(row)
        return PromptSpec(
            samples=frozenset({self._group_size}),
            max_tokens=self._max_tokens,
            max_prompt_tokens=len(row.tokens),
            prompt_digest=digest(row.tokens),
            images=row.images,
            epoch=row.epoch,
            temperature=sampling.own_temperature(self._sampling.temperature),
            reports_support=self._are_sampled and sampling.reports_support,
        )

    def _sampling_of(self, row: PromptRow) -> SamplingParams:
        changed: SamplingParams = replace(self._sampling, **row.sampling) if row.sampling else self._sampling
        return changed

    def _put_into_table(
        self, numbered: _NumberedRow, *, oldest_start: int | None, asked: PromptSpec | None = None
    ) -> None:
        """Put a group into the table, before its prompt is on the bus."""
        self._table.publish(
            numbered.group_id,
            position=numbered.position,
            oldest_start=oldest_start,
            overlong=numbered.overlong,
            asked=asked,
            time=time.time(),
        )

    async def _read(self, count: int) -> list[_NumberedRow]:
        """Return the next ``count`` rows that are short enough, numbered; fewer if the data ends."""
        first, position, overlong = self._table.next_group_id, self._table.position, self._table.overlong

        def read() -> tuple[list[_NumberedRow], tuple[int, int]]:
            rows: list[_NumberedRow] = []
            place, skipped = position, overlong
            while len(rows) < count and (row := self._rows.at(place)) is not None:
                if len(row.tokens) == 0:
                    skipped += 1
                else:
                    group_id = first + len(rows)
                    rows.append(_NumberedRow(group_id=group_id, position=place, overlong=skipped, row=row))
                place += 1
            return rows, (place, skipped)

        rows, self._read_to = await self._in_thread(read)
        return rows

    async def _in_thread(self, read: Callable[[], T]) -> T:
        """Read rows in a thread, and again while a service is away that a source of the user's own asks."""
        is_away = False
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    return await asyncio.to_thread(read)
                except ConfigError as error:
                    if not is_outage(error):
                        raise
                    if not is_away:
                        is_away = True
                        self.log.warning("a service is away: %s; its rows are read again until it is back", error)
                        stack.enter_context(self.waits.waiting(str(error)[:300], on=SERVICE))
                await asyncio.sleep(AWAY_SECONDS)

    def _read_again(self, positions: Mapping[int, int]) -> list[_NumberedRow]:
        """Return the rows of groups that were published before, by position. Raises HopelessError if the data no longer
        has one of them."""
        found = []
        for group_id, position in sorted(positions.items()):
            if (row := self._rows.at(position)) is None:
                raise HopelessError(
                    f"data.path: row {position} of group {group_id} is gone: the data changed since the checkpoint; "
                    "resume with the same file, or start another run"
                )
            if row.problem:
                raise HopelessError(f"{row.problem}: group {group_id} showed it before; put it back, and resume again")
            if len(row.tokens) == 0:
                raise HopelessError(
                    f"data.path: row {position} of group {group_id} is longer than prompts may be now; resume with the "
                    "data.max_prompt_tokens and rollout.max_new_tokens that the run had, or with fewer new tokens"
                )
            found.append(_NumberedRow(group_id=group_id, position=position, overlong=self._table.overlong, row=row))
        return found

    async def _publish(self, numbered: _NumberedRow, *, min_policy_version: int, again: bool = False) -> None:
        row = numbered.row
        message = PromptGroup(
            group_id=numbered.group_id,
            prompt_tokens=row.tokens,
            group_size=self._group_size,
            sampling=self._sampling_of(row),
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            epoch=row.epoch,
            min_policy_version=min_policy_version,
            response_tokens=row.response,
            policy_version=self._policy_version,
            incarnation=self._table.incarnation,
            dataset=row.dataset,
            response_mask=row.response_mask,
            reward=row.reward,
            ticket=self._tickets.ticket(numbered.group_id),
            messages=row.messages,
            images=row.images,
        )
        if row.images:
            await self._publish_images(numbered.group_id, row)
        if await self._try_publish(message, again=again):
            return
        with self.waits.waiting("space on prompts", on=WORKER):
            while True:
                await asyncio.sleep(FULL_QUEUE_SECONDS)
                if await self._try_publish(message, again=again):
                    return

    async def _publish_images(self, group_id: int, row: PromptRow) -> None:
        assert self._images is not None
        self._shown[group_id] = frozenset(one.digest for one in row.images)
        await asyncio.to_thread(self._images.publish, self._shown[group_id])

    async def _withdraw_images(self) -> None:
        """Remove images from the bus that no outstanding group shows."""
        outstanding = self._table.outstanding
        if self._images is None or not self._inherited.isdisjoint(outstanding):
            return
        self._shown = {group_id: digests for group_id, digests in self._shown.items() if group_id in outstanding}
        try:
            await asyncio.to_thread(self._images.keep_only, frozenset[str]().union(*self._shown.values()))
        except BusError as error:  # a full disk allows no removals
            self.log.warning("images that no prompt shows cannot be removed from the bus now: %s", error)

    async def _try_publish(self, message: PromptGroup, *, again: bool) -> bool:
        """Publish a prompt. Return False if the topic is full."""
        try:
            await self.bus.publish(PROMPTS, message, key=str(message.group_id), again=again)
        except BusFull:
            return False
        return True
