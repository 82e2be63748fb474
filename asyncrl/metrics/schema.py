"""Every metric's name and meaning. ``*`` stands for a worker's name, a reward part, or nothing (the sum over workers).

Numbers are part of the interface: a renamed metric is a breaking change, and a metric that is logged but not listed
here fails the tests.
"""

from __future__ import annotations

import fnmatch

SCHEMA: dict[str, str] = {
    "staleness/mean": "policy versions between sampling and training, mean over trained tokens",
    "staleness/p50": "median over trained tokens",
    "staleness/p95": "95th percentile over trained tokens",
    "staleness/max": "oldest token trained; never above max_staleness",
    "staleness/histogram": "trained tokens by staleness",
    "staleness/dropped_groups": "groups dropped as too stale, since the start",
    "staleness/buried_groups": "groups that could not be made (engine or reward failed for good), since the start",
    "buffer/groups": "groups that have arrived and wait to be trained",
    "buffer/tokens": "their response tokens",
    "buffer/oldest_seconds": "how long the oldest has waited",
    "bus/prompts": "prompt groups on the bus, in flight at workers included",
    "bus/trajectories": "trajectory groups stored in the log",
    "bus/lag": "log entries not read yet",
    "learner/step_seconds": "one optimizer step, without waiting",
    "learner/wait_seconds": "waiting for a full batch before the step",
    "learner/idle_ratio": "share of the time since the last step spent waiting for data",
    "learner/tokens_per_second": "trained response tokens over the time since the last step",
    "learner/mfu": "model FLOP/s utilisation: 6 x parameters x packed tokens / step time / peak; GPU only",
    "learner/prepare_seconds": "batch to packed micro-batches, on the host",
    "learner/learning_rate": "of this step",
    "learner/skipped_steps": "1 when a non-finite loss or gradient skipped the update",
    "rollout/tokens_per_second": "tokens sampled per second, summed over workers",
    "rollout/idle_ratio": "share of time with nothing being decoded, mean over workers",
    "rollout/running": "sequences being decoded",
    "rollout/queued": "sequences waiting for a place in an engine",
    "rollout/workers": "workers alive",
    "rollout/*/tokens_per_second": "per worker",
    "rollout/*/idle_ratio": "per worker",
    "rollout/*/running": "per worker",
    "rollout/*/queued": "per worker",
    "weights/version": "newest policy version",
    "weights/publish_seconds": "from the end of the step to the announcement on the bus",
    "weights/pause_seconds": "longest an engine decoded nothing for its last load, over engines",
    "weights/lag_versions": "newest version - version of an engine at its last heartbeat (up to 2 s ago), largest",
    "weights/*/pause_seconds": "per engine",
    "weights/*/lag_versions": "per engine",
    "weights/*/version": "per engine",
    "offpolicy/ess": "effective sample size of the importance weights, share of the tokens",
    "offpolicy/k1": "estimate of KL(behavior || trainer) per token, nats; unbiased, may be negative",
    "offpolicy/k3": "estimate of KL(behavior || trainer) per token, nats; never negative",
    "offpolicy/ratio_max": "largest trainer / behavior probability ratio",
    "offpolicy/clip_fraction": "tokens whose gradient the PPO clip stopped",
    "offpolicy/masked_fraction": "tokens whose correction weight is 0",
    "mismatch/mean": "mean |trainer - behavior logprob| over trained tokens: staleness and engine numerics",
    "mismatch/max": "its maximum",
    "mismatch/fresh_mean": "the same over trajectories sampled wholly by the version being trained: engine numerics",
    "mismatch/fresh_max": "its maximum",
    "mismatch/fresh_k3": "k3 over those tokens",
    "reward/mean": "mean over the batch's trajectories",
    "reward/std": "standard deviation over the batch's trajectories",
    "reward/same_in_group": "share of groups whose rewards are all equal: they train nothing",
    "reward/*": "mean of a part that the reward function reports",
    "length/generated": "tokens of every trajectory that arrived since the last step",
    "length/trained": "tokens of the batch's trajectories",
    "length/trained_mean": "their mean",
    "length/truncated_fraction": "share of trajectories cut at max_new_tokens",
    "length/dropped": "tokens of the trajectories dropped as stale since the last step",
    "data/epoch": "pass over the data of the newest prompt trained",
    "data/overlong_prompts": "prompts dropped as over max_prompt_tokens, since the start",
    "time": "Unix seconds when the step ended",
    "loss": "the batch's loss",
    "grad_norm": "before clipping",
    "entropy": "of the policy at the sampled tokens, nats, mean over trained tokens",
    "kl": "k3 to the reference model, when there is one",
}


def is_known(name: str) -> bool:
    return name in SCHEMA or any(fnmatch.fnmatchcase(name, pattern) for pattern in SCHEMA if "*" in pattern)
