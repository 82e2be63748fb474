"""Measure how staleness affects learning, and how much corrections recover: expected reward at equal samples.

    python -m benchmarks.staleness                                       about a minute on two cores
    python -m benchmarks.staleness --arms sync,none,tis_token --seeds 1  one seed of the promise
    python -m benchmarks.staleness --json docs/results/staleness.jsonl   one object a line

Step i trains a batch sampled by the policy of step max(0, i - lag). The lag is exact, and so is the expected reward J
(tests/harness/tiny/task.py). Everything else is the library's code: grpo advantages, PPO loss around the proximal
policy, corrections by name, token mean, one Adam step per batch. Arms with the same seed start from the same weights.

Required (exit code 1 otherwise), with J the mean of the last three evaluations, over seeds:
  high learning rate  J(tis_token) >= 0.85 J(sync), J(none) <= 0.4 J(sync), broken logprobs well below tis_token
  low learning rate   no arm further than 0.05 from sync: the harm depends on staleness times learning rate

Broken logprobs are negative controls: "shuffled" gives each sample the behavior logprobs of another one, "shifted"
gives each token those of its neighbour.

"speed" is the throughput relative to synchronous training that this lag would allow as the staleness bound of a run on
eight machines, with the pipeline benchmark's timing and lognormal lengths (ideal.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.run import Mode
from asyncrl.planning.ideal import Ideal
from asyncrl.policies.advantages.groups import GRPO
from asyncrl.policies.corrections import diagnostics
from asyncrl.policies.corrections.chains import chain, weights
from asyncrl.policies.corrections.correction import CorrectionInputs
from asyncrl.policies.losses.ppo import PPOClip
from benchmarks.pipeline import Scene
from benchmarks.simulated import Lengths, group_lengths
from tests.harness.tiny import task as staleness_task
from tests.harness.tiny.task import LENGTH, Policy

Row = dict[str, Any]

HIGH: Final = 8e-3
LOW: Final = 1e-3
EVALUATE_EVERY: Final = 10
GROUPS: Final = 16
GROUP_SIZE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """
    lag       lag in steps
    behavior  behavior logprobs for the correction: "right", or how they are broken
    """

    name: str
    correction: str = "none"
    lag: int = 16
    behavior: str = "right"


ARMS: Final = {
    arm.name: arm
    for arm in (
        Arm(name="sync", lag=0),
        Arm(name="none"),
        Arm(name="tis_token", correction="tis_token"),
        Arm(name="tis_sequence", correction="tis_sequence"),
        Arm(name="icepop", correction="icepop"),
        Arm(name="tis_token_4", correction="tis_token", lag=4),
        Arm(name="shuffled", correction="tis_token", behavior="shuffled"),
        Arm(name="shifted", correction="tis_token", behavior="shifted"),
    )
}
CONTROLS: Final = ("sync", "none", "tis_token")
"""Arms that also run at the low learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """prompts i64[N, 2], answers i64[N, LENGTH], behavior_logprobs f32[N, LENGTH], advantages f32[N]"""

    prompts: torch.Tensor
    answers: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor


def sample(policy: Policy, generator: torch.Generator) -> Batch:
    """Sample GROUPS prompts with GROUP_SIZE answers each."""
    distinct = staleness_task.all_prompts()
    chosen = distinct[torch.randint(len(distinct), (GROUPS,), generator=generator)]
    prompts = chosen.repeat_interleave(GROUP_SIZE, dim=0)
    answers, logprobs = policy.sample(prompts, generator)
    rewards = staleness_task.rewards(prompts, answers).numpy()
    groups = np.repeat(np.arange(GROUPS), GROUP_SIZE)
    return Batch(
        prompts=prompts,
        answers=answers,
        behavior_logprobs=logprobs,
        advantages=torch.from_numpy(GRPO().formula(rewards.astype(np.float64), groups).astype(np.float32)),
    )


