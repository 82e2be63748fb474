"""One evaluation: EvaluationRound knows which prompts are answered and which must be asked again, and never waits;
AnswerCollector publishes the prompts and reads answers until each prompt has one.

Everything on the log at the start is read before anything is asked: a learner that resumes the evaluation of an earlier
incarnation asks only for missing answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import Final

from asyncrl.actors.learner.sample_recorder import AnswerRecorder
from asyncrl.bus.port import Bus
from asyncrl.errors import AsyncRLError, BusFull, ConfigError
from asyncrl.messages import PromptGroup
from asyncrl.messages.evaluation import MOST_PROMPTS, Evaluation, EvaluationAnswers
from asyncrl.messages.topics import ACTORS, EVALUATION_ANSWERS, EVALUATION_PROMPTS
from asyncrl.policies.evaluation.pinned_workers import EngineTime
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.evaluation.results import Answered, metrics
from asyncrl.policies.evaluation.verdict import MOST_REFUSED, Verdicts
from asyncrl.weights.port import WeightChannel


class EvaluationRound:
    """The prompts of all data sets, numbered consecutively, and what is known of their answers."""

    def __init__(
        self,
        evaluation: Evaluation,
        sets: Sequence[EvaluationSet],
        *,
        recorder: AnswerRecorder | None = None,
        enough: float = 1.0,
    ) -> None:
        """enough: share of the prompts that must be settled, 0 to 1 (evaluation.enough)"""
        self.evaluation = evaluation
        self._recorder = recorder
        self._recorded = {its.name: recorder.picks(its) for its in sets} if recorder is not None else {}
        self._sets = tuple(sets)
        self._places = prompts_of(sets)
        least = min(1, len(self._places))
        self._num_enough = max(least, math.ceil(round(enough * len(self._places), 6)))  # 0.7 * 10 is a little over 7
        self._verdicts = Verdicts(evaluation)
        self.answered: dict[int, Answered] = {}
        self.failed: dict[int, str] = {}
        """Prompts that no worker can answer, and why."""
        self.num_mixed = 0
        """Groups of answers that were not sampled entirely by the evaluated version."""
        self.num_tokens = 0
        self.workers: set[str] = set()
        self.unable: dict[str, str] = {}
        """Workers that cannot answer any of the prompts, and why."""

    @property
    def missing(self) -> list[int]:
        """Prompts that have no answer and may still get one."""
        return [index for index in range(len(self._places)) if not self.is_settled(index)]

    def is_settled(self, index: int) -> bool:
        return index in self.answered or index in self.failed

    @property
    def is_done(self) -> bool:
        return len(self.answered) + len(self.failed) >= self._num_enough

    @property
    def is_complete(self) -> bool:
        return len(self.answered) == len(self._places)

    def prompt(self, index: int) -> PromptGroup:
        its, place = self._places[index]
        question, weights = its.questions[place], self.evaluation.weights
        return PromptGroup(
            group_id=self.evaluation.group_id(index),
            prompt_tokens=question.tokens,
            group_size=its.measured.num_samples,
            sampling=its.sampling,
            prompt=question.prompt,
            label=question.label,
            metadata=question.metadata,
            policy_version=weights.policy_version,
            incarnation=weights.incarnation,
            dataset=its.name,
            messages=question.messages,
            images=question.images,
            recorded_place=place if place in self._recorded.get(its.name, ()) else -1,
        )

    def take(self, answers: EvaluationAnswers) -> tuple[int | None, str]:
        """Take in answers, in the log's order. Return (prompt to ask again, why), or (None, "")."""
        index = None if answers.group_id is None else self.evaluation.index(answers.group_id)
        its, place = (None, 0) if index is None else self._places[index]
        found, why = self._verdicts.judge(answers, num_samples=0 if its is None else its.measured.num_samples)
        if found == "unable":
            self.unable[answers.worker] = why
        if found in ("unable", "passed") or index is None or its is None:
            return None, ""
        if found == "failed":
            self.failed[index] = why
            return None, ""
        if found != "good":
            self.num_mixed += found == "mixed"
            why = f"from {answers.worker}: {why}"
            if not self._verdicts.is_settled(self.evaluation.group_id(index)):
                return index, why
            self.failed[index] = f"given up after {MOST_REFUSED} rejected answers, the last {why}"
            return None, ""
        self.workers.add(answers.worker)
        self.num_tokens += sum(one.length for one in answers.answers)
        self.answered[index] = Answered(
            rewards=tuple(one.reward for one in answers.answers),
            votes=tuple(one.vote for one in answers.answers),
            lengths=tuple(one.length for one in answers.answers),
            truncated=tuple(one.finish_reason == "length" for one in answers.answers),
            tags=its.questions[place].tags,
        )
        if self._recorder is not None and place in self._recorded[its.name]:
            self._recorder.record(answers.group, its, place, weights=self.evaluation.weights)
        return None, ""

    def metrics(self, *, seed: int) -> dict[str, float]:
        """Return the metrics of each data set, under evaluation/. Takes a while because of the bootstrap."""
        found: dict[str, float] = {}
        for its in self._sets:
            ours = [self.answered[i] for i, (one, _) in enumerate(self._places) if one is its and i in self.answered]
            found |= metrics(f"evaluation/{its.name}", its.measured, ours, seed=seed)
        return found


