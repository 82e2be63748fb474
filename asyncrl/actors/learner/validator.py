"""Decides which groups the learner accepts: valid groups, kept by the filters, of workers whose logprobs match the
policy's. The only place that judges; group_remover.py acts on it.

A worker is quarantined when, twice in a row, the trainer's logprobs of its answers differ from the logprobs it sent
(logprob_mismatch.py), or when it has sent ``MOST_IMPOSSIBLE`` impossible groups (validation.py). From then on nothing
it made is trained in this incarnation. The worker learns of it through the state ``quarantine``. A run in which every
worker is quarantined ends with the reason. The verdict applies to one life of the worker: a new life under the same
name is judged afresh.

Nobody is blamed for what another one may have made: a group with tokens of an earlier attempt, or one that an earlier
incarnation left in the log, is failed if it cannot be trained, and counts against nobody.

Tests: tests/actors/learner/test_validator.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.learner.group_filters import GroupFilters
from asyncrl.actors.learner.image_reader import ImageReader
from asyncrl.bus.port import Bus, Record
from asyncrl.errors import FilterError, HopelessError
from asyncrl.logs import REASON
from asyncrl.messages import Quarantine, TrajectoryGroup, replace
from asyncrl.messages.roles import WORKER
from asyncrl.messages.rollout import LONGEST_ERROR, failed_group
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.messages.topics import ACTORS, QUARANTINE, TRAJECTORIES, group_id_of, sender_of
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.policies.groups import resumed_tokens
from asyncrl.policies.groups.logprob_mismatch import ChosenAnswer, LogprobMismatch, routing_mismatch
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.groups.tickets import Tickets
from asyncrl.policies.groups.validation import GroupValidation
from asyncrl.policies.metric import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobCheck:
    """Answers of a batch whose logprobs the trainer computes before they are trained.

    indices          of these sequences in the batch
    sequences        in the same order
    without_experts  the chosen ones without the engine's experts, to see what replaying them changes; may be empty
    chosen           answers that show whether a worker is honest
    own              each sequence of the batch with only its worker's own tokens
    taken_over       sequence index -> the sequence with the tokens that its worker took over (resumed_tokens.py)
    """

    indices: Sequence[int]
    sequences: Sequence[TrainingSequence]
    without_experts: Mapping[int, TrainingSequence]
    chosen: Sequence[ChosenAnswer]
    own: Sequence[TrainingSequence]
    taken_over: Mapping[int, TrainingSequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """workers: to quarantine -> why;  sequences: index of a sequence of the batch that is not to be trained -> why"""

    workers: Mapping[str, str] = field(default_factory=dict)
    sequences: Mapping[int, str] = field(default_factory=dict)


MOST_IMPOSSIBLE: Final = 3

log = logging.getLogger("asyncrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What to do with a log record.

    group         the record's group; a failed one if it cannot be trained; None if this run did not ask for it
    problem       why the group is not used as it is
    is_news       whether this is the first such problem of this sender
    is_counted    whether a failed group counts towards those in a row that end the run, or quarantine its worker: an
                  impossible group does not show that the run cannot make groups, it counts only against its
                  sender. What an earlier incarnation saw counts for nothing
    filtered_by   filter that rejects the group
    filter_error  why a filter could not decide
    """

    group: TrajectoryGroup | None
    problem: str = ""
    is_news: bool = False
    is_counted: bool = True
    filtered_by: str = ""
    filter_error: str = ""


