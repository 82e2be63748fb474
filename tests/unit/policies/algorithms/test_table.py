"""Every row of the table of algorithms does what it says, from the run file's name to the trained gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.data import demo_task
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.summary import summarize
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch, model_outputs
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.losses.loss import LossInputs
from tests import ROOT
from tests.harness.packing import pack

DEMO = ROOT / "examples" / "demo.toml"
SERVED = ["servers.big.url=http://h/v1", "teacher.server=big", "teacher.top_logprobs=8"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's model and prompts."""
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


def options_of(algorithm: Algorithm) -> dict[str, Any]:
    parts = (algorithm.advantage, algorithm.loss, algorithm.aggregation, *algorithm.correction)
    return {part.name: dict(part.options) for part in parts}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_demo_run_file_becomes_any_row_by_its_name_alone(name: str, task: Path) -> None:
    teacher = [f"teacher.path={task / 'model'}"] if name == "opd" else SERVED if name == "distill" else []
    paths = [f"model.path={task / 'model'}", f"data.path={task / 'prompts.jsonl'}"]
    run = config.load(DEMO, [f"algorithm.name={name}", *paths, *teacher])
    check(run)
    own = resolve(ALGORITHMS[name])
    longest = own.aggregation.at_most(run.rollout.max_new_tokens)
    assert options_of(registry.algorithm(run)) == options_of(replace(own, aggregation=longest))


def test_check_says_what_is_trained_with_every_option_and_which_models_are_loaded(task: Path) -> None:
    overrides = ["algorithm.correction=tis_token + k_stat", 'algorithm.options={cap=3, "k_stat.high"=0.02}']
    more = [f"model.path={task / 'model'}", f"data.path={task / 'prompts.jsonl'}", "reference.kl_coef=0.1"]
    said = str(summarize(config.load(DEMO, ["algorithm.name=ppo", *overrides, *more]))).splitlines()
    for line in (
        'advantage         gae (gamma = 1.0, lam = 1.0, truncated = "end"',
        "loss              ppo_clip (clip_low = 0.2, clip_high = 0.2",
        "aggregation       token_mean",
        'correction        tis_token (cap = 3.0) + k_stat (statistic = "k3", over = "mean", low = -inf, high = 0.02)',
        f"models            policy {task / 'model'}, critic {task / 'model'}, reference {task / 'model'}",
    ):
        assert any(part.startswith(line) for part in said), line


# -- the formula of each row, on stale data ----------------------------------------------------------------------------

REWARDS = np.array([1.0, 0.5, -1.0, 0.25, 0.5, -0.5, 1.0, -0.25, 0.0, 0.0, 0.0, 0.0])
LENGTHS = np.array([3, 5, 4, 7, 2, 6, 5, 3, 4, 4, 2, 6])
GROUP_SIZE, VERSION = 4, 7
SEQUENCE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
M, B = len(SEQUENCE), len(LENGTHS)
RANDOM = np.random.default_rng(5)
BEHAVIOR = np.minimum(-1.5 + 0.5 * RANDOM.standard_normal(M), -0.5).astype(np.float32)
LOG_RATIO = (0.1 * RANDOM.standard_normal(M)).astype(np.float32)
LOG_RATIO[::4] = RANDOM.uniform(-1.0, 0.5, len(LOG_RATIO[::4]))
LOG_RATIO[[1, 6, 13]] = np.log([8.0, 3.5, 6.0])
"""Tokens near the policy, some far from it, and some above every cap."""
LIVE = (BEHAVIOR + LOG_RATIO).astype(np.float32)
VALUES, TEACHER = (RANDOM.standard_normal(M).astype(np.float32) for _ in range(2))


def groups() -> list[TrajectoryGroup]:
    starts = np.cumsum(LENGTHS) - LENGTHS
    answers = [
        Trajectory(
            tokens=np.ones(length, np.int32),
            response_mask=np.ones(length, np.bool_),
            behavior_logprobs=BEHAVIOR[start : start + length],
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=VERSION - 3),),
            reward=float(reward),
            finish_reason="stop",
        )
        for start, length, reward in zip(starts, LENGTHS, REWARDS, strict=True)
    ]
    return [
        TrajectoryGroup(
            group_id=first, prompt_tokens=np.zeros(2, np.int32), trajectories=tuple(answers[first : first + GROUP_SIZE])
        )
        for first in range(0, B, GROUP_SIZE)
    ]


def built(algorithm: Algorithm) -> Batch:
    return batch.build(groups(), algorithm=algorithm, policy_version=VERSION, max_staleness=4, resume_points={})


def gradient(algorithm: Algorithm) -> np.ndarray:
    """d loss / d logprob of each token, with the whole batch in one micro-batch.  f64[M]"""
    made = built(algorithm)
    (packed,) = pack(made.sequences, max_tokens=1000)
    outputs = {
        name: [[on_tokens(packed, values)]]
        for name, values in {"prox_logprobs": LIVE, "teacher_logprobs": TEACHER, "values": VALUES}.items()
        if name in algorithm.outputs_for_advantage | algorithm.outputs_for_loss
    }
    if "values" in outputs:  # the critic's value of choosing token n is at token n - 1
        outputs["values"] = [[np.append(outputs["values"][0][0][1:], np.float32(0))]]
    ((packed,),) = model_outputs.complete([[packed]], outputs, batch=made, algorithm=algorithm)
    mask = packed.response_mask
    live = torch.tensor(LIVE, requires_grad=True)
    objective, _ = algorithm.objective(
        LossInputs(
            logprobs=live,
            entropy=torch.zeros(M),
            behavior_logprobs=torch.tensor(packed.behavior_logprobs[mask]),
            advantages=torch.tensor(packed.advantages[mask]),
            loss_weights=torch.tensor(packed.loss_weights[mask]),
            is_fresh=torch.zeros(M, dtype=torch.bool),
            staleness=torch.full((M,), 3, dtype=torch.int32),
            sequence=torch.tensor(SEQUENCE),
            num_sequences=B,
            model_outputs={name: torch.tensor(values[mask]) for name, values in packed.model_outputs.items()},
        )
    )
    objective.backward()
    assert live.grad is not None
    return live.grad.double().numpy()


