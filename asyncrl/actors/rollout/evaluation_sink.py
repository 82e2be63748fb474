"""The evaluation stage's sink: publishes answers to their own log, with tokens only if they are recorded."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.errors import BusFull, EngineError, MessageError, MessageTooLarge
from asyncrl.messages import PromptGroup, TrajectoryGroup, replace
from asyncrl.messages.evaluation import Answer, Evaluation, EvaluationAnswers, label_text
from asyncrl.messages.roles import LEARNER
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.messages.topics import EVALUATION_ANSWERS
from asyncrl.policies.health.waits import SPACE_IN_LOG

FULL_LOG_SECONDS: Final = 1.0
"""Delay between attempts to publish to a full log: the bus does not announce free space."""

Vote = Callable[[str, TrajectoryGroup], Awaitable[Sequence[str]]]
"""Maps a data set and the answers to one of its prompts to a vote per answer."""


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
        current       returns the evaluation in progress; answers to other evaluations are no longer needed
        held_seconds  returns how long the engine has had the evaluated version
        prompt_of     returns the prompt of a group that is being answered
        """
        self._bus, self._worker, self._waits = bus, worker, waits
        self._current, self._is_draining = current, is_draining
        self._vote = vote
        self._prompt_of, self._held_seconds = prompt_of, held_seconds
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def publish(self, group: TrajectoryGroup, *, ticket: str) -> None:
        """Publish answers, even if other versions sampled part of them: the learner counts those and asks again.

        Returns once the answers are in the log or no longer needed. Raises EngineError if this worker drains and the
        log is full: another worker answers then.
        """
        prompt = self._prompt_of(group.group_id)
        dataset = "" if prompt is None else prompt.dataset
        evaluation = self._needed_by(group.group_id)
        if evaluation is None:
            return  # the evaluation ended without these answers
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
        """Store the answers under a new key: a prompt with rejected answers is asked again and needs another key."""
        key = f"{group_id}-{uuid.uuid4().hex[:12]}"
        while self._needed_by(group_id) is not None:
            try:
                await self._bus.publish(EVALUATION_ANSWERS, answers, key=key)
                return
            except BusFull:
                if answers.group is not None:  # counted answers must not wait for tokens that are only for reading
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
    """Return a copy for people, without the experts."""
    bare: TrajectoryGroup = replace(
        group, trajectories=tuple(replace(one, experts=NO_EXPERTS) for one in group.trajectories)
    )
    return bare
