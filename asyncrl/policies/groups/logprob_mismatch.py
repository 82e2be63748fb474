"""Checks that a worker's behavior logprobs are those of the policy: the trainer computes those of a few answers again.

A step reports the mismatch of the whole batch; this module reports it per worker. Every ``every`` steps, the freshest
and the oldest answer of each worker in the batch get logprobs with the weights about to be trained. A forward pass
takes a third of the time to train an answer, so the learner's time grows by 2 x workers / (3 x answers of a batch x
every).

A fresh answer (age 0) was sampled from exactly these weights:

    mean |trainer - behavior logprob| <= bound     nats per token

An older answer may also differ by how far the policy has moved since. The old answers of the other workers tell how far
it moves per version. A worker without fresh answers is judged by its old ones:

    mean |trainer - behavior logprob| <= bound + age x max(bound, SLACK x median of the others' mismatch / age)

A worker is no suspect if it has no fresh answers and there are no old answers of others to compare with, because a
policy that moves fast looks the same. A worker that is over the bound twice in a row, the second time at the next step
with one of its answers, is quarantined.
Tests: tests/unit/policies/groups/test_logprob_mismatch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.batching.packing import TrainingSequence

SLACK: Final = 2.0
"""How much further off than the old answers of others a worker's may be, because two answers are a small sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAnswer:
    """The answer of sequence ``sequence``.  age: versions since its oldest token was sampled"""

    sequence: int
    worker: str
    age: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mean |trainer - behavior| of a worker's answers, in nats per token, and the allowed value.

    is_certain  whether a fast-moving policy cannot explain it: judged by fresh answers, or compared with others
    """

    mean: float
    allowed: float
    tokens: int
    is_certain: bool = True

    @property
    def is_over(self) -> bool:
        return not self.mean <= self.allowed  # NaN is over


class LogprobMismatch:
    """Remembers which workers were over the bound the last time. A ``bound`` of 0 turns the check off."""

    def __init__(self, *, bound: float, every: int) -> None:
        self.bound = bound
        self._every = every
        self._suspects: set[str] = set()

    @property
    def is_on(self) -> bool:
        return self.bound > 0

    def forget(self, worker: str) -> None:
        """Forget the suspicion: the name now belongs to another worker."""
        self._suspects.discard(worker)

    def choose(self, sequences: Sequence[TrainingSequence], workers: Sequence[str], *, step: int) -> list[ChosenAnswer]:
        """Return which ``sequences`` to check before the step after ``step`` steps; ``workers[i]`` made sequence i.

        These are sequences of every worker if a check is due or the batch has suspects, and none otherwise.
        """
        if not self.is_on or not (step % self._every == 0 or self._suspects & set(workers)):
            return []
        known: dict[str, list[ChosenAnswer]] = {}
        for index, (sequence, worker) in enumerate(zip(sequences, workers, strict=True)):
            if worker and sequence.response_mask.any():
                age = max(0, int(sequence.staleness.max()))  # includes left-out tokens: fresh tokens may follow them
                known.setdefault(worker, []).append(ChosenAnswer(sequence=index, worker=worker, age=age))
        by_age = (sorted(of, key=lambda chosen: (chosen.age, chosen.sequence)) for of in known.values())
        return [chosen for of in by_age for chosen in (of if len(of) < 2 else (of[0], of[-1]))]

    def judge(
        self,
        chosen: Sequence[ChosenAnswer],
        sequences: Sequence[TrainingSequence],
        logprobs: Mapping[int, NDArray[np.float32]],
    ) -> tuple[dict[str, Mismatch], list[str]]:
        """Return each worker's mismatch, and the workers to quarantine.  ``logprobs``: trainer's, f32[T] by sequence"""
        answers = [_CheckedAnswer.of(one, sequences[one.sequence], logprobs[one.sequence]) for one in chosen]
        found = {worker: self._mismatch(worker, answers) for worker in {one.worker for one in answers}}
        over = {worker for worker, mismatch in found.items() if mismatch.is_over}
        guilty = sorted(over & self._suspects)
        self._suspects = (self._suspects - found.keys()) | {worker for worker in over if found[worker].is_certain}
        return found, guilty

    def _mismatch(self, worker: str, answers: Sequence[_CheckedAnswer]) -> Mismatch:
        its = [one for one in answers if one.worker == worker]
        fresh = [one for one in its if one.age == 0]
        moved = _moved([one for one in answers if one.worker != worker])
        judged = fresh or its
        tokens = [one.tokens for one in judged]
        age = float(np.average([one.age for one in judged], weights=tokens))
        return Mismatch(
            mean=float(np.average([one.mean for one in judged], weights=tokens)),
            allowed=self.bound + age * max(self.bound, SLACK * (moved or 0.0)),
            tokens=sum(tokens),
            is_certain=bool(fresh) or moved is not None,
        )


def routing_mismatch(
    sequences: Mapping[int, TrainingSequence],
    replayed: Mapping[int, NDArray[np.float32]],
    own: Mapping[int, NDArray[np.float32]],
) -> dict[str, float]:
    """Return metrics of the trainer's distance from the engine, with the engine's experts and with its own.

    replayed, own  trainer logprobs f32[T] by sequence
    """
    made = {}
    for name, logprobs in (("replayed", replayed), ("own", own)):
        differences = np.concatenate(
            [
                (of.astype(np.float64) - sequences[i].behavior_logprobs)[sequences[i].response_mask]
                for i, of in logprobs.items()
            ]
        )
        made[f"mismatch/routing_{name}"] = float(np.abs(differences).mean())
        made[f"mismatch/routing_{name}_k3"] = float((np.exp(np.minimum(differences, 50.0)) - 1 - differences).mean())
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckedAnswer:
    """A checked answer: ``mean`` |trainer - behavior| over its ``tokens``."""

    worker: str
    age: int
    mean: float
    tokens: int

    @classmethod
    def of(cls, chosen: ChosenAnswer, sequence: TrainingSequence, logprobs: NDArray[np.float32]) -> _CheckedAnswer:
        differences = np.abs(logprobs.astype(np.float64) - sequence.behavior_logprobs)[sequence.response_mask]
        return cls(worker=chosen.worker, age=chosen.age, mean=float(differences.mean()), tokens=len(differences))


def _moved(others: Sequence[_CheckedAnswer]) -> float | None:
    """Return how far the policy moves, in nats per token and version, by others' old answers; None without any."""
    known: dict[str, list[float]] = {}
    for one in others:
        if one.age and np.isfinite(one.mean):
            known.setdefault(one.worker, []).append(one.mean / one.age)
    return float(np.median([np.mean(of) for of in known.values()])) if known else None
