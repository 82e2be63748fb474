"""Several optimizer steps per batch: each trains its own mini_batch, and all use the policy before the first step as
anchor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.training_step import train_batch
from asyncrl.backends.port import StepResult
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import MicroBatch, MiniBatches, pack_mini_batches
from asyncrl.policies.component import load_class
from asyncrl.policies.losses.table import LOSSES
from tests.harness.backends import distance, started, tiny_model, weights
from tests.harness.scripted_backend import ScriptedBackend, answer, built, by_tokens

ANSWERS = (
    answer([10, 11, 12], reward=1.0),
    answer([20, 21], reward=0.5),
    answer([30, 3, 31], reward=0.0, observed=[1]),
    answer([13, 14], reward=0.7),
    answer([15], reward=0.2),
)
"""One answer per group. Mini-batches contain whole groups: of two steps, the first trains three groups and the second
two."""


def algorithm(steps: int, name: str = "dapo", **options: Any) -> Algorithm:
    resolved = resolve(ALGORITHMS[name], advantage="" if name == "ppo" else "reinforce", **options)
    return dataclasses.replace(resolved, steps_per_batch=steps)


def mini_batches_of(batch: Batch, *, ranks: int = 1, max_tokens: int = 100) -> MiniBatches:
    return pack_mini_batches(batch.sequences, sizes=batch.mini_batch_sizes, ranks=ranks, max_tokens=max_tokens)


def tenths(micro_batch: MicroBatch) -> Any:
    return (micro_batch.tokens / -10).astype(np.float32)


@pytest.mark.parametrize(("ranks", "max_tokens"), [(1, 100), (1, 6), (2, 6)])
def test_every_part_is_a_step_around_the_policy_before_the_first(ranks: int, max_tokens: int) -> None:
    backend, row = ScriptedBackend(outputs={"policy": tenths}), algorithm(2)
    batch = built(ANSWERS, row)
    mini_batches = mini_batches_of(batch, ranks=ranks, max_tokens=max_tokens)
    train_batch(backend, batch, mini_batches, algorithm=row, step=0, learning_rate=0.1)
    assert backend.asked == ["forward policy", "step policy", "step policy"]
    tokens = [by_tokens(shares, lambda m: m.model_outputs["prox_logprobs"]) for shares in backend.trained["policy"]]
    assert [sorted(mini_batch) for mini_batch in tokens] == [[10, 11, 12, 20, 21, 30, 31], [13, 14, 15]]
    for mini_batch in tokens:
        assert mini_batch == pytest.approx({token: -token / 10 for token in mini_batch})
    for shares in backend.trained["policy"]:  # a mean over the mini_batch's own tokens
        assert sum(by_tokens(shares, lambda m: m.loss_weights).values()) == pytest.approx(1.0)
        assert len({len(share) for share in shares}) == 1


def test_the_critic_takes_as_many_steps_after_the_policy() -> None:
    backend = ScriptedBackend(outputs={"policy": tenths, "critic": tenths})
    row = algorithm(2, "ppo")
    batch = built(ANSWERS, row)
    train_batch(backend, batch, mini_batches_of(batch), algorithm=row, step=0, learning_rate=0.1)
    assert backend.asked == ["forward policy", "forward critic", *["step policy"] * 2, *["step critic"] * 2]


class Failing(ScriptedBackend):
    """Its steps are skipped, fail, or work, as ``script`` says."""

    def __init__(self, script: Sequence[str]) -> None:
        super().__init__(outputs={"policy": tenths})
        self._script = iter(script)

    def step(self, shares: Any, *, learning_rate: float, model: str = "policy") -> StepResult:
        super().step(shares, learning_rate=learning_rate, model=model)
        match next(self._script):
            case "fails":
                raise ValueError("a token out of range")
            case "skips":
                return StepResult(metrics={"learner/skipped_steps": 1.0, "loss": float("nan")})
        return StepResult(metrics={"learner/skipped_steps": 0.0, "loss": 2.0})


@pytest.mark.parametrize(
    ("script", "error"), [(["fails"], ValueError), (["skips", "fails"], ValueError), (["works", "fails"], BackendError)]
)
def test_a_batch_that_changed_the_weights_is_not_trained_again(script: list[str], error: type[Exception]) -> None:
    """A BackendError ends the learner, which continues from its checkpoint; other errors are attributed to groups."""
    row = algorithm(2)
    batch = built(ANSWERS, row)
    with pytest.raises(error, match="out of range"):
        train_batch(Failing(script), batch, mini_batches_of(batch), algorithm=row, step=0, learning_rate=0.1)


def test_a_loss_without_a_ratio_takes_one_step() -> None:
    refused = {name for name in LOSSES if not load_class(name, LOSSES)().is_of_many_steps}
    assert refused == {"reinforce", "opmd_simple"}


@pytest.mark.parametrize("kind", ["reference", "megatron-1"])
def test_the_clip_binds_from_the_second_step_on(kind: str, tmp_path: Path) -> None:
    """The same data and the same two steps: anchored at the policy before the first step, or each at its own policy."""
    folder = tiny_model(tmp_path)
    row = algorithm(2, options={"clip_low": 0.001, "clip_high": 0.001})
    batch = built([*ANSWERS[:1], answer([10, 11, 12], reward=1.0)], row)
    with started(kind, folder, algorithm=row) as backend:
        metrics = train_batch(backend, batch, mini_batches_of(batch), algorithm=row, step=0, learning_rate=0.01).metrics
        bound = weights(backend)
    # no token of the first step, all tokens of the second
    assert metrics["offpolicy/clip_fraction"] == pytest.approx(0.5)
    with started(kind, folder, algorithm=row) as backend:
        for mini_batch in mini_batches_of(batch):
            backend.step(mini_batch, learning_rate=0.01)
        assert distance(bound, weights(backend)) > 0
