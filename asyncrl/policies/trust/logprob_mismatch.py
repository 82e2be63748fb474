"""Whether a worker's behavior logprobs are those of the policy: a few of its answers are scored again by the trainer.

A step reports the mismatch of the whole batch; here it is kept apart by worker. Every ``every`` steps, of each worker
the batch's youngest and oldest answer are scored by the weights about to be trained. One forward pass is a third of
what training an answer takes, so the learner's time grows by 2 x workers / (3 x answers of a batch x every).

A fresh answer (age 0) was sampled from these very weights:

    mean |trainer - behavior logprob| <= bound     nats per token

An older one may differ by what the policy moved meanwhile, which nobody knows but the other workers: their old answers
tell how far it moves a version. A worker without fresh answers is judged by its old ones,

    mean |trainer - behavior logprob| <= bound + age x max(bound, SLACK x median of the others' mismatch / age)

and one that has neither fresh answers nor others beside it is no suspect: a policy that moves fast looks the same.
Over the bound twice in a row, the second time at the next step that has an answer of the worker: it is quarantined.
Tests: tests/unit/policies/trust/test_logprob_mismatch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.batching.packing import Document

SLACK: Final = 2.0
"""How much further than others' old answers a worker's may be off: two answers are a small sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The answer of document ``document``; age: of its oldest sampled token, in versions."""

    document: int
    worker: str
    age: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """mean |trainer - behavior| in nats per token of a worker's answers, and what it may be.

    is_certain  whether the bound is none that a fast policy could break: of fresh answers, or of what others have
    """

    mean: float
    allowed: float
    tokens: int
    is_certain: bool = True

    @property
    def is_over(self) -> bool:
        return not self.mean <= self.allowed  # NaN is no agreement


class LogprobMismatch:
    """Holds who was over the bound the last time. ``bound`` 0 looks at nobody."""

    def __init__(self, *, bound: float, every: int) -> None:
        self.bound = bound
        self._every = every
        self._suspects: set[str] = set()

    @property
    def is_on(self) -> bool:
        return self.bound > 0

    def forget(self, worker: str) -> None:
        """It is another one of that name."""
        self._suspects.discard(worker)

    def choose(self, documents: Sequence[Document], workers: Sequence[str], *, step: int) -> list[Chosen]:
        """Which ``documents`` to score before the step after ``step`` steps; ``workers[i]`` made document i.

        Everybody's when it is time or there are suspects in the batch; most often nothing.
        """
        if not self.is_on or not (step % self._every == 0 or self._suspects & set(workers)):
            return []
        known: dict[str, list[Chosen]] = {}
        for index, (document, worker) in enumerate(zip(documents, workers, strict=True)):
            if worker and document.response_mask.any():
                age = max(0, int(document.staleness.max()))  # also of what is left out: fresh tokens may follow it
                known.setdefault(worker, []).append(Chosen(document=index, worker=worker, age=age))
        by_age = (sorted(of, key=lambda chosen: (chosen.age, chosen.document)) for of in known.values())
        return [chosen for of in by_age for chosen in (of if len(of) < 2 else (of[0], of[-1]))]

    def judge(
        self, chosen: Sequence[Chosen], documents: Sequence[Document], logprobs: Mapping[int, NDArray[np.float32]]
    ) -> tuple[dict[str, Mismatch], list[str]]:
        """Each worker's mismatch, and those to quarantine.  ``logprobs``: the trainer's, f32[T] by document"""
        answers = [_ScoredAnswer.of(one, documents[one.document], logprobs[one.document]) for one in chosen]
        found = {worker: self._mismatch(worker, answers) for worker in {one.worker for one in answers}}
        over = {worker for worker, mismatch in found.items() if mismatch.is_over}
        guilty = sorted(over & self._suspects)
        self._suspects = (self._suspects - found.keys()) | {worker for worker in over if found[worker].is_certain}
        return found, guilty

    def _mismatch(self, worker: str, answers: Sequence[_ScoredAnswer]) -> Mismatch:
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
    documents: Sequence[Document], replayed: Mapping[int, NDArray[np.float32]], own: Mapping[int, NDArray[np.float32]]
) -> dict[str, float]:
    """Metrics of how far the trainer is from the engine with the engine's experts and with its own.

    replayed, own  the trainer's logprobs f32[T] by document
    """
    made = {}
    for name, logprobs in (("replayed", replayed), ("own", own)):
        differences = np.concatenate(
            [
                (of.astype(np.float64) - documents[i].behavior_logprobs)[documents[i].response_mask]
                for i, of in logprobs.items()
            ]
        )
        made[f"mismatch/routing_{name}"] = float(np.abs(differences).mean())
        made[f"mismatch/routing_{name}_k3"] = float((np.exp(np.minimum(differences, 50.0)) - 1 - differences).mean())
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredAnswer:
    """One that was scored: ``mean`` |trainer - behavior| of its ``tokens``."""

    worker: str
    age: int
    mean: float
    tokens: int

    @classmethod
    def of(cls, chosen: Chosen, document: Document, logprobs: NDArray[np.float32]) -> _ScoredAnswer:
        differences = np.abs(logprobs.astype(np.float64) - document.behavior_logprobs)[document.response_mask]
        return cls(worker=chosen.worker, age=chosen.age, mean=float(differences.mean()), tokens=len(differences))


def _moved(others: Sequence[_ScoredAnswer]) -> float | None:
    """Nats per token and version that the policy moved, as the old answers of ``others`` have it; None without any."""
    known: dict[str, list[float]] = {}
    for one in others:
        if one.age and np.isfinite(one.mean):
            known.setdefault(one.worker, []).append(one.mean / one.age)
    return float(np.median([np.mean(of) for of in known.values()])) if known else None
