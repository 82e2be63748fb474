"""Decides which groups the learner accepts: valid groups of workers whose logprobs match the policy's. A thin layer
over policies/trust.

A worker is quarantined when, twice in a row, the trainer's scores of its answers differ from the logprobs it sent
(logprob_mismatch.py), or when it has sent ``MOST_IMPOSSIBLE`` impossible groups (validation.py). From then on nothing
it made is trained in this incarnation. The worker learns of it through the state ``quarantine``. A run in which every
worker is quarantined ends with the reason. The verdict applies to one life of the worker: a new life under the same
name is judged afresh.

Tests: tests/actors/learner/test_validator.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.backends.port import Backend
from asyncrl.bus.port import Bus, Record
from asyncrl.errors import HopelessError
from asyncrl.messages import Quarantine, TrajectoryGroup, replace
from asyncrl.messages.roles import WORKER
from asyncrl.messages.rollout import LONGEST_ERROR, failed_group
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.messages.topics import ACTORS, QUARANTINE, TRAJECTORIES, group_id_of
from asyncrl.messages.validation import name_problem
from asyncrl.policies.batching import packing
from asyncrl.policies.batching.packing import Document, pack_for_ranks
from asyncrl.policies.staleness.staleness import Forks
from asyncrl.policies.trust import resumed_tokens
from asyncrl.policies.trust.logprob_mismatch import Chosen, LogprobMismatch, routing_mismatch
from asyncrl.policies.trust.validation import Asked, GroupValidation


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubts:
    """Answers of a batch to score before it is trained.

    chosen      answers that show whether a worker is honest
    own         each document with only its worker's own tokens
    taken_over  document index -> the document with the tokens that its worker took over (resumed_tokens.py)
    """

    chosen: Sequence[Chosen]
    own: Sequence[Document]
    taken_over: Mapping[int, Document]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """guilty: worker to quarantine -> why;  spoiled: index of a document not to train -> why"""

    guilty: Mapping[str, str]
    spoiled: Mapping[int, str]


Rescore = Callable[[Callable[[Backend], Verdict]], Awaitable[Verdict]]
"""Runs a function on the training backend, between two steps."""

MOST_IMPOSSIBLE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What to do with a log record.

    group     the record's group; a failed one if it cannot be trained; None if this run did not ask for it
    problem   why the group is not used as it is
    is_news   whether this is the first such problem of this sender
    """

    group: TrajectoryGroup | None
    problem: str = ""
    is_news: bool = False