def broken(batch: Batch, how: str, generator: torch.Generator) -> Batch:
    """Return ``batch`` with broken behavior logprobs."""
    logprobs = batch.behavior_logprobs
    if how == "shuffled":
        logprobs = logprobs[torch.randperm(len(logprobs), generator=generator)]
    elif how == "shifted":
        logprobs = logprobs.roll(1, dims=1)
    return replace(batch, behavior_logprobs=logprobs)


def objective(policy: Policy, batch: Batch, *, correction: str) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of the batch and its off-policy metrics."""
    logprobs = policy.logprobs(batch.prompts, batch.answers).ravel()
    behavior, prox = batch.behavior_logprobs.ravel(), logprobs.detach()
    per_token = batch.advantages.repeat_interleave(LENGTH)
    sequence = torch.arange(len(batch.answers)).repeat_interleave(LENGTH)
    loss, _ = PPOClip().formula(logprobs, prox, per_token)
    inputs = CorrectionInputs(
        log_ratio=prox - behavior, sequence=sequence, num_sequences=len(batch.answers), advantages=per_token
    )
    token_weights = weights(chain(correction), inputs)
    sums = diagnostics.sequence_sums(
        logprobs=prox,
        behavior_logprobs=behavior,
        weights=token_weights,
        sequence=sequence,
        num_sequences=len(batch.answers),
    )
    return (loss * token_weights).mean(), diagnostics.metrics(sums)


def run_seed(seed: int, plans: Sequence[tuple[Arm, float]], *, steps: int) -> list[Row]:
    """Run every plan (arm and learning rate) from the seed's common warm start."""
    torch.set_num_threads(1)
    start = staleness_task.warm_start(seed, reward=0.105, noise=0.25)
    return [run(arm, start, seed=seed, learning_rate=rate, steps=steps) for arm, rate in plans]


def run(arm: Arm, start: Policy, *, seed: int, learning_rate: float, steps: int) -> Row:
    """Run one learning curve."""
    policy, generator = start.copy(is_trained=True), torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.Adam(policy.parameters, lr=learning_rate, betas=(0.9, 0.95))
    history, lags, ess, curve = [start], [], [], [staleness_task.expected_reward(start)]
    for step in range(steps):
        lag = min(arm.lag, step)
        batch = broken(sample(history[-1 - lag], generator), arm.behavior, generator)
        optimizer.zero_grad()
        loss, metrics = objective(policy, batch, correction=arm.correction)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
        history = [*history, policy.copy()][-arm.lag - 1 :]
        lags.append(lag)
        ess.append(metrics["offpolicy/sequence_ess"])
        if (step + 1) % EVALUATE_EVERY == 0:
            curve.append(staleness_task.expected_reward(policy))
    return {
        "arm": arm.name,
        "seed": seed,
        "learning_rate": learning_rate,
        "lags": lags,
        "ess_mean": mean(ess),
        "ess_min": min(ess),
        "reward": mean(curve[-3:]),
        "curve": curve,
    }


# -- report ------------------------------------------------------------------------------------------------------------


def measured_speeds(lags: Sequence[int] = (1, 2, 4, 8, 16)) -> NDArray[np.float64]:
    """Return tokens per second with bounds 0, 1, 2, … at the best split, f64[last + 1]; linear between ``lags``."""
    lengths = Lengths("lognormal", mean=250, maximum=1000)
    of_group = group_lengths(lengths, group_size=GROUP_SIZE, seed=0)

    def best(mode: Mode, bound: int) -> float:
        scene = Scene(
            machines=8,
            groups_per_batch=GROUPS,
            group_size=GROUP_SIZE,
            max_staleness=bound,
            length_mean=250,
            length_max=1000,
            steps=10,
            seed=0,
            speed=1.0,
        )
        return max(Ideal(plan, scene.timing(), of_group).tokens_per_second() for plan in scene.plans(mode))

    found = [best("sync", 0), *(best("async", lag) for lag in lags)]
    return np.interp(np.arange(lags[-1] + 1), [0, *lags], found)


def relative_speed(lags: Sequence[int], speeds: NDArray[np.float64]) -> float:
    """Return the throughput with these lags relative to no lag: number of batches over the sum of their times."""
    return float(len(lags) / (speeds[0] / speeds[np.asarray(lags)]).sum())


