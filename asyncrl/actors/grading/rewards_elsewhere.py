"""A rollout worker's rewards from reward workers: a request on ``grading``, its answer on ``grades``.

The key of both is the digest of the graded data. A request is therefore stored once however often it is made, and a
worker that takes over a group from a dead worker (partial_rollouts.py) finds the grades that exist already. If a reward
worker dies, its requests go to the other reward workers. Tests: tests/actors/test_reward_worker.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from asyncrl.actors.grading import pieces
from asyncrl.bus.port import Bus
from asyncrl.errors import BusFull, MessageError, RewardError
from asyncrl.messages import replace
from asyncrl.messages.grading import Grades, GradingRequest, UngradedRollout
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.messages.topics import GRADES, GRADING, GRADING_PIECES
from asyncrl.policies.trust.validation import reward_problems
from asyncrl.rewards.port import Reward, Sample

AGAIN_SECONDS: Final = 60.0
"""Until a request is repeated, as the bus may have lost it or its answer. The bus accepts it once in ten minutes."""
PIECES_AGAIN_SECONDS: Final = GRADING_PIECES.seconds_to_live / 2
"""Until the pieces of a large request are put again, so that they do not expire before a worker takes the request."""
FULL_SECONDS: Final = 1.0
"""Delay between attempts to publish to a full topic: the bus does not announce free space."""


class RewardsElsewhere:
    """A RewardFn that asks reward workers."""

    is_elsewhere = True
    """This worker cannot end its waits for reward workers, so Stage limits them during a drain."""

    def __init__(self, bus: Bus, *, worker: str, largest: float) -> None:
        """largest: reward.largest"""
        self._bus, self._worker, self._largest = bus, worker, largest
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        """Wait for the grades however long it takes, and log it. Raises RewardError."""
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
        """Ask until there is an answer; return what was sent. Raises RewardError."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                sent, since = await pieces.in_pieces(self._bus, request, key=key), clock()
            except MessageError as error:
                raise RewardError(f"reward: cannot ask a reward worker: {error}") from error
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
    """Return the request for the rewards of a group's samples. It is the same whichever worker asks: it leaves out the
    experts and which tokens an earlier attempt sampled."""
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
    """Return the samples of a request that ``asked`` made."""
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
