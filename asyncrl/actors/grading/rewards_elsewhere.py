"""A rollout worker's rewards where reward workers give them: a request on ``grading``, its answer on ``grades``.

Both have the digest of what is graded as their key. So a request is there once however often it is made, and a worker
that takes over a group whose worker died (partial_rollouts.py) finds what was graded meanwhile. A reward worker that
dies leaves its requests to the others. Tests: tests/actors/test_reward_worker.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from asyncrl.actors.grading import pieces
from asyncrl.errors import BusFull, MessageError, RewardError
from asyncrl.messages import replace
from asyncrl.messages.grading import Grades, GradingRequest, UngradedRollout
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.messages.topics import GRADES, GRADING, GRADING_PIECES
from asyncrl.policies.trust.validation import reward_problems
from asyncrl.protocols import Bus, Reward, Sample

AGAIN_SECONDS: Final = 60.0
"""Until a request is made again: the bus may have lost it, or its answer. It takes it once in ten minutes."""
PIECES_AGAIN_SECONDS: Final = GRADING_PIECES.seconds_to_live / 2
"""Until the pieces of a large request are put again: they must not be gone before somebody takes it."""
FULL_SECONDS: Final = 1.0
"""Between two tries to publish where there is no room: nobody announces that there is some."""


class RewardsElsewhere:
    """A RewardFn."""

    is_elsewhere = True
    """What it waits for, nobody here can end (Stage)."""

    def __init__(self, bus: Bus, *, worker: str, largest: float) -> None:
        """largest: reward.largest"""
        self._bus, self._worker, self._largest = bus, worker, largest
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        """Waits for as long as it takes, aloud. Raises RewardError."""
        request = asked(samples, worker=self._worker)
        key = request.key()
        async with self._bus.watch(GRADES, key=key) as answers:
            answer = asyncio.ensure_future(anext(answers))
            try:
                sent = await self._asked(request, answer, key=key)
                grades = await answer
            finally:
                answer.cancel()
        await pieces.remove(self._bus, sent, key=key)
        return self._rewards(grades, count=len(samples))

    async def _asked(self, request: GradingRequest, answer: asyncio.Future[Grades], *, key: str) -> GradingRequest:
        """Ask until there is an answer; what was sent. Raises RewardError."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                sent, since = await pieces.in_pieces(self._bus, request, key=key), clock()
            except MessageError as error:
                raise RewardError(f"reward: a reward worker cannot be asked: {error}") from error
            while clock() < since + PIECES_AGAIN_SECONDS:
                await self._publish(sent, key=key)
                if (await asyncio.wait((answer,), timeout=AGAIN_SECONDS))[0]:
                    return sent
                self._log.warning("a group has waited %g s for a reward worker", AGAIN_SECONDS)

    async def close(self) -> None:
        pass

    async def _publish(self, request: GradingRequest, *, key: str) -> None:
        while True:
            try:
                await self._bus.publish(GRADING, request, key=key)
                return
            except BusFull:
                await asyncio.sleep(FULL_SECONDS)

    def _rewards(self, grades: Grades, *, count: int) -> list[Reward]:
        if grades.error:
            raise RewardError(grades.error)
        found = [Reward(value=value, parts=parts) for value, parts in zip(grades.rewards, grades.parts, strict=True)]
        problems = [f"{len(found)} rewards for {count} samples"] if len(found) != count else []
        for one in found:
            problems += reward_problems({"reward": one.value}, one.parts, largest=self._largest)
        if problems:
            raise RewardError(f"reward: the answer of reward worker {grades.worker[:100]!r}: {problems[0]}")
        return found


def asked(samples: Sequence[Sample], *, worker: str) -> GradingRequest:
    """What asks for the rewards of a group's samples, the same whoever asks. A reward is not shown the experts, and not
    which tokens an earlier attempt sampled."""
    one = samples[0]
    return GradingRequest(
        rollouts=tuple(
            UngradedRollout(
                completion=sample.completion,
                parts=tuple(replace(part, experts=NO_EXPERTS, resumed=0) for part in sample.parts),
            )
            for sample in samples
        ),
        prompt=one.prompt,
        prompt_tokens=one.prompt_tokens,
        label=one.label,
        metadata=dict(one.metadata),
        dataset=one.dataset,
        reward=one.reward,
        worker=worker,
    )


def samples_of(request: GradingRequest) -> list[Sample]:
    """What ``asked`` was given."""
    return [
        Sample(
            prompt=request.prompt,
            completion=rollout.completion,
            label=request.label,
            metadata=request.metadata,
            trajectory=rollout.parts[-1],
            prompt_tokens=request.prompt_tokens,
            dataset=request.dataset,
            reward=request.reward,
            parts=rollout.parts,
        )
        for rollout in request.rollouts
    ]
