"""What arrives on the trajectory log, and what becomes of it when it is not trained.

    log -> vetting -> buffer -> filters            groups leave as buried, filtered, dropped (stale or quarantined)

The learner owns an Intake and trains what is in its buffer. Each fate is a line of the history before anybody else
hears of it (history.py, H2), an event for whoever asks later, and a number in the progress that lets a prompt in.

Tests: tests/test_actors.py, tests/test_hostile.py.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.actors.base import Actor
from asyncrl.actors.batch_feed import BatchFeed
from asyncrl.actors.examiner import Examiner, buried
from asyncrl.actors.group_filters import GroupFilters
from asyncrl.actors.prompt_source import PromptSource
from asyncrl.checkpoint import LearnerState
from asyncrl.errors import HopelessError
from asyncrl.history import History
from asyncrl.logs import REASON
from asyncrl.messages import Event, Progress, TrajectoryGroup
from asyncrl.policies import batch as batches
from asyncrl.policies.batch import Metric
from asyncrl.policies.buffer import Buffer, Held
from asyncrl.policies.ledger import Ledger
from asyncrl.protocols import Record
from asyncrl.topics import EVENTS, TRAJECTORIES, group_id_of


@dataclass(slots=True, kw_only=True)
class Standing:
    """How far a learner is, and what became of the groups so far: kept by the learner and its intake together."""

    run_epoch: int
    step: int
    policy_version: int
    trained: int
    dropped: int
    buried: int
    filtered: int

    @classmethod
    def of(cls, state: LearnerState) -> Standing:
        """As the checkpoint has it."""
        return cls(
            run_epoch=state.run_epoch,
            step=state.step,
            policy_version=state.policy_version,
            trained=state.groups_trained,
            dropped=state.groups_dropped,
            buried=state.groups_buried,
            filtered=state.groups_filtered,
        )

    def progress(self, *, batches_taken: int, bound: int, finished: bool) -> Progress:
        """The same for the bus."""
        return Progress(
            run_epoch=self.run_epoch,
            step=self.step,
            policy_version=self.policy_version,
            batches_taken=batches_taken,
            groups_trained=self.trained,
            groups_dropped=self.dropped,
            groups_buried=self.buried,
            groups_filtered=self.filtered,
            bound=bound,
            finished=finished,
        )

    def __str__(self) -> str:
        filtered = f", {self.filtered} filtered" if self.filtered else ""
        return f"{self.trained} groups trained, {self.dropped} dropped (stale), {self.buried} buried (failed){filtered}"


class Intake:
    """``report_progress`` says on the bus that groups left the window; ``max_buried_in_a_row`` ends the run.

    ``owner``: the actor in whose name it speaks. Its ``problem`` is why the newest group was buried, until one is held.
    """

    def __init__(
        self,
        owner: Actor,
        *,
        standing: Standing,
        buffer: Buffer,
        prompts: PromptSource,
        feed: BatchFeed,
        history: History,
        filters: GroupFilters | None,
        examiner: Examiner,
        max_buried_in_a_row: int,
        report_progress: Callable[[], Awaitable[None]],
    ) -> None:
        self._owner = owner
        self._bus, self._log = owner.bus, owner.log
        self.buffer = buffer
        self.cursor = buffer.consumed.watermark - 1
        self.in_training: set[int] = set()
        """Groups of the step that runs now: they are nobody else's to dispose of."""
        self.buried_in_a_row = 0
        self._standing = standing
        self._prompts = prompts
        self._feed = feed
        self._history = history
        self._filters = filters
        self._examiner = examiner
        self._max_buried_in_a_row = max_buried_in_a_row
        self._report_progress = report_progress
        self._generated_lengths: list[int] = []
        self._dropped_lengths: list[int] = []

    async def check_log(self) -> None:
        """A bus made anew counts from 1 again: the checkpoint's cursor means another log. Group ids still hold."""
        if await self._bus.last_sequence(TRAJECTORIES) < self.cursor:
            self._log.warning("the trajectory log is shorter than the checkpoint's cursor: a new bus; reading it whole")
            self.buffer.consumed = Ledger(watermark=1)
            self.cursor = 0

    async def read(self) -> None:
        """consumes: trajectories    waits for: the prompt source's look at the bus, then records"""
        await self._prompts.reconciled.wait()
        async with self._bus.read(TRAJECTORIES, after=self.cursor) as records:
            async for record in records:
                await self._add(record)

    async def bury_unanswerable(self) -> None:
        """consumes: groups whose place in the log was taken before they were asked for    woken by: prompt source"""
        while True:
            group_id = await self._prompts.unanswerable.get()
            self.buffer.groups.add(group_id)
            group = buried(group_id, "", "its place in the trajectory log was taken before it was published")
            await self._bury(group, is_said=False)
            self._feed.wake()

    async def drop(self, stale: Sequence[Held], *, reason: str = "stale") -> None:
        """These groups were too old to train, or are a quarantined worker's."""
        self._history.lost("dropped", [held.group.group_id for held in stale], step=self._standing.step)
        for held in stale:
            self._standing.dropped += 1
            lengths = [len(trajectory.tokens) for trajectory in held.group.trajectories]
            if reason == "stale":
                self._dropped_lengths += lengths
            await self.event(
                "dropped",
                group_id=held.group.group_id,
                reason=reason,
                staleness=self._standing.policy_version - held.oldest,
                lengths=lengths,
            )
        await self._report_progress()

    async def quarantine(self, worker: str, reason: str) -> None:
        """Train nothing of this worker any more, and say so to everybody."""
        self._log.error("worker %s is quarantined: %s; nothing it makes is trained", worker, reason)
        try:
            await self._examiner.quarantine(worker, reason, run_epoch=self._standing.run_epoch)
        finally:  # said of the last worker too, whose quarantine ends the run
            await self.event("quarantined", worker=worker, reason=reason, life=self._examiner.lives.get(worker, ""))
        await self._drop_quarantined()

    async def event(self, kind: str, **data: object) -> None:
        """For whoever asks later why a group was not trained."""
        event = Event(kind=kind, actor=self._owner.name, time=time.time(), data=data)
        subject = next((data[name] for name in ("group_id", "sequence", "step", "life", "worker") if name in data), "")
        key = f"{self._standing.run_epoch}-{kind}-{subject}"
        await self._bus.publish(EVENTS, event, key=key)

    def take_metrics(self) -> Mapping[str, Metric]:
        """Of the buffer as it is, and of what came since the last call."""
        held = self.buffer.held.values()
        metrics: dict[str, Metric] = {
            "staleness/dropped_groups": float(self._standing.dropped),
            "staleness/buried_groups": float(self._standing.buried),
            "staleness/filtered_groups": float(self._standing.filtered),
            "buffer/groups": float(len(held)),
            "buffer/tokens": float(self.buffer.num_tokens),
            "buffer/oldest_seconds": max((time.monotonic() - h.arrived for h in held), default=0.0),
            "length/generated": batches.histogram(self._generated_lengths),
            "length/dropped": batches.histogram(self._dropped_lengths),
        }
        if self._dropped_lengths:
            metrics["length/dropped_mean"] = sum(self._dropped_lengths) / len(self._dropped_lengths)
        self._generated_lengths, self._dropped_lengths = [], []
        return metrics

    async def _add(self, record: Record[TrajectoryGroup]) -> None:
        self.cursor = record.sequence
        sender = record.message.worker if record.message is not None else ""
        if sender in self._examiner.quarantined and await self._examiner.is_another_life(sender):
            self._log.warning("worker %s was started again: it is judged anew", sender)
        vetted = self._examiner.vetted(
            record,
            is_published=self._prompts.is_published,
            run_epoch=self._standing.run_epoch,
            policy_version=self._standing.policy_version,
            forks=self.buffer.forks,
        )
        group = vetted.group
        became = self.buffer.add(record.sequence, group, now=time.monotonic())
        self._feed.wake()
        if became == "held" and group is not None:
            self._generated_lengths += [len(trajectory.tokens) for trajectory in group.trajectories]
            self.buried_in_a_row, self._owner.problem = 0, ""
            if group.cancelled:
                await self.event("cancelled", group_id=group.group_id, worker=group.worker, cancelled=group.cancelled)
            if group.worker in self._examiner.quarantined:
                await self._drop_quarantined()
            else:
                await self._filter(group)
        elif became == "buried" and group is not None:
            await self._bury(group, is_said=bool(vetted.problem))
        elif became == "refused":
            if (group_id := group_id_of(record.key)) is not None:
                self._prompts.taken.add(group_id)
            if vetted.is_news:
                await self.event("refused", sequence=record.sequence, problem=vetted.problem)

    async def _bury(self, group: TrajectoryGroup, *, is_said: bool) -> None:
        """Count a group that could not be made. ``is_said``: the log has the reason. Raises HopelessError."""
        self._standing.buried += 1
        self.buried_in_a_row += 1
        self._history.lost("buried", [group.group_id], step=self._standing.step)
        self._owner.problem = group.error
        if not is_said:
            worker, error = group.worker or "?", group.error
            self._log.warning("group %d was buried by %s: %s", group.group_id, worker, error, extra={REASON: error})
        await self.event("buried", group_id=group.group_id, worker=group.worker, error=group.error)
        if self.buried_in_a_row >= self._max_buried_in_a_row:
            raise HopelessError(
                f"the last {self.buried_in_a_row} groups were all buried; the newest because: {group.error}"
            )
        if reason := self._examiner.too_often(group.worker):
            await self.quarantine(group.worker, reason)
        await self._report_progress()

    async def _filter(self, group: TrajectoryGroup) -> None:
        """Release a group that a filter finds nothing to learn from, so that another is generated in its place."""
        if self._filters is None or self._filters.keep(group):
            return
        self.buffer.dispose(self.buffer.held[group.group_id])
        self._standing.filtered += 1
        self._history.lost("filtered", [group.group_id], step=self._standing.step)
        self._feed.filtered += 1
        await self.event("filtered", group_id=group.group_id, rewards=[t.reward for t in group.trajectories])
        await self._report_progress()

    async def _drop_quarantined(self) -> None:
        """What quarantined workers made and is not trained yet, but for the batch in training."""
        held = [one for one in self.buffer.held.values() if one.group.worker in self._examiner.quarantined]
        held = [one for one in held if one.group.group_id not in self.in_training]
        for one in held:
            self.buffer.dispose(one)
        if held:
            await self.drop(held, reason="quarantined")
            self._feed.wake()
