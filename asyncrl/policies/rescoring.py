"""Whether a worker's behavior logprobs are those of the policy: a few of its answers are scored again by the trainer.

A step reports the mismatch of the whole batch; here it is kept apart by worker. Every ``every`` steps, of each worker
the batch's ``SAMPLES`` youngest answers are scored by the weights about to be trained. One forward pass is a third
of what training an answer takes, so the learner's time grows by SAMPLES x workers / (3 x answers of a batch x every).

An answer that is ``age`` versions old may differ by what the policy moved meanwhile, so the bound is

    mean |trainer - behavior logprob| <= bound x (1 + age)     nats per token

Over it twice in a row, the second time at the very next step that has an answer of that worker: it is quarantined.
Tests: tests/test_rescoring.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies.packing import Document

SAMPLES: Final = 2
"""Answers of one worker that are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The answer of document ``document``; age: of its oldest trained token, in versions."""

    document: int
    worker: str
    age: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """mean |trainer - behavior| in nats per token of a worker's chosen answers, and what it may be."""

    mean: float
    allowed: float
    tokens: int

    @property
    def is_over(self) -> bool:
        return not self.mean <= self.allowed  # NaN is no agreement


class Rescoring:
    """Holds who was over the bound the last time. ``bound`` 0 looks at nobody."""

    def __init__(self, *, bound: float, every: int) -> None:
        self._bound = bound
        self._every = every
        self._suspects: set[str] = set()

    @property
    def is_on(self) -> bool:
        return self._bound > 0

    def forget(self, worker: str) -> None:
        """It is another one of that name."""
        self._suspects.discard(worker)

    def choose(self, documents: Sequence[Document], workers: Sequence[str], *, step: int) -> list[Chosen]:
        """Which ``documents`` to score before the step after ``step`` steps; ``workers[i]`` made document i.

        Everybody's when it is time, else those of suspects alone; most often nothing.
        """
        if not self.is_on:
            return []
        is_time = step % self._every == 0
        known: dict[str, list[Chosen]] = {}
        for index, (document, worker) in enumerate(zip(documents, workers, strict=True)):
            if worker and (is_time or worker in self._suspects) and document.response_mask.any():
                age = max(0, int(document.staleness[document.response_mask].max()))
                known.setdefault(worker, []).append(Chosen(document=index, worker=worker, age=age))
        youngest = (sorted(of, key=lambda chosen: (chosen.age, chosen.document)) for of in known.values())
        return [chosen for of in youngest for chosen in of[:SAMPLES]]

    def judge(
        self, chosen: Sequence[Chosen], documents: Sequence[Document], logprobs: Mapping[int, NDArray[np.float32]]
    ) -> tuple[dict[str, Mismatch], list[str]]:
        """Each worker's mismatch, and those to quarantine.  ``logprobs``: the trainer's, f32[T] by document"""
        found = {worker: self._mismatch(worker, chosen, documents, logprobs) for worker in {c.worker for c in chosen}}
        over = {worker for worker, mismatch in found.items() if mismatch.is_over}
        guilty = sorted(over & self._suspects)
        self._suspects = (self._suspects - found.keys()) | over
        return found, guilty

    def _mismatch(
        self,
        worker: str,
        chosen: Sequence[Chosen],
        documents: Sequence[Document],
        logprobs: Mapping[int, NDArray[np.float32]],
    ) -> Mismatch:
        its = [one for one in chosen if one.worker == worker]
        differences = [
            np.abs(logprobs[one.document].astype(np.float64) - documents[one.document].behavior_logprobs)[
                documents[one.document].response_mask
            ]
            for one in its
        ]
        tokens = [len(of) for of in differences]
        allowed = float(np.average([self._bound * (1 + one.age) for one in its], weights=tokens))
        return Mismatch(mean=float(np.concatenate(differences).mean()), allowed=allowed, tokens=sum(tokens))
