"""Evaluates versions of the policy while training continues: decides which ones, and reports their results.

  E1 A result belongs to one version: answers that it did not sample entirely are counted, asked again, and never used.
  E2 Training waits for nothing here except the end of the last evaluation (``finish``).
  E3 The evaluated version stays available to workers until the evaluation is over.
  E4 The next learner resumes an evaluation that a learner's death interrupted, with the existing answers. An evaluation
     that ends without all answers is reported as incomplete.
  E5 After a resume, rolled-back versions are not evaluated to the end, and the same steps of the present
     history are due again. A result carries the incarnation of its version (learner/incarnation).
One evaluation runs at a time. A version that is due during it is skipped and counted (evaluation/skipped).
Tests: tests/actors/test_evaluation.py, tests/actors/learner/test_evaluator.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from asyncrl.actors.learner.best_model import BestModel
from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.evaluation_round import AnswerCollector, EvaluationRound, live_actors, prompts_of
from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.learner.sample_recorder import AnswerRecorder
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.config import EvaluationSection
from asyncrl.errors import AsyncRLError
from asyncrl.messages import WeightVersion, replace
from asyncrl.messages.evaluation import Evaluation
from asyncrl.messages.roles import EVALUATION_WORKER, WORKER
from asyncrl.messages.topics import EVALUATION, EVALUATION_ANSWERS
from asyncrl.policies.evaluation.pinned_workers import EngineTime, num_pinned
from asyncrl.policies.evaluation.questions import EvaluationSet, digest
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.staleness.staleness import is_rolled_back
from asyncrl.weights.port import WeightChannel

log = logging.getLogger("asyncrl.evaluation")


class Evaluator:
    """Tasks of the learner. Call ``start``, then ``run`` until ``finish`` has returned."""

    def __init__(
        self,
        bus: Bus,
        *,
        section: EvaluationSection,
        sets: Sequence[EvaluationSet],
        seed: int,
        last_step: int,
        channel: WeightChannel,
        metrics: MetricsReporter,
        table: GroupTable,
        waits: WaitTracker,
        best: BestModel | None = None,
        recorder: AnswerRecorder | None = None,
    ) -> None:
        """
        seed       seed of the bootstrap
        last_step  last step of the run: its version is left to ``finish``, which evaluates it
        metrics    reports the results
        table      the learner's: its version and history
        waits      the learner's wait tracker
        best       keeps the best model; None keeps none
        recorder   records some of the answers; None records none
        """
        self._bus = bus
        self._section = section
        self._sets = tuple(sets)
        self._seed = seed
        self._last_step = last_step
        self._num_prompts = len(prompts_of(sets))
        self._questions = digest(sets)
        self._channel = channel
        self._metrics = metrics
        self._table = table
        self._waits = waits
        self._disk = Disk(waits)
        self._best = best
        self._recorder = recorder
        self._newest: WeightVersion | None = None  # newest stored version
        self._last: Evaluation | None = None  # last one begun
        self._current: Evaluation | None = None  # in progress
        self._round: EvaluationRound | None = None
        self._before = -1
        self._skipped = 0
        self._changed = asyncio.Condition()

    @property
    def progress(self) -> tuple[int, int]:
        """(settled prompts, all prompts) of the evaluation in progress, or of the last one."""
        settled = 0 if self._round is None else self._num_prompts - len(self._round.missing)
        return settled, self._num_prompts

    @property
    def needs_first_version(self) -> bool:
        """Whether version 0 must be stored for an evaluation; engines have it anyway."""
        return self._section.is_due(before=self._before, now=0)

    async def start(self) -> None:
        """Resume an evaluation that an earlier incarnation left unfinished."""
        last = (await self._bus.states(EVALUATION)).get("")
        if last is None:
            return
        version = last.weights.policy_version
        self._last, self._before = last, min(version, self._table.policy_version)
        problem = self._why_not_comparable(last)
        if problem and not last.is_over:
            log.warning("evaluation of version %d: %s; given up", version, problem)
            await self._bus.put(EVALUATION, replace(last, is_over=True))
        elif problem:
            log.warning("evaluation of version %d, the last one: %s", version, problem)
        elif not last.is_over:
            log.info("evaluation of version %d: resumed", version)
            await asyncio.to_thread(self._channel.retain, last.weights)
            await self._set_current(last)

    def _why_not_comparable(self, last: Evaluation) -> str:
        """Return why an earlier evaluation is not comparable to one by this incarnation; "" if it is."""
        if last.num_prompts != self._num_prompts or last.questions not in ("", self._questions):
            return "its data sets have changed"
        if is_rolled_back(last.weights.version, self._table.resume_points):
            return f"this version was lost when the learner fell back to version {self._table.policy_version}"
        return ""

    def is_due(self, policy_version: int) -> bool:
        """Whether this version, if it is stored next, is to be evaluated."""
        return self._section.is_due(before=self._before, now=policy_version)

    async def begin_if_due(self, weights: WeightVersion) -> None:
        """Called when a version can be loaded, before it is announced. Begin its evaluation if that is due."""
        is_due = self.is_due(weights.policy_version)
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
        """consumes: evaluation answers    waits for: a version that is due    woken by: ``begin_if_due``, ``finish``"""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._current is not None)
            assert self._current is not None
            await self._evaluate(self._current)
            await self._set_current(None)

    async def finish(self) -> None:
        """Wait for the evaluation in progress, and evaluate the last version if the run file asks for it."""
        with self._waits.waiting("the evaluation in progress"):
            await self._idle()
        newest = self._newest
        if not self._section.at_end or newest is None or self._is_evaluated(newest):
            return
        await self._begin(newest)
        with self._waits.waiting("the evaluation of the last version"):
            await self._idle()

    async def finish_unless(self, drained: asyncio.Event) -> bool:
        """Call ``finish``. Return False if drained first; a later incarnation then resumes the evaluation."""
        async with asyncio.TaskGroup() as group:
            finishing = group.create_task(self.finish(), name="evaluation.finish")
            draining = group.create_task(drained.wait())
            await asyncio.wait((finishing, draining), return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            return not finishing.cancel()

    def _is_evaluated(self, weights: WeightVersion) -> bool:
        """Return whether the last evaluation was of these weights, perhaps as stored by an earlier incarnation."""
        last = self._last
        is_same = last is not None and last.weights.policy_version == weights.policy_version
        return last is not None and is_same and not self._why_not_comparable(last)

    async def _idle(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._current is None)

    async def _set_current(self, current: Evaluation | None) -> None:
        async with self._changed:
            self._current = current
            self._changed.notify_all()

    async def _begin(self, weights: WeightVersion) -> None:
        await asyncio.to_thread(self._channel.retain, weights)
        engines = len(await live_actors(self._bus, WORKER))
        self._last = Evaluation(
            number=0 if self._last is None else self._last.number + 1,
            weights=weights,
            num_prompts=self._num_prompts,
            questions=self._questions,
            num_pinned=num_pinned(self._section.share, engines) if self._section.place == "shared" else 0,
            after=await self._bus.last_sequence(EVALUATION_ANSWERS),
        )
        await self._bus.put(EVALUATION, self._last)
        await self._bus.trim(EVALUATION_ANSWERS, through=self._last.after)  # answers of the previous evaluation
        await self._set_current(self._last)

    # -- one evaluation ------------------------------------------------------------------------------------------------

    async def _evaluate(self, evaluation: Evaluation) -> None:
        began = time.monotonic()
        evaluation_round = self._round = EvaluationRound(
            evaluation, self._sets, recorder=self._recorder, enough=self._section.enough
        )
        engine_time = EngineTime(began=began)
        role = WORKER if self._section.place == "shared" else EVALUATION_WORKER
        collector = AnswerCollector(
            self._bus, evaluation_round, engine_time=engine_time, channel=self._channel, role=role
        )
        try:
            async with asyncio.timeout(self._section.timeout_seconds or None):
                problem = await collector.run()
        except TimeoutError:
            problem = f"evaluation.timeout_seconds = {self._section.timeout_seconds:g} have passed"
        if problem:
            log.error(
                "evaluation of version %d is incomplete (%d of %d prompts have no answer): %s",
                evaluation.weights.policy_version,
                len(evaluation_round.missing),
                evaluation.num_prompts,
                problem,
            )
        now = time.monotonic()
        engines = len(await live_actors(self._bus, WORKER, EVALUATION_WORKER))
        share = engine_time.share(num_engines=engines, now=now)
        await self._end(evaluation_round, seconds=now - began, engine_share=share)

    async def _end(self, evaluation_round: EvaluationRound, *, seconds: float, engine_share: float) -> None:
        """Report the result, then mark the evaluation as over: a learner killed in between counts the answers again."""
        evaluation = evaluation_round.evaluation
        version = evaluation.weights.policy_version
        ended = time.time()
        row = await asyncio.to_thread(evaluation_round.metrics, seed=self._seed)
        row |= {
            "evaluation/complete": float(evaluation_round.is_complete),
            "evaluation/lag_steps": float(max(0, self._table.policy_version - version)),
            "evaluation/seconds": seconds,
            "evaluation/time": ended,
            "evaluation/tokens": float(evaluation_round.num_tokens),
            "evaluation/engine_share": engine_share,
            "evaluation/mixed": float(evaluation_round.num_mixed),
            "evaluation/skipped": float(self._skipped),
        }
        for index, reason in list(evaluation_round.failed.items())[:3]:
            log.warning("evaluation of version %d: prompt %d has no answer: %s", version, index, reason)
        if self._best is not None and evaluation_round.is_complete:
            await self._keep_best(evaluation.weights, row)
        row["learner/incarnation"] = float(evaluation.weights.incarnation)
        await self._metrics.report_evaluation(version, row, disk=self._disk)
        await self._bus.put(EVALUATION, replace(evaluation, is_over=True))
        await asyncio.to_thread(self._channel.release, evaluation.weights)

    async def _keep_best(self, weights: WeightVersion, row: Mapping[str, float]) -> None:
        assert self._best is not None
        try:
            folder = await asyncio.to_thread(self._channel.verify, weights)
            await asyncio.to_thread(self._best.keep_if_better, folder, row, version=weights.version)
        except (AsyncRLError, OSError) as error:
            log.error("the model of version %d is not kept as the best: %s", weights.policy_version, error)