class Validator:
    """One per learner. ``quarantined``: worker -> reason."""

    def __init__(
        self,
        bus: Bus,
        *,
        validation: GroupValidation | None = None,
        rescoring: LogprobMismatch | None = None,
        num_dp_shards: int = 1,
        max_tokens: int = 16_384,
    ) -> None:
        """num_dp_shards: data-parallel ranks of the scoring backend; max_tokens: tokens per micro-batch"""
        self._bus = bus
        self._validation = validation or GroupValidation()
        self._rescoring = rescoring or LogprobMismatch(bound=0.0, every=1)
        self._num_dp_shards, self._max_tokens = num_dp_shards, max_tokens
        self._impossible: dict[str, tuple[int, str]] = {}
        """worker -> number of its impossible groups, and the problem of the last one"""
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

    def check(
        self,
        record: Record[TrajectoryGroup],
        *,
        is_published: Callable[[int], bool],
        incarnation: int,
        policy_version: int,
        forks: Forks,
        asked: Callable[[int], Asked | None] = lambda group_id: None,
        group_answered: Callable[[str], int | None] = group_id_of,
    ) -> Checked:
        """Check a record.

        is_published    whether this run asked for a group
        asked           what a group's prompt asked for, if known
        group_answered  group id from a record's key
        """
        group, group_id = record.message, group_answered(record.key)
        if group_id is None or not is_published(group_id):
            problem = f"key {record.key!r} names no group that this run requested"
            if (named := group_id_of(record.key)) is not None and is_published(named):
                problem = (
                    f"group {named} is answered without its ticket, by a client that its prompt was not delivered to"
                )
            is_news = self._bus.rejections.note(TRAJECTORIES.name, problem, kind="key", sender=sender_of(group))
            return Checked(group=None, problem=problem, is_news=is_news)
        problem = record.problem and f"does not decode: {record.problem}"
        if group is not None:
            problem = self._validation.problem(
                group,
                incarnation=incarnation,
                policy_version=policy_version,
                forks=forks,
                asked=asked(group_id),
            )
            if group.group_id != group_id:
                problem = f"it says it is group {group.group_id}"
        if not problem:
            if group is not None and len(group.error) > LONGEST_ERROR:
                group = replace(group, error=group.error[:LONGEST_ERROR])
            return Checked(group=group)
        sender = sender_of(group)
        is_news = self._bus.rejections.note(
            TRAJECTORIES.name,
            f"group {group_id}: {problem}",
            kind="malformed" if group is None else "impossible",
            sender=sender,
        )
        if sender:
            self._impossible[sender] = self._impossible.get(sender, (0, ""))[0] + 1, problem
        return Checked(group=failed_group(group_id, worker=sender, error=problem), problem=problem, is_news=is_news)

    @property
    def is_on(self) -> bool:
        """Whether workers are quarantined (learner.quarantine_mismatch)."""
        return self._rescoring.is_on

    async def others(self, workers: Collection[str]) -> set[str]:
        """Return workers that are live and trusted, except ``workers``."""
        return (await self._alive()).keys() - set(workers) - self.quarantined.keys()

    def too_often(self, worker: str) -> str:
        """Return why a worker should be quarantined for impossible groups; "" if it should not."""
        count, last = self._impossible.get(worker, (0, ""))
        if count < MOST_IMPOSSIBLE or not self.is_on or worker in self.quarantined:
            return ""
        return f"{count} impossible groups, the last because: {last}"

    def doubts(self, documents: Sequence[Document], groups: Sequence[TrajectoryGroup], *, step: int) -> Doubts | None:
        """Return what to score again before a batch of ``groups`` is trained; None if nothing."""
        if not self.is_on:
            return None
        own, taken_over = resumed_tokens.split(documents, groups)
        workers = [group.worker for group in groups for _ in group.trajectories]
        chosen = self._rescoring.choose(own, workers, step=step)
        return Doubts(chosen=chosen, own=own, taken_over=taken_over) if chosen or taken_over else None

    def judge(self, doubts: Doubts, documents: Sequence[Document], backend: Backend) -> Verdict:
        """Score the doubtful documents in a forward pass and judge them. Blocks."""
        chosen = sorted({one.document for one in doubts.chosen})
        logprobs = self._scores(sorted({*chosen, *doubts.taken_over}), documents, backend)
        if any(len(documents[index].experts) for index in chosen):
            of_own = [replace(document, experts=NO_EXPERTS) for document in documents]
            replayed = {index: logprobs[index] for index in chosen}
            self.routing = routing_mismatch(documents, replayed, self._scores(chosen, of_own, backend))
        found, guilty = self._rescoring.judge(doubts.chosen, doubts.own, logprobs)
        if chosen:
            self.mismatch = {worker: of.mean for worker, of in found.items()}
        return Verdict(
            guilty={
                worker: f"its behavior logprobs are {found[worker].mean:.3g} nats per token off the trainer's "
                f"(over {found[worker].tokens} tokens; {found[worker].allowed:.3g} are allowed)"
                for worker in guilty
            },
            spoiled=resumed_tokens.spoiled(doubts.taken_over, logprobs, bound=self._rescoring.bound),
        )

    def _scores(
        self, indices: Sequence[int], documents: Sequence[Document], backend: Backend
    ) -> dict[int, NDArray[np.float32]]:
        """Return the trainer's logprobs f32[T] of the documents with these indices."""
        shards = pack_for_ranks([documents[i] for i in indices], ranks=self._num_dp_shards, max_tokens=self._max_tokens)
        logprobs: dict[int, NDArray[np.float32]] = {}
        for shard, scored in zip(shards, backend.score(shards), strict=True):
            for micro_batch, array in zip(shard, scored, strict=True):
                for index, place in zip(micro_batch.documents, packing.documents(micro_batch), strict=True):
                    if index >= 0:
                        logprobs[indices[index]] = array[place]
        return logprobs

    async def quarantine(self, worker: str, reason: str, *, incarnation: int) -> None:
        """Quarantine a worker and announce it. Raises HopelessError if no worker is left."""
        alive = await self._alive()
        self.quarantined[worker], self.lives[worker] = reason, alive.get(worker, "")
        verdict = Quarantine(worker=worker, incarnation=incarnation, reason=reason, life=self.lives[worker])
        await self._bus.put(QUARANTINE, verdict, key=worker)
        if alive and alive.items() <= self.lives.items():
            raise HopelessError(f"every rollout worker is quarantined; the last, {worker}, for {reason}")

    async def is_another_life(self, worker: str) -> bool:
        """Return whether a quarantined worker was restarted; if so, its quarantine ends."""
        life = (await self._alive()).get(worker, "")
        if life in ("", self.lives[worker]):  # a late answer of the judged life
            return False
        del self.quarantined[worker], self.lives[worker]
        self._impossible.pop(worker, None)
        self._rescoring.forget(worker)
        await self._bus.forget(QUARANTINE, key=worker)
        return True

    async def _alive(self) -> dict[str, str]:
        """Return worker -> life for workers that send heartbeats."""
        beats = (await self._bus.states(ACTORS)).values()
        return {beat.actor: beat.life for beat in beats if beat.role == WORKER}


def sender_of(group: TrajectoryGroup | None) -> str:
    """Return the worker that a message names; "" if the name is missing or invalid."""
    return "" if group is None or name_problem(group.worker) else group.worker
