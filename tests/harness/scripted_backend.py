"""A batch small enough to compute by hand, and a backend whose models return scripted outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.backends.port import StepResult
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching import batch as batches
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.tensors.snapshot import Snapshot

Output = Callable[[MicroBatch], NDArray[np.float32]]


@dataclass
class ScriptedBackend:
    """Returns given outputs by model. Records its requests in order, and the micro-batches given to train, by model."""

    outputs: Mapping[str, Output] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    trained: dict[str, list[Sequence[Sequence[MicroBatch]]]] = field(default_factory=dict)
    learning_rates: dict[str, list[float]] = field(default_factory=dict)

    def step(
        self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        self.asked.append(f"step {model}")
        self.trained.setdefault(model, []).append(shares)
        self.learning_rates.setdefault(model, []).append(learning_rate)
        return StepResult(metrics={"critic/loss" if model == "critic" else "loss": 1.0})

    def forward(
        self, shares: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        self.asked.append(f"forward {model}")
        return [[self.outputs[model](micro_batch) for micro_batch in share] for share in shares]

    def start(self) -> None: ...

    def export(self) -> Snapshot:
        return Snapshot.from_tensors(())

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...

    def close(self) -> None: ...


def answer(
    tokens: Sequence[int], *, reward: float, finish_reason: str = "stop", observed: Sequence[int] = ()
) -> Trajectory:
    """``observed``: positions of tokens that an environment wrote."""
    mask = ~np.isin(np.arange(len(tokens)), observed)
    return Trajectory(
        tokens=np.array(tokens, np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        reward=reward,
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


def built(answers: Sequence[Trajectory], algorithm: Algorithm) -> Batch:
    """Build a batch in which each answer belongs to a prompt of two tokens, 1 and 2."""
    groups = [
        TrajectoryGroup(group_id=index, prompt_tokens=np.array([1, 2], np.int32), trajectories=(one,))
        for index, one in enumerate(answers)
    ]
    return batches.build(groups, algorithm=algorithm, policy_version=0, max_staleness=0, resume_points={})


def by_tokens(shares: Sequence[Sequence[MicroBatch]], numbers: Callable[[MicroBatch], Any]) -> dict[int, float]:
    """Return a number for each trained token, by token id."""
    return {
        int(token): float(number)
        for share in shares
        for micro_batch in share
        for token, number, is_trained in zip(
            micro_batch.tokens, numbers(micro_batch), micro_batch.response_mask, strict=True
        )
        if is_trained
    }