def on_tokens(packed: MicroBatch, values: np.ndarray) -> np.ndarray:
    assert packed.sequences.tolist() == list(range(B))
    result = np.zeros(packed.num_tokens, np.float32)
    result[packed.response_mask] = values
    return result


@dataclass(frozen=True)
class Plain:
    """Terms of the papers, written out for the batch above. Each is f64[M]."""

    ratio = np.exp(LOG_RATIO.astype(np.float64))
    tis = np.minimum(ratio, 2.0)
    reward = REWARDS[SEQUENCE]
    in_group = REWARDS.reshape(-1, GROUP_SIZE)
    centered = (in_group - in_group.mean(1, keepdims=True)).ravel()[SEQUENCE]
    deviation = np.repeat(in_group.std(1, ddof=1), GROUP_SIZE)[SEQUENCE]
    grpo = centered / (deviation + 1e-6)
    length = LENGTHS[SEQUENCE]
    product = np.exp(np.bincount(SEQUENCE, LOG_RATIO.astype(np.float64)))[SEQUENCE]

    @staticmethod
    def whitened(values: np.ndarray) -> np.ndarray:
        return (values - values.mean()) / values.std(ddof=1)

    @staticmethod
    def kept() -> np.ndarray:
        """Drop the fewest most distant tokens that bring the mean squared log ratio below 0.04."""
        squares = LOG_RATIO.astype(np.float64) ** 2
        kept = np.ones(M, bool)
        while squares[kept].mean() >= 0.04:
            kept[np.argmax(np.where(kept, squares, -1))] = False
        assert 0 < kept.sum() < M
        return kept


E = float(Plain.ratio.sum() ** 2 / (M * (Plain.ratio**2).sum()))
"""Effective sample size divided by the number of samples."""

FORMULAS: dict[str, Callable[[type[Plain]], np.ndarray]] = {
    "grpo": lambda x: -x.tis * x.grpo / M,
    "dapo": lambda x: -x.tis * x.grpo / M,
    "dr_grpo": lambda x: -x.tis * x.centered / (B * 1024),
    "gspo": lambda x: -x.tis * x.grpo / (B * x.length),
    "cispo": lambda x: -np.minimum(x.ratio, 1 + 4) * x.grpo / M,
    "rloo": lambda x: -x.tis * x.centered * GROUP_SIZE / (GROUP_SIZE - 1) / B,
    "reinforce_pp": lambda x: -x.tis * x.whitened(x.reward) / M,
    "reinforce_pp_baseline": lambda x: -x.tis * x.whitened(x.centered) / M,
    "gpg": lambda x: -x.tis * 1.5 * x.centered / M,  # a third of the groups and of the rewards has no signal
    "topr": lambda x: -np.where(x.reward > 0, 1.0, np.minimum(x.product, 1.0)) * x.reward / B,
    "sapo": lambda x: -x.tis * x.grpo / (B * x.length),
    "m2po": lambda x: -x.tis * x.grpo * x.kept() / M,
    "ppo": lambda x: -x.tis * x.whitened(x.reward - VALUES) / M,
    "opd": lambda x: -x.tis * (TEACHER.astype(np.float64) - LIVE) / M,
    "p3o": lambda x: (-np.minimum(x.ratio, E) * x.grpo + (1 - E) * (1 - 1 / x.ratio)) / M,
    "sft": lambda x: -np.ones(M) / M,
}


def test_every_row_has_a_formula_here_and_the_data_separates_what_they_differ_in() -> None:
    assert FORMULAS.keys() == ALGORITHMS.keys() - {"distill"}, (
        "of logits: tests/unit/policies/losses/test_distributions.py"
    )
    assert (Plain.ratio > 5).any() and (Plain.product < 1).any() and (Plain.product > 1).any()
    assert 0.1 < E < 0.9


@pytest.mark.parametrize("name", FORMULAS)
def test_a_row_trains_stale_data_as_its_formula_says(name: str) -> None:
    np.testing.assert_allclose(gradient(resolve(ALGORITHMS[name])), FORMULAS[name](Plain), rtol=2e-4, atol=1e-7)


def test_long_answers_lose_reward_before_advantages_are_made_of_it() -> None:
    plain = resolve(ALGORITHMS["topr"])  # its advantages are the rewards
    shaped = replace(plain, overlong_tokens=4, max_response_tokens=7)
    penalty = -np.maximum(LENGTHS - 3, 0) / 4
    expected = (REWARDS + penalty)[SEQUENCE]
    for algorithm, advantages in ((plain, REWARDS[SEQUENCE]), (shaped, expected)):
        sequences = built(algorithm).sequences
        got = np.concatenate([sequence.advantages[sequence.response_mask] for sequence in sequences])
        np.testing.assert_allclose(got, advantages, rtol=1e-6)
    assert built(shaped).metrics["reward/mean"] == pytest.approx(REWARDS.mean())  # without the penalty
