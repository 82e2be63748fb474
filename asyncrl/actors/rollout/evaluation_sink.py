"""The evaluation stage's sink: answers into their own log, whole where they are recorded, else without their tokens."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.errors import BusFull, EngineError, MessageError, MessageTooLarge
from asyncrl.messages import PromptGroup, TrajectoryGroup, replace
from asyncrl.messages.evaluation import Answer, Evaluation, EvaluationAnswers, label_text
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.messages.topics import EVALUATION_ANSWERS
from asyncrl.policies.health.faults import LEARNER, SPACE_IN_LOG
from asyncrl.protocols import Bus

FULL_LOG_SECONDS: Final = 1.0
"""Between two tries to publish into a full log: nobody announces that there is space again."""

Vote = Callable[[str, TrajectoryGroup], Awaitable[Sequence[str]]]
"""Of a data set and the answers to a prompt of it: what each comes down to."""


class EvaluationSink:
    """Publishes to ``evaluation_answers``. A Sink (stage_ports.py)."""

    def __init__(
        self,
        bus: Bus,
        *,
        worker: str,
        current: Callable[[], Evaluation | None],
        held_seconds: Callable[[], float],
        is_draining: Callable[[], bool],
        prompt_of: Callable[[int], PromptGroup | None],
        vote: Vote,
        waits: WaitTracker,
    ) -> None:
        """
        current       the evaluation in progress; answers to any other are not needed any more
        held_seconds  for which the engine has had its version
        prompt_of     of a group that is being answered
        """
        self._bus, self._worker, self._waits = bus, worker, waits
        self._current, self._is_draining = current, is_draining
        self._vote = vote
        self._prompt_of, self._held_seconds = prompt_of, held_seconds
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def publish(self, group: TrajectoryGroup, *, ticket: str) -> None:
        """Also answers that other versions sampled a part of: the learner counts those, and asks again.

        Returns when they are in the log, or not needed any more. Raises EngineError when a worker that drains finds
        the log full: another one answers then.
        """
        prompt = self._prompt_of(group.group_id)
        dataset = "" if prompt is None else prompt.dataset
        evaluation = self._needed_by(group.group_id)
        if evaluation is None:
            return  # it ended without them
        votes = await self._vote(dataset, group) if group.trajectories else ()
        answers = EvaluationAnswers(
            number=evaluation.number,
            group_id=group.group_id,
            dataset=dataset,
            answers=tuple(
                Answer(
                    reward=parts[-1].reward,
                    length=sum(len(one.tokens) for one in parts),
                    version_spans=tuple(span for one in parts for span in one.version_spans),
                    finish_reason=parts[-1].finish_reason,
                    vote=vote,
                )
                for parts, vote in zip(group.rollouts, votes, strict=True)
            ),
            error=group.error,
            worker=self._worker,
            held_seconds=self._held_seconds(),
        )
        if prompt is not None and prompt.recorded_place >= 0 and group.trajectories:
            label = label_text(prompt.label)
            answers = replace(answers, group=_whole(group), place=prompt.recorded_place, label=label)
        await self._store(answers, group_id=group.group_id)

    def _needed_by(self, group_id: int) -> Evaluation | None:
        evaluation = self._current()
        return evaluation if evaluation is not None and evaluation.index(group_id) is not None else None

    async def _store(self, answers: EvaluationAnswers, *, group_id: int) -> None:
        """A key of their own: what is refused is asked again, and stored beside."""
        key = f"{group_id}-{uuid.uuid4().hex[:12]}"
        while self._needed_by(group_id) is not None:
            try:
                await self._bus.publish(EVALUATION_ANSWERS, answers, key=key)
                return
            except BusFull:
                if answers.group is not None:  # nothing that is counted waits for what is only read
                    answers = replace(answers, group=None)
                    continue
                if self._is_draining():
                    raise EngineError("the log of answers is full, and this worker ends") from None
                with self._waits.waiting(SPACE_IN_LOG, on=LEARNER):
                    await asyncio.sleep(FULL_LOG_SECONDS)
            except (MessageTooLarge, MessageError) as error:
                if answers.group is not None:
                    self._log.warning("the answers to group %d are counted and not recorded: %s", group_id, error)
                    answers = replace(answers, group=None)
                    continue
                answers = EvaluationAnswers(
                    number=answers.number,
                    group_id=group_id,
                    dataset=answers.dataset,
                    error=str(error),
                    worker=self._worker,
                )


def _whole(group: TrajectoryGroup) -> TrajectoryGroup:
    """For people, who read no experts."""
    bare: TrajectoryGroup = replace(
        group, trajectories=tuple(replace(one, experts=NO_EXPERTS) for one in group.trajectories)
    )
    return bare
