"""Writes down some of the groups that leave the window, decoded, for a person to read (state/samples.py).

    progress reporter -> recorder -> its thread: decode, write        sinks that show samples take them from it

The learner waits for none of it: groups are picked at once, and decoded and written in a thread of their own. When that
is behind, groups are left out, and it says how many.

Tests: tests/actors/learner/test_sample_recorder.py.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.groups.sample import Decode, GroupSample, decoded, picked, reason_of, sample_of
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.staleness.staleness import Forks
from asyncrl.state.samples import SampleFile

MOST_WAITING: Final = 64
"""Groups that wait to be decoded."""
MOST_KEPT: Final = 256
"""Groups for sinks that nobody has taken."""

log = logging.getLogger("asyncrl.learner")


class SampleRecorder:
    """per_step: groups of a batch, and as many of those lost between two steps;  seed: decides which of the batch

    load_decode     gives the function that makes text of tokens; called in the recorder's thread
    has_advantages  whether a batch has them when it is taken, and not only once other models have scored it
    """

    def __init__(
        self,
        file: SampleFile,
        *,
        load_decode: Callable[[], Decode],
        per_step: int,
        seed: int = 0,
        has_advantages: bool = True,
    ) -> None:
        self._file = file
        self._load_decode = load_decode
        self._per_step = per_step
        self._seed = seed
        self._has_advantages = has_advantages
        self._decode: Decode | None = None
        self._lost = 0  # recorded since the last step
        self._room = threading.Semaphore(MOST_WAITING)
        self._left_out = 0
        self._is_said = False
        self._recent: deque[GroupSample] = deque(maxlen=MOST_KEPT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")

    def note(
        self,
        outcome: Outcome,
        *,
        incarnation: int,
        forks: Forks,
        batch: Batch | None = None,
        tokens: Mapping[int, NDArray[np.float32]] | None = None,
    ) -> None:
        """Groups left the window. ``batch``: of those that were trained;  ``tokens``: StepResult.tokens of its step."""
        of_all = functools.partial(
            sample_of, fate=outcome.fate, step=outcome.step, incarnation=incarnation, time=time.time(), forks=forks
        )
        if outcome.fate == "trained":
            self._lost = 0
            advantages = self._advantages(outcome.groups, batch)
            trainer = _trainer(outcome.groups, batch, tokens or {})
            for index in self.picks(len(outcome.groups), outcome.step):
                known = {"advantages": advantages[index], "trainer": trainer[index]}
                self._record(functools.partial(of_all, outcome.groups[index], **known))
            return
        for group, event in zip(outcome.groups, outcome.events, strict=False):
            if self._lost < self._per_step:
                self._lost += 1
                self._record(functools.partial(of_all, group, reason=reason_of(outcome.fate, event)))

    def picks(self, count: int, step: int) -> list[int]:
        """Which of the ``count`` groups of a step are recorded."""
        return picked(count, count=self._per_step, seed=self._seed, step=step)

    def take(self) -> Sequence[GroupSample]:
        """Those recorded since this was last asked, the newest MOST_KEPT of them."""
        taken = []
        while self._recent:
            taken.append(self._recent.popleft())
        return taken

    async def stop(self) -> None:
        """What waits is written first."""
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        if self._left_out:
            log.warning("samples.jsonl: %d groups in all were left out", self._left_out)

    def _advantages(
        self, groups: Sequence[TrajectoryGroup], batch: Batch | None
    ) -> Sequence[Sequence[NDArray[np.float32]]]:
        """Of each group, f32[T] of each answer; none where they are not known."""
        if batch is None or not self._has_advantages:
            return [()] * len(groups)
        documents = iter(batch.documents)
        return [
            [next(documents).advantages[len(group.prompt_of(one)) :] for one in group.trajectories] for group in groups
        ]

    def _record(self, make: Callable[[], GroupSample]) -> None:
        if self._room.acquire(blocking=False):
            self._thread.submit(self._work, make)
            return
        self._left_out += 1
        if self._left_out == 1:
            log.warning("samples.jsonl: groups are left out: they are trained faster than their text can be decoded")

    def _work(self, make: Callable[[], GroupSample]) -> None:
        try:
            if self._decode is None:
                self._decode = self._load_decode()
            sample = decoded(make(), self._decode)
            self._recent.append(sample)
            self._file.write(sample)
            self._is_said = False
        except Exception as error:  # whatever a tokenizer or a disk raises: an aid to people ends no run
            if not self._is_said:
                log.warning("samples.jsonl: a group is left out: %s: %s", type(error).__name__, error)
            self._is_said = True
        finally:
            self._room.release()


def _trainer(
    groups: Sequence[TrajectoryGroup], batch: Batch | None, tokens: Mapping[int, NDArray[np.float32]]
) -> Sequence[Sequence[NDArray[np.float32]]]:
    """Of each group, f32[2, T] of each answer: trainer logprobs and entropies, NaN where the step trained nothing.

    None where they are not known.
    """
    if batch is None or not tokens:
        return [()] * len(groups)
    numbers = iter(range(len(batch.documents)))

    def of_answer(number: int, prompt: int) -> NDArray[np.float32]:
        mask = batch.documents[number].response_mask
        found = np.full((2, len(mask)), np.nan, np.float32)
        if number in tokens:
            trained = np.flatnonzero(mask)
            found[:, trained[trained > 0]] = tokens[number]  # the first of all has no logprob
        return found[:, prompt:]

    return [[of_answer(next(numbers), len(group.prompt_of(one))) for one in group.trajectories] for group in groups]
