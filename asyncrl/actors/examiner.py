"""What the learner lets in: groups that can be, of workers whose logprobs are the policy's. Thin, over policies/.

A worker is quarantined when the trainer scores its answers otherwise, twice in a row (rescoring.py), or when it has
sent ``MOST_IMPOSSIBLE`` groups that cannot be (vetting.py). Nothing of it is trained from then on in this run epoch. It
is told through the state ``quarantine``; a run whose every worker is quarantined ends with the reason. The verdict is
on one life of the worker: who is started again under its name is judged anew.

Tests: tests/test_examiner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import HopelessError
from asyncrl.messages import Quarantine, TrajectoryGroup
from asyncrl.policies import packing
from asyncrl.policies.packing import Document, pack_for_ranks
from asyncrl.policies.rescoring import Chosen, Rescoring
from asyncrl.policies.staleness import Forks
from asyncrl.policies.vetting import Vetting
from asyncrl.protocols import Backend, Bus, Record
from asyncrl.topics import ACTORS, QUARANTINE, TRAJECTORIES, group_id_of

MOST_IMPOSSIBLE: Final = 3
WORKER_ROLE: Final = "rollout-worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vetted:
    """What to make of a record. group: itself, buried if it cannot be trained, None if nobody asked for it.

    problem: why not itself; is_news: the first of this kind by this sender
    """

    group: TrajectoryGroup | None
    problem: str = ""
    is_news: bool = False


class Examiner:
    """One per learner. ``quarantined``: worker -> why."""

    def __init__(
        self, bus: Bus, *, vetting: Vetting | None = None, rescoring: Rescoring | None = None, shares: int = 1
    ) -> None:
        """``shares``: data-parallel ranks of the backend that scores."""
        self._bus = bus
        self._vetting = vetting or Vetting()
        self._rescoring = rescoring or Rescoring(bound=0.0, every=1)
        self._shares = shares
        self._impossible: dict[str, int] = {}
        self.quarantined: dict[str, str] = {}
        self.lives: dict[str, str] = {}
        """Which life of a quarantined worker is meant; "" when it had ended."""
        self.mismatch: dict[str, float] = {}
        """``mismatch/<worker>`` of the last look, nats per token."""

    async def start(self) -> None:
        """A new run epoch judges anew."""
        for worker in await self._bus.states(QUARANTINE):
            await self._bus.forget(QUARANTINE, key=worker)

    def vetted(
        self,
        record: Record[TrajectoryGroup],
        *,
        is_published: Callable[[int], bool],
        run_epoch: int,
        policy_version: int,
        forks: Forks,
    ) -> Vetted:
        """``is_published``: whether this run asked for a group."""
        group, group_id = record.message, group_id_of(record.key)
        if group_id is None or not is_published(group_id):
            problem = f"key {record.key!r} is no group that this run asked for"
            is_news = self._bus.refusals.note(
                TRAJECTORIES.name, problem, kind="key", sender=group.worker if group else ""
            )
            return Vetted(group=None, problem=problem, is_news=is_news)
        problem = record.problem and f"does not decode: {record.problem}"
        if group is not None:
            problem = self._vetting.problem(group, run_epoch=run_epoch, policy_version=policy_version, forks=forks)
            if group.group_id != group_id:
                problem = f"it says it is group {group.group_id}"
        if not problem:
            return Vetted(group=group)
        sender = group.worker if group is not None else ""
        is_news = self._bus.refusals.note(
            TRAJECTORIES.name,
            f"group {group_id}: {problem}",
            kind="malformed" if group is None else "impossible",
            sender=sender,
        )
        if sender:
            self._impossible[sender] = self._impossible.get(sender, 0) + 1
        return Vetted(group=buried(group_id, sender, problem), problem=problem, is_news=is_news)

    def too_often(self, worker: str) -> str:
        """Why a worker should be quarantined for what it sent; "" when it need not."""
        count = self._impossible.get(worker, 0)
        if count < MOST_IMPOSSIBLE or not self._rescoring.is_on or worker in self.quarantined:
            return ""
        return f"{count} groups that cannot be"

    def chosen(self, documents: Sequence[Document], groups: Sequence[TrajectoryGroup], *, step: int) -> list[Chosen]:
        """The documents of a batch of ``groups`` that are to be scored again before it is trained."""
        workers = [group.worker for group in groups for _ in group.trajectories]
        return self._rescoring.choose(documents, workers, step=step)

    def judged(
        self, chosen: Sequence[Chosen], documents: Sequence[Document], *, backend: Backend, max_tokens: int
    ) -> dict[str, str]:
        """Who is to be quarantined, and why. Blocking: a forward pass over the chosen documents."""
        indices = [one.document for one in chosen]
        shares = pack_for_ranks([documents[i] for i in indices], ranks=self._shares, max_tokens=max_tokens)
        logprobs: dict[int, NDArray[np.float32]] = {}
        for share, scored in zip(shares, backend.score(shares), strict=True):
            for micro_batch, array in zip(share, scored, strict=True):
                for index, place in zip(micro_batch.documents, packing.documents(micro_batch), strict=True):
                    if index >= 0:
                        logprobs[indices[index]] = array[place]
        found, guilty = self._rescoring.judge(chosen, documents, logprobs)
        self.mismatch = {worker: of.mean for worker, of in found.items()}
        return {
            worker: f"its behavior logprobs are {found[worker].mean:.3g} nats per token off the trainer's "
            f"(over {found[worker].tokens} tokens; {found[worker].allowed:.3g} are allowed)"
            for worker in guilty
        }

    async def quarantine(self, worker: str, reason: str, *, run_epoch: int) -> None:
        """Tell the worker. Raises HopelessError when no worker is left."""
        alive = await self._alive()
        self.quarantined[worker], self.lives[worker] = reason, alive.get(worker, "")
        verdict = Quarantine(worker=worker, run_epoch=run_epoch, reason=reason, life=self.lives[worker])
        await self._bus.put(QUARANTINE, verdict, key=worker)
        if alive and alive.items() <= self.lives.items():
            raise HopelessError(f"every rollout worker is quarantined; the last, {worker}, for {reason}")

    async def is_another_life(self, worker: str) -> bool:
        """Whether a quarantined worker was started again; then it is quarantined no longer."""
        life = (await self._alive()).get(worker, "")
        if life in ("", self.lives[worker]):  # what came late of one that has ended is its own
            return False
        del self.quarantined[worker], self.lives[worker]
        self._impossible.pop(worker, None)
        self._rescoring.forget(worker)
        await self._bus.forget(QUARANTINE, key=worker)
        return True

    async def _alive(self) -> dict[str, str]:
        """worker -> life, of those that beat."""
        beats = (await self._bus.states(ACTORS)).values()
        return {beat.actor: beat.life for beat in beats if beat.role == WORKER_ROLE}


def buried(group_id: int, worker: str, problem: str) -> TrajectoryGroup:
    """What the learner makes of a group that cannot be trained."""
    return TrajectoryGroup(
        group_id=group_id,
        prompt_tokens=np.zeros(0, np.int32),
        trajectories=(),
        worker=worker,
        error=problem[:2000],
    )