class Validator:
    """One per learner. ``quarantined``: worker -> reason."""

    def __init__(
        self,
        bus: Bus,
        *,
        validation: GroupValidation | None = None,
        logprob_check: LogprobMismatch | None = None,
        filters: GroupFilters | None = None,
        tickets: Tickets | None = None,
        hooks: Hooks | None = None,
        temperatures: Sequence[float] = (),
        image_reader: ImageReader | None = None,
    ) -> None:
        """filters: None keeps every group;  tickets: None for answers without tickets
        temperatures: rollout.temperature of every incarnation, this one last
        image_reader: None: the model reads text alone"""
        self._bus = bus
        self._validation = validation or GroupValidation()
        self._logprob_check = logprob_check or LogprobMismatch(bound=0.0, every=1)
        self.filters = filters or GroupFilters({}, max_in_a_row=1)
        self.hooks = hooks or Hooks()
        self.tickets = tickets or Tickets()
        self._temperatures = temperatures
        self._image_reader = image_reader
        self._explained = ""
        """The last error of a filter; its traceback is in the log already."""
        self._impossible: dict[str, tuple[int, str]] = {}
        """worker -> number of its impossible groups, and the problem of the last one"""
        self._inherited: set[int] = set()
        """Groups that an earlier incarnation left in the log."""
        self.quarantined: dict[str, str] = {}
        self.lives: dict[str, str] = {}
        """Quarantined worker -> the life that the verdict applies to; "" if that life had ended."""
        self.mismatch: dict[str, float] = {}
        """worker -> mean difference at the last look, in nats per token."""
        self.routing: dict[str, float] = {}
        """How replaying the engine's experts changed the differences at the last look (routing_mismatch)."""

    async def start(self) -> None:
        """Forget old verdicts: a new incarnation judges afresh."""
        for worker in await self._bus.states(QUARANTINE):
            await self._bus.forget(QUARANTINE, key=worker)

    # -- before the buffer ---------------------------------------------------------------------------------------------

    async def find_image_problem(self, record: Record[TrajectoryGroup], table: GroupTable) -> str:
        """Return why the images of an answer that is asked for cannot be trained; "" if they can, or there are none.

        Keeps those that environments showed. Their files are read, hashed and decoded in a thread.
        """
        group, group_id = record.message, self.tickets.group_answered(record.key)
        if group is None or not any(one.images for one in group.trajectories):
            return ""
        if group_id is None or not table.is_published(group_id) or not table.awaits(record.sequence, group_id):
            return ""  # ``check`` rejects it
        if self._image_reader is None:
            return "an answer shows an image, and the model reads text alone"
        return await asyncio.to_thread(self._image_reader.problem, group)

    def check(
        self,
        record: Record[TrajectoryGroup],
        table: GroupTable,
        *,
        is_inherited: bool = False,
        image_problem: str = "",
    ) -> CheckResult:
        """Check a record before its group is buffered.

        is_inherited   it was stored before this incarnation began
        image_problem  of ``find_image_problem``

        For a group that is not outstanding only the key is used, so no worker is judged by records that are read again.
        """
        group, group_id = record.message, self.tickets.group_answered(record.key)
        if group_id is None or not table.is_published(group_id):
            return self._not_asked_for(record, table)
        if not table.awaits(record.sequence, group_id):
            return CheckResult(group=failed_group(group_id, worker="", error="it arrived before"))
        problem = record.problem and f"does not decode: {record.problem}"
        if group is not None:
            problem = self._validation.problem(
                group,
                incarnation=table.incarnation,
                policy_version=table.policy_version,
                resume_points=table.resume_points,
                asked=table.asked(group_id),
            )
            problem = problem or image_problem
            if group.group_id != group_id:
                problem = f"it says it is group {group.group_id}"
        if problem or group is None:
            return self._impossible_group(record, group_id=group_id, problem=problem, is_inherited=is_inherited)
        if is_inherited:
            if problem := self._other_temperature(group):
                log.warning("group %d is not trained: %s", group_id, problem, extra={REASON: problem})
                return CheckResult(
                    group=failed_group(group_id, worker=group.worker, error=problem), problem=problem, is_counted=False
                )
            self._inherited.add(group_id)
        if len(group.error) > LONGEST_ERROR:
            group = replace(group, error=group.error[:LONGEST_ERROR])
        return self._filter(group, table, is_inherited=is_inherited)

    def _other_temperature(self, group: TrajectoryGroup) -> str:
        """Return why a group that an earlier incarnation left cannot be trained; "" if it can.

        A group without a temperature of its own was sampled at the rollout.temperature of then, and the trainer divides
        its logits by that of now.
        """
        if group.temperature or group.error or not self._temperatures:
            return ""
        newest = max(span.incarnation for one in group.trajectories for span in one.version_spans)
        was, now = self._temperatures[min(newest, len(self._temperatures) - 1)], self._temperatures[-1]
        return "" if was == now else f"it was sampled at rollout.temperature {was:g}, and is trained at {now:g}"

    def _not_asked_for(self, record: Record[TrajectoryGroup], table: GroupTable) -> CheckResult:
        problem = f"key {record.key!r} names no group that this run requested"
        if (named := group_id_of(record.key)) is not None and table.is_published(named):
            problem = f"group {named} is answered without its ticket, by a client that its prompt was not delivered to"
        sender = sender_of(record.key)
        is_news = self._bus.rejections.note(TRAJECTORIES.name, problem, kind="key", sender=sender)
        return CheckResult(group=None, problem=problem, is_news=is_news)

    def _impossible_group(
        self, record: Record[TrajectoryGroup], *, group_id: int, problem: str, is_inherited: bool
    ) -> CheckResult:
        sender = sender_of(record.key)
        is_news = self._bus.rejections.note(
            TRAJECTORIES.name,
            f"group {group_id}: {problem}",
            kind="malformed" if record.message is None else "impossible",
            sender=sender,
        )
        is_of_others = is_inherited or (
            record.message is not None and any(one.resumed for one in record.message.trajectories)
        )
        if sender and not is_of_others:
            self._impossible[sender] = self._impossible.get(sender, (0, ""))[0] + 1, problem
        failed = failed_group(group_id, worker=sender, error=problem)
        return CheckResult(
            group=failed, problem=problem, is_news=is_news, is_counted=not self.is_on and not is_of_others
        )

    def _filter(self, group: TrajectoryGroup, table: GroupTable, *, is_inherited: bool) -> CheckResult:
        """Apply hooks and filters, unless the group is not trained anyway. Raises HopelessError (group_filters.py)."""
        is_counted = not is_inherited
        if group.error or group.worker in self.quarantined:
            return CheckResult(group=group, is_counted=is_counted)
        try:
            group = self._apply_hooks(group, is_counted=is_counted)
            if self.filters.keep(group, since_step=table.lost_since_step("filtered"), is_counted=is_counted):
                return CheckResult(group=group)
        except FilterError as error:
            if str(error) != self._explained:
                self._explained = str(error)
                log.info("where it was raised:", exc_info=error.__cause__)
            return CheckResult(group=group, filter_error=str(error))
        return CheckResult(group=group, filtered_by=self.filters.rejected_by)

    def _apply_hooks(self, group: TrajectoryGroup, *, is_counted: bool) -> TrajectoryGroup:
        """Return the group as hooks change it. Raises FilterError, and HopelessError after too many in a row."""
        try:
            return self.hooks.group(group)
        except FilterError as error:
            cause = error.__cause__ or error
            self.filters.note_raised(str(error), what="a hook", cause=cause, is_counted=is_counted)
            raise

    async def notice_restart(self, record: Record[TrajectoryGroup]) -> None:
        """End the quarantine of the record's worker if it was restarted."""
        sender = sender_of(record.key)
        if sender in self.quarantined and await self.end_quarantine_if_restarted(sender):
            log.warning("worker %s was restarted: its quarantine ends", sender)

    @property
    def is_on(self) -> bool:
        """Whether workers are quarantined (learner.quarantine_mismatch)."""
        return self._logprob_check.is_on

    async def other_workers(self, workers: Collection[str]) -> set[str]:
        """Return workers that are live and trusted, except ``workers``."""
        return (await self._alive()).keys() - set(workers) - self.quarantined.keys()

    def why_quarantine(self, worker: str) -> str:
        """Return why a worker should be quarantined for impossible groups; "" if it should not."""
        count, last = self._impossible.get(worker, (0, ""))
        if count < MOST_IMPOSSIBLE or not self.is_on or worker in self.quarantined:
            return ""
        return f"{count} impossible groups, the last because: {last}"

    # -- before a step -------------------------------------------------------------------------------------------------

    def choose(
        self, sequences: Sequence[TrainingSequence], groups: Sequence[TrajectoryGroup], *, step: int
    ) -> LogprobCheck | None:
        """Return what to check before a batch of ``groups`` is trained; None if nothing."""
        if not self.is_on:
            return None
        own, taken_over = resumed_tokens.split(sequences, groups, inherited=self._inherited)
        workers = [group.worker for group in groups for _ in group.trajectories]
        answers = self._logprob_check.choose(own, workers, step=step)
        if not answers and not taken_over:
            return None
        chosen = sorted({one.sequence for one in answers})
        indices = sorted({*chosen, *taken_over})
        has_experts = any(len(sequences[index].experts) for index in chosen)
        return LogprobCheck(
            indices=indices,
            sequences=[sequences[index] for index in indices],
            without_experts={i: replace(sequences[i], experts=NO_EXPERTS) for i in chosen} if has_experts else {},
            chosen=answers,
            own=own,
            taken_over=taken_over,
        )

    def check_logprobs(
        self,
        to_check: LogprobCheck,
        found_logprobs: Sequence[NDArray[np.float32]],
        logprobs_without_experts: Sequence[NDArray[np.float32]],
    ) -> Suspects:
        """Return who and what is not to be trained, by the trainer's logprobs f32[T] of ``to_check``."""
        logprobs = dict(zip(to_check.indices, found_logprobs, strict=True))
        if to_check.without_experts:
            replayed = {index: logprobs[index] for index in to_check.without_experts}
            sequences = dict(zip(to_check.indices, to_check.sequences, strict=True))
            own = dict(zip(to_check.without_experts, logprobs_without_experts, strict=True))
            self.routing = routing_mismatch(sequences, replayed, own)
        found, guilty = self._logprob_check.judge(to_check.chosen, to_check.own, logprobs)
        if to_check.chosen:
            self.mismatch = {worker: of.mean for worker, of in found.items()}
        return Suspects(
            workers={
                worker: f"its behavior logprobs are {found[worker].mean:.3g} nats per token off the trainer's "
                f"(over {found[worker].tokens} tokens; {found[worker].allowed:.3g} are allowed)"
                for worker in guilty
            },
            sequences=resumed_tokens.spoiled(to_check.taken_over, logprobs, bound=self._logprob_check.bound),
        )

    # -- quarantine ----------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Metric]:
        """Return metrics of the workers' answers."""
        return {
            **{f"mismatch/{worker}/mean": mean for worker, mean in self.mismatch.items()},
            **self.routing,
            "rollout/quarantined": float(len(self.quarantined)),
            "staleness/kept_at_cap": float(self.filters.num_kept_at_cap),
            **{f"staleness/filtered/{by}": float(n) for by, n in self.filters.num_by.items()},
        }

    async def quarantine(self, worker: str, reason: str, *, incarnation: int) -> None:
        """Quarantine a worker and announce it. Raises HopelessError if no worker is left."""
        alive = await self._alive()
        self.quarantined[worker], self.lives[worker] = reason, alive.get(worker, "")
        verdict = Quarantine(worker=worker, incarnation=incarnation, reason=reason, life=self.lives[worker])
        await self._bus.put(QUARANTINE, verdict, key=worker)
        if alive and alive.items() <= self.lives.items():
            raise HopelessError(f"every rollout worker is quarantined; the last, {worker}, for {reason}")

    async def end_quarantine_if_restarted(self, worker: str) -> bool:
        """Return whether a quarantined worker was restarted; if so, its quarantine ends."""
        life = (await self._alive()).get(worker, "")
        if life in ("", self.lives[worker]):  # a late answer of the judged life
            return False
        del self.quarantined[worker], self.lives[worker]
        self._impossible.pop(worker, None)
        self._logprob_check.forget(worker)
        await self._bus.forget(QUARANTINE, key=worker)
        return True

    async def _alive(self) -> dict[str, str]:
        """Return worker -> life for workers that send heartbeats."""
        beats = (await self._bus.states(ACTORS)).values()
        return {beat.actor: beat.life for beat in beats if beat.role == WORKER}
