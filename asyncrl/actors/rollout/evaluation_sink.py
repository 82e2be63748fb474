"""The evaluation stage's sink: answers into their own log, if the evaluated version sampled every token of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Final

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.errors import BusFull, EngineError, MessageTooLarge
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.evaluation import Evaluation, EvaluationAnswers
from asyncrl.messages.rollout import failed_group
from asyncrl.messages.topics import EVALUATION_ANSWERS
from asyncrl.policies.health.faults import LEARNER, SPACE_IN_LOG
from asyncrl.protocols import Bus

FULL_LOG_SECONDS: Final = 1.0
"""Between two tries to publish into a full log: nobody announces that there is space again."""

Vote = Callable[[str, TrajectoryGroup], tuple[str, ...]]
"""Of a data set and the answers to a prompt of it: what each comes down to."""


class EvaluationSink:
    """Publishes to ``evaluation_answers``. A Sink (stage_ports.py)."""

    def __init__(
        self,
        bus: Bus,
        *,
        worker: str,
        current: Callable[[], Evaluation | None],
        dataset_of: Callable[[int], str],
        vote: Vote,
        waits: WaitTracker,
    ) -> None:
        """
        current     the evaluation whose version the engine holds; answers to any other are not needed any more
        dataset_of  of a group that is being answered
        """
        self._bus, self._worker, self._waits = bus, worker, waits
        self._current = current
        self._vote = vote
        self._dataset_of = dataset_of
        self.num_mixed = 0
        """Answers that were sampled by more than one version, or by another: made again, never published."""

    async def publish(self, group: TrajectoryGroup) -> None:
        """Raises EngineError for answers that are not of the evaluated version: the prompt is answered again."""
        evaluation, dataset = self._current(), self._dataset_of(group.group_id)
        if evaluation is None or evaluation.index(group.group_id) is None:
            return  # it ended without them
        if not evaluation.is_of(group):
            self.num_mixed += 1
            raise EngineError(f"its answers are not all of version {evaluation.weights.policy_version}")
        votes = self._vote(dataset, group)
        await self._store(
            EvaluationAnswers(number=evaluation.number, dataset=dataset, group=group, votes=votes, worker=self._worker)
        )

    async def _store(self, answers: EvaluationAnswers) -> None:
        """Returns when they are in the log. A key of their own: what is refused is asked again, and stored beside."""
        key = f"{answers.group.group_id}-{uuid.uuid4().hex[:12]}"
        while True:
            try:
                await self._bus.publish(EVALUATION_ANSWERS, answers, key=key)
                return
            except BusFull:
                with self._waits.waiting(SPACE_IN_LOG, on=LEARNER):
                    await asyncio.sleep(FULL_LOG_SECONDS)
            except MessageTooLarge as error:
                group = failed_group(answers.group.group_id, worker=self._worker, error=str(error))
                answers = EvaluationAnswers(
                    number=answers.number, dataset=answers.dataset, group=group, worker=self._worker
                )