def summary(rows: Sequence[Row], *, learning_rate: float, speeds: NDArray[np.float64]) -> Iterator[Row]:
    """Yield one row per arm at a learning rate, with the paired difference to sync."""
    mine = [row for row in rows if row["learning_rate"] == learning_rate]
    sync = {row["seed"]: row["reward"] for row in mine if row["arm"] == "sync"}
    for name in dict.fromkeys(row["arm"] for row in mine):
        of_arm = [row for row in mine if row["arm"] == name]
        rewards = [row["reward"] for row in of_arm]
        differences = [row["reward"] - sync[row["seed"]] for row in of_arm if row["seed"] in sync]
        yield {
            "arm": name,
            "learning_rate": learning_rate,
            "reward": mean(rewards),
            "reward_error": standard_error(rewards),
            "of_sync": mean(rewards) / mean(sync.values()) if sync else float("nan"),
            "difference": mean(differences) if differences else float("nan"),
            "difference_error": standard_error(differences),
            "lag_mean": mean(lag for row in of_arm for lag in row["lags"]),
            "speed": mean(relative_speed(row["lags"], speeds) for row in of_arm),
            "ess_mean": mean(row["ess_mean"] for row in of_arm),
            "ess_min": min(row["ess_min"] for row in of_arm),
        }


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


HEAD = "lr      arm            lag mean  speed     J             of sync  difference       ESS mean   min"


def line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['learning_rate']:<7g} {row['arm']:13s} {row['lag_mean']:9.1f}  {row['speed']:5.1f}     "
        f"{row['reward']:.3f} +- {row['reward_error']:.3f} {row['of_sync']:7.2f}  "
        f"{row['difference']:+.3f} +- {row['difference_error']:.3f}  {row['ess_mean']:7.2f}  {row['ess_min']:5.2f}"
    )


def broken_promises(arms: Sequence[Row]) -> Iterator[str]:
    """Yield the violated requirements among those that the arms of this run can check."""
    high = {row["arm"]: row for row in arms if row["learning_rate"] == HIGH}
    low = {row["arm"]: row for row in arms if row["learning_rate"] == LOW}
    floors = dict.fromkeys(("tis_token", "tis_token_4", "tis_sequence", "icepop"), 0.85)
    ceilings = {"none": 0.4, "shuffled": 0.7, "shifted": 0.7}
    if "sync" in high:
        for name, floor in floors.items():
            if name in high and high[name]["of_sync"] < floor:
                yield f"{name} at {HIGH:g} keeps {high[name]['of_sync']:.2f} of sync; it must keep {floor}"
        for name, ceiling in ceilings.items():
            if name in high and high[name]["of_sync"] > ceiling:
                yield f"{name} at {HIGH:g} keeps {high[name]['of_sync']:.2f} of sync; it must fall to {ceiling}"
    for name, row in low.items():
        if abs(row["difference"]) > 0.05:
            yield f"{name} at {LOW:g} differs from sync by {row['difference']:+.3f}; it must be within 0.05"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.staleness", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}; separated by commas")
    add("--seeds", type=int, default=4)
    add("--steps", type=int, default=200)
    add("--workers", type=int, default=2, help="processes")
    add("--json", type=Path, metavar="FILE", help="write the rows there, one object a line")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    names = options.arms.split(",")
    plans = [(ARMS[name], HIGH) for name in names] + [(ARMS[name], LOW) for name in names if name in CONTROLS]
    started = time.monotonic()
    with ProcessPoolExecutor(max_workers=options.workers) as pool:
        futures = [pool.submit(run_seed, seed, plans, steps=options.steps) for seed in range(options.seeds)]
        speeds = measured_speeds()
        rows = [row for future in futures for row in future.result()]
    arms = [row for rate in (HIGH, LOW) for row in summary(rows, learning_rate=rate, speeds=speeds)]
    print(HEAD, *map(line, arms), sep="\n")
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = list(broken_promises(arms))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