def prompts_of(sets: Iterable[EvaluationSet]) -> list[tuple[EvaluationSet, int]]:
    """Return (data set, place in it) for every prompt. Raises ConfigError if there are too many."""
    places = [(its, place) for its in sets for place in range(len(its.questions))]
    if len(places) > MOST_PROMPTS:
        raise ConfigError(
            f"evaluation.datasets: {len(places):,} prompts in all, and one evaluation may have {MOST_PROMPTS:,}; set "
            "limit"
        )
    return places


ASK_AGAIN_SECONDS: Final = 10.0
"""Interval between looks for prompts that the bus has lost; also the time limit to read a log whose end vanished."""
FULL_SECONDS: Final = 0.5
"""Delay between attempts to publish: the bus announces neither free space nor acks."""


class AnswerCollector:
    """Call ``run`` once. Its results are in the round, even if it is cancelled."""

    def __init__(
        self,
        bus: Bus,
        evaluation_round: EvaluationRound,
        *,
        engine_time: EngineTime,
        channel: WeightChannel,
        role: str,
    ) -> None:
        """
        engine_time  receives the engine time of every answer
        channel      has the evaluated version
        role         role of the workers that answer
        """
        self._bus = bus
        self._round = evaluation_round
        self._engine_time = engine_time
        self._channel = channel
        self._role = role
        self._again: set[int] = set()  # prompts to publish again once the bus accepts them
        self._wanted = asyncio.Event()
        self._has_read = asyncio.Event()
        self._done = asyncio.Event()
        self._problem = ""

    async def run(self) -> str:
        """Run until enough prompts are settled. Return "", or why no more answers can come."""
        through = await self._bus.last_sequence(EVALUATION_ANSWERS)
        if through <= self._round.evaluation.after:
            self._has_read.set()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read(through), name="evaluation.read")
            asking = group.create_task(self._ask(), name="evaluation.ask")
            await self._done.wait()
            reading.cancel()
            asking.cancel()
        return self._problem

    async def _ask(self) -> None:
        """Publish every prompt without an answer; then again those whose answers do not count or that the bus has lost.

        consumes: nothing    waits for: the end of the log, space, the clock    woken by: ``_read``, workers
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_AGAIN_SECONDS):
                await self._has_read.wait()
        for index in self._round.missing:
            await self._publish(index)
        while True:
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FULL_SECONDS if self._again else ASK_AGAIN_SECONDS):
                    await self._wanted.wait()
            if self._again:
                await self._ask_again()
            else:
                await self._ask_for_lost()

    async def _ask_again(self) -> None:
        """Publish prompts with bad answers again. This works once their worker has acked them."""
        for index in sorted(self._again):
            if self._round.is_settled(index) or await self._publish(index, again=True):
                self._again.discard(index)

    async def _ask_for_lost(self) -> None:
        kept = await self._bus.keys(EVALUATION_PROMPTS)
        for index in self._round.missing:
            if str(self._round.evaluation.group_id(index)) not in kept:
                await self._publish(index, again=True)

    async def _publish(self, index: int, *, again: bool = False) -> bool:
        """Publish a prompt. Return False if the bus has it already."""
        prompt = self._round.prompt(index)
        while True:
            try:
                return await self._bus.publish(EVALUATION_PROMPTS, prompt, key=str(prompt.group_id), again=again)
            except BusFull:
                await asyncio.sleep(FULL_SECONDS)

    async def _read(self, through: int) -> None:
        """consumes: evaluation answers    waits for: the next answer    woken by: workers"""
        async with self._bus.read(EVALUATION_ANSWERS, after=self._round.evaluation.after) as records:
            while not self._round.is_done and not self._problem:
                record = await anext(records)
                if record.message is None:
                    self._bus.rejections.note(EVALUATION_ANSWERS.name, record.problem)
                else:
                    num_unable = len(self._round.unable)
                    self._note_engine(record.message)
                    index, problem = self._round.take(record.message)
                    if index is not None:
                        self._bus.rejections.note(EVALUATION_ANSWERS.name, problem, kind="answers")
                        self._again.add(index)
                        self._wanted.set()
                    if len(self._round.unable) > num_unable:
                        self._problem = await self._hopeless()
                if record.sequence >= through:
                    self._has_read.set()
        self._done.set()

    def _note_engine(self, answers: EvaluationAnswers) -> None:
        group_id = answers.group_id
        if group_id is not None and self._round.evaluation.index(group_id) is not None:
            self._engine_time.record(answers.worker, pinned_seconds=answers.pinned_seconds, now=time.monotonic())

    async def _hopeless(self) -> str:
        """Return why no worker can answer: the version is gone, or no live worker can load it. "" if one may."""
        try:
            await asyncio.to_thread(self._channel.verify, self._round.evaluation.weights)
        except (AsyncRLError, OSError) as error:
            return f"its weights are gone: {error}"
        unable, workers = self._round.unable, await live_actors(self._bus, self._role)
        if not workers or not workers <= unable.keys():
            return ""
        return f"no worker can load it; {(name := next(iter(unable)))}: {unable[name]}"


async def live_actors(bus: Bus, *roles: str) -> set[str]:
    """Return the names of live actors with one of these roles."""
    return {name for name, beat in (await bus.states(ACTORS)).items() if beat.role in roles}
