"""Evaluates versions of the policy while training goes on: asks the prompts, counts the answers, reports the result.

  E1 a result is of one version: answers that it did not sample whole are counted, asked again, and in no number
  E2 training waits for nothing here but the end of the last evaluation (``finish``)
  E3 the version that is evaluated stays where workers can load it until the evaluation is over
  E4 an evaluation that a learner's death interrupts is taken up by the next one; what ends without all answers is
     reported as incomplete
One is in progress at a time. A version that is due meanwhile is not evaluated, and counted (evaluation/skipped).
Tests: tests/actors/test_evaluation.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from asyncrl.actors.learner.best_model import BestModel
from asyncrl.actors.learner.evaluation_round import EvaluationRound, prompts_of
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.config import EvaluationSection
from asyncrl.errors import AsyncRLError, BusFull
from asyncrl.messages import WeightVersion, replace
from asyncrl.messages.evaluation import Evaluation
from asyncrl.messages.topics import ACTORS, EVALUATION, EVALUATION_ANSWERS, EVALUATION_PROMPTS
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.health.faults import EVALUATION_WORKER, WORKER
from asyncrl.protocols import Bus, WeightChannel

ASK_AGAIN_SECONDS: Final = 10.0
"""Between two looks for prompts that the bus has lost."""
FULL_SECONDS: Final = 0.5

Report = Callable[[int, Mapping[str, float]], Awaitable[None]]
"""Of a policy version and its metrics."""

log = logging.getLogger("asyncrl.evaluation")


class Evaluator:
    """Tasks of the learner. ``start``, then ``run`` until ``finish`` has returned."""

    def __init__(
        self,
        bus: Bus,
        *,
        section: EvaluationSection,
        sets: Sequence[EvaluationSet],
        seed: int,
        last_step: int,
        channel: WeightChannel,
        report: Report,
        version: Callable[[], int],
        waits: WaitTracker,
        best: BestModel | None = None,
    ) -> None:
        """
        seed       of the bootstrap
        last_step  of the run: its version waits for ``finish``, which evaluates it
        version    the learner's policy version now
        waits      of the learner
        best       keeps the best model; None keeps none
        """
        self._bus, self._section, self._sets, self._seed = bus, section, tuple(sets), seed
        self._last_step = last_step
        self._num_prompts = len(prompts_of(sets))
        self._channel, self._report, self._version = channel, report, version
        self._waits, self._best = waits, best
        self._newest: WeightVersion | None = None  # that is stored
        self._last: Evaluation | None = None  # begun
        self._current: Evaluation | None = None  # in progress
        self._before = -1
        self._skipped = 0
        self._changed = asyncio.Condition()

    @property
    def needs_first_version(self) -> bool:
        """Whether version 0 is to be stored, which engines have anyway."""
        return self._section.is_due(before=self._before, now=0)

    async def start(self) -> None:
        """Take up what an earlier life of the learner left unfinished."""
        last = (await self._bus.states(EVALUATION)).get("")
        if last is None:
            return
        self._last, self._before = last, last.weights.policy_version
        if last.is_over:
            return
        if last.num_prompts != self._num_prompts:
            log.warning("evaluation of version %d: its data sets have changed; given up", last.weights.policy_version)
            await self._bus.put(EVALUATION, replace(last, is_over=True))
            return
        log.info("evaluation of version %d: taken up again", last.weights.policy_version)
        await asyncio.to_thread(self._channel.retain, last.weights)
        await self._set(last)

    async def stored(self, weights: WeightVersion) -> None:
        """A version can be loaded, and has not been announced. Begins its evaluation if that is due."""
        is_due = self._section.is_due(before=self._before, now=weights.policy_version)
        self._newest, self._before = weights, weights.policy_version
        if is_due and self._section.at_end and weights.policy_version == self._last_step:
            return
        if is_due and self._current is not None:
            self._skipped += 1
            log.log(
                logging.WARNING if self._skipped == 1 else logging.INFO,
                "version %d is not evaluated: the evaluation of version %d is in progress; raise evaluation.every_steps"
                " or give it more engines (the next are counted: evaluation/skipped)",
                weights.policy_version,
                self._current.weights.policy_version,
            )
        elif is_due:
            await self._begin(weights)

    async def run(self) -> None:
        """consumes: evaluation answers    waits for: a version that is due    woken by: ``stored``, ``finish``"""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._current is not None)
            assert self._current is not None
            await self._evaluate(self._current)
            await self._set(None)

    async def finish(self) -> None:
        """Wait for the evaluation in progress, and for that of the last version if the run file asks for it."""
        with self._waits.waiting("the evaluation in progress"):
            await self._idle()
        newest, last = self._newest, self._last
        if not self._section.at_end or newest is None or (last is not None and last.weights.order == newest.order):
            return
        await self._begin(newest)
        with self._waits.waiting("the evaluation of the last version"):
            await self._idle()

    async def _idle(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._current is None)

    async def _set(self, current: Evaluation | None) -> None:
        async with self._changed:
            self._current = current
            self._changed.notify_all()

    async def _begin(self, weights: WeightVersion) -> None:
        await asyncio.to_thread(self._channel.retain, weights)
        engines = await self._engines(WORKER)
        self._last = Evaluation(
            number=0 if self._last is None else self._last.number + 1,
            weights=weights,
            num_prompts=self._num_prompts,
            num_held=max(1, int(self._section.share * engines)) if self._section.place == "shared" else 0,
            after=await self._bus.last_sequence(EVALUATION_ANSWERS),
        )
        await self._bus.put(EVALUATION, self._last)
        await self._bus.trim(EVALUATION_ANSWERS, through=self._last.after)  # of the one before
        await self._set(self._last)

    async def _engines(self, *roles: str) -> int:
        return sum(beat.role in roles for beat in (await self._bus.states(ACTORS)).values())

    # -- one evaluation ------------------------------------------------------------------------------------------------

    async def _evaluate(self, evaluation: Evaluation) -> None:
        began = time.monotonic()
        asked = EvaluationRound(evaluation, self._sets)
        done = asyncio.Event()
        try:
            async with asyncio.timeout(self._section.timeout_seconds or None), asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(asked, done), name="evaluation.read")
                asking = group.create_task(self._ask(asked), name="evaluation.ask")
                await done.wait()
                reading.cancel()
                asking.cancel()
        except TimeoutError:
            log.error(
                "evaluation of version %d: %d of %d prompts have no answer after evaluation.timeout_seconds = %g; it "
                "is incomplete",
                evaluation.weights.policy_version,
                len(asked.missing),
                evaluation.num_prompts,
                self._section.timeout_seconds,
            )
        await self._end(asked, seconds=time.monotonic() - began)

    async def _ask(self, asked: EvaluationRound) -> None:
        """Publish every prompt, then again those that the bus no longer has.

        consumes: nothing    waits for: space, the clock    woken by: workers that take prompts
        """
        for index in asked.missing:
            await self._publish(asked, index)
        while True:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            kept = await self._bus.keys(EVALUATION_PROMPTS)
            for index in asked.missing:
                if str(asked.evaluation.group_id(index)) not in kept:
                    await self._publish(asked, index, again=True)

    async def _publish(self, asked: EvaluationRound, index: int, *, again: bool = False) -> None:
        prompt = asked.prompt(index)
        while True:
            try:
                await self._bus.publish(EVALUATION_PROMPTS, prompt, key=str(prompt.group_id), again=again)
                return
            except BusFull:
                await asyncio.sleep(FULL_SECONDS)

    async def _read(self, asked: EvaluationRound, done: asyncio.Event) -> None:
        """consumes: evaluation answers    waits for: the next    woken by: workers"""
        async with self._bus.read(EVALUATION_ANSWERS, after=asked.evaluation.after) as records:
            while not asked.is_done:
                record = await anext(records)
                if record.message is None:
                    self._bus.rejections.note(EVALUATION_ANSWERS.name, record.problem)
                    continue
                index, problem = asked.take(record.message)
                if index is not None:
                    self._bus.rejections.note(EVALUATION_ANSWERS.name, problem, kind="answers")
                    await self._publish(asked, index, again=True)
        done.set()

    async def _end(self, asked: EvaluationRound, *, seconds: float) -> None:
        """Report it, and only then call it over: a learner that is killed in between counts the answers again."""
        evaluation = asked.evaluation
        version = evaluation.weights.policy_version
        row = await asyncio.to_thread(asked.metrics, seed=self._seed)
        engines = max(1, await self._engines(WORKER, EVALUATION_WORKER), len(asked.workers))
        row |= {
            "evaluation/complete": float(asked.is_complete),
            "evaluation/lag_steps": float(max(0, self._version() - version)),
            "evaluation/seconds": seconds,
            "evaluation/tokens": float(asked.num_tokens),
            "evaluation/engine_share": len(asked.workers) / engines,
            "evaluation/mixed": float(asked.num_mixed),
            "evaluation/skipped": float(self._skipped),
        }
        for index, reason in list(asked.failed.items())[:3]:
            log.warning("evaluation of version %d: prompt %d has no answer: %s", version, index, reason)
        if self._best is not None and asked.is_complete:
            await self._keep_best(evaluation.weights, row)
        await self._report(version, row | {"learner/incarnation": float(evaluation.weights.incarnation)})
        await self._bus.put(EVALUATION, replace(evaluation, is_over=True))
        await asyncio.to_thread(self._channel.release, evaluation.weights)

    async def _keep_best(self, weights: WeightVersion, row: Mapping[str, float]) -> None:
        assert self._best is not None
        try:
            folder = await asyncio.to_thread(self._channel.verify, weights)
            await asyncio.to_thread(self._best.look, folder, row, step=weights.policy_version)
        except (AsyncRLError, OSError) as error:
            log.error("the model of version %d is not kept as the best: %s", weights.policy_version, error)
