"""From a batch of trajectory groups to training sequences and the batch's metrics, before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.staleness import Discard
from asyncrl.messages import Trajectory, TrajectoryGroup, likeliest
from asyncrl.messages.support import WHOLE, join
from asyncrl.policies.advantages.advantage import AdvantageInputs
from asyncrl.policies.advantages.turns import turns_of
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.filters import overlong_masks, overlong_penalty
from asyncrl.policies.batching.images import ImagePatches
from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.policies.evaluation.results import pass_at_k
from asyncrl.policies.groups.validation import CATEGORY
from asyncrl.policies.metric import Histogram, Metric, histogram
from asyncrl.policies.staleness.staleness import AgeWeight, ResumePoints, lag, per_token, statistics

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that is ready to be packed.

    sequences         one per trajectory
    advantage_inputs  inputs of advantages that wait for outputs of other models (model_outputs.py)
    sampled           bool[T] of each sequence: True where the policy sampled the token, trained or not
    metrics           metrics of the samples, under the schema's names
    """

    sequences: list[TrainingSequence]
    advantage_inputs: AdvantageInputs
    sampled: list[NDArray[np.bool_]]
    metrics: dict[str, Metric]
    num_tokens: int
    """Response tokens that are trained; tokens of a masked answer do not count."""
    mini_batch_sizes: tuple[int, ...]
    """Number of sequences in each optimizer step on the batch. Groups stay whole and keep the order of the batch."""
    max_staleness: int
    """Staleness of the oldest sampled token, in versions; tokens left out as too old do not count."""
    old_trajectories: int = 0
    """Trajectories that train nothing because they are too old."""
    old_tokens: int = 0
    """Sampled tokens that train nothing because they are too old, if each token is judged alone."""

    def without(self, sequences: Iterable[int]) -> Batch:
        """Return the batch without training these sequences, by number. Their rewards stay in the baseline, and the
        means of the others are over as many tokens as before."""
        left_out = frozenset(sequences)
        return replace(
            self,
            sequences=[_untrained(one) if n in left_out else one for n, one in enumerate(self.sequences)],
            num_tokens=self.num_tokens - sum(int(self.sequences[n].response_mask.sum()) for n in left_out),
        )


def _untrained(one: TrainingSequence) -> TrainingSequence:
    return replace(
        one,
        response_mask=np.zeros_like(one.response_mask),
        advantages=np.zeros_like(one.advantages),
        loss_weights=np.zeros_like(one.loss_weights),
    )


def build(
    groups: Sequence[TrajectoryGroup],
    *,
    algorithm: Algorithm,
    policy_version: int,
    max_staleness: int,
    resume_points: ResumePoints,
    age_weight: AgeWeight | None = None,
    discard: Discard = "groups",
    images: Callable[[TrajectoryGroup, Trajectory], tuple[ImagePatches, ...]] = lambda group, trajectory: (),
) -> Batch:
    """Build the batch for the step from ``policy_version``.  Raises AssertionError if any token is over the bound.

    Advantages that need outputs of another model are 0 here. ``age_weight`` multiplies the loss weights, but their
    denominators count whole tokens, so an old batch has less influence. With ``discard`` "trajectories", a trajectory
    over the bound trains nothing, but its rollout's reward stays in the baseline. With "tokens" the same applies to a
    single token. Only the loss weight of that token becomes 0, as with an ``age_weight``, so the rest of a long answer
    does not count as if it were the whole answer. ``images`` returns the images of a trajectory, with their pixels.
    """
    # Three levels of numbering. Example: group 0 has two rollouts, and the context of the second was cut in two.
    #     trajectory (sequence)   0  1  2
    #     rollout                 0  1  1     one reward each
    #     members (group)         0  0  0     one baseline each
    # A mask is bool[T] of one trajectory; an array "per token" below has an entry for each True of all masks.
    trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    rollouts = [parts for group in groups for parts in group.rollouts]
    rollout = np.repeat(np.arange(len(rollouts)), [len(parts) for parts in rollouts])
    # Sampled tokens -> of_any_age: without those of truncated answers -> trained: without those that are too old.
    masks = [trajectory.response_mask for _, trajectory in trajectories]
    of_any_age = masks
    if algorithm.masks_truncated:
        of_any_age = overlong_masks(masks, [parts[-1].finish_reason for parts in rollouts for _ in parts])
    ages = [
        per_token(t.version_spans, length=len(t.tokens), policy_version=policy_version, resume_points=resume_points)
        for _, t in trajectories
    ]
    old = _too_old(ages, masks, discard=discard, max_staleness=max_staleness)
    trained = [mask & ~too_old_mask for mask, too_old_mask in zip(of_any_age, old, strict=True)]
    members = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    # An answer that is too old to train is still part of its group's baseline.
    advantage_inputs = AdvantageInputs(
        rewards=_shaped_rewards(rollouts, algorithm)[rollout],
        group=members,
        rollout=rollout,
        **_turns(rollouts),
        sequence=_sequence_numbers(masks),
        is_trained=gather(trained, masks),
        positions=np.concatenate([np.flatnonzero(mask) for mask in masks]),
        is_truncated=np.array([one is parts[-1] and _is_cut(parts) for parts in rollouts for one in parts]),
    )
    advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    if not algorithm.outputs_for_advantage:
        advantages = scatter(algorithm.advantages(advantage_inputs)[0], masks)
    sizes = _mini_batch_sizes(groups, algorithm.steps_per_batch)
    # Example: 3 of an answer's 4 tokens are young enough. With "tokens", each of them weighs 1/4 of the answer.
    counted = of_any_age if discard == "tokens" else trained
    weights = _loss_weights(algorithm, counted, sizes=sizes, group=members, rollout=rollout)
    weights = [weight * mask for weight, mask in zip(weights, trained, strict=True)]
    if age_weight is not None:
        weights = [weight * age_weight(age).astype(np.float32) for weight, age in zip(weights, ages, strict=True)]
    sequences = [
        _sequence(*one, mask=mask, advantages=values, loss_weights=weight, staleness=age, images=images(*one))
        for one, mask, values, weight, age in zip(trajectories, trained, advantages, weights, ages, strict=True)
    ]
    bounded = gather(ages, [mask & ~too_old_mask for mask, too_old_mask in zip(masks, old, strict=True)])
    oldest = int(bounded.max()) if bounded.size else 0
    assert oldest <= max_staleness, "buffer let a stale token through"
    left_out = _left_out(old, discard)
    metrics = _staleness_metrics(ages, trained, members, rollout, max_staleness) | _sample_metrics(groups)
    if bounded.size:  # the value that the bound limits; `asyncrl audit` recomputes it from the log
        metrics["staleness/max"] = float(oldest)
    metrics |= {f"staleness/{name}": float(count) for name, count in left_out.items()}
    ages_trained = gather(ages, trained)
    metrics["length/trained_tokens"] = float(ages_trained.size)
    if age_weight is not None and ages_trained.size:
        metrics["staleness/weight"] = float(age_weight(ages_trained).mean())
    return Batch(
        sequences=sequences,
        advantage_inputs=advantage_inputs,
        sampled=[
            np.concatenate([np.zeros(len(group.prompt_of(trajectory)), np.bool_), trajectory.response_mask])
            for group, trajectory in trajectories
        ],
        metrics=metrics,
        num_tokens=int(ages_trained.size),
        mini_batch_sizes=sizes,
        max_staleness=oldest,
        **left_out,
    )


def _too_old(
    ages: Sequence[NDArray[np.int32]], masks: Sequence[NDArray[np.bool_]], *, discard: Discard, max_staleness: int
) -> list[NDArray[np.bool_]]:
    """Mark the sampled tokens that train nothing because they, or their trajectory's oldest token, are too old."""
    if discard == "groups":
        return [np.zeros_like(mask) for mask in masks]
    old = [mask & (age > max_staleness) for age, mask in zip(ages, masks, strict=True)]
    return old if discard == "tokens" else [mask & its.any() for mask, its in zip(masks, old, strict=True)]


def _left_out(old: Sequence[NDArray[np.bool_]], discard: Discard) -> dict[str, int]:
    """Return the Batch field that counts what is too old; empty if groups are only dropped whole."""
    if discard == "groups":
        return {}
    if discard == "trajectories":
        return {"old_trajectories": sum(bool(its.any()) for its in old)}
    return {"old_tokens": sum(int(np.count_nonzero(its)) for its in old)}


def _mini_batch_sizes(groups: Sequence[TrajectoryGroup], count: int) -> tuple[int, ...]:
    """Return the number of sequences in each of ``count`` mini-batches, which have about equally many groups.

    With fewer groups than ``count`` there are fewer mini-batches.
    """
    sizes = [len(group.trajectories) for group in groups]
    return tuple(int(sum(part)) for part in np.array_split(sizes, min(count, len(groups))))


def _loss_weights(
    algorithm: Algorithm,
    trained: Sequence[NDArray[np.bool_]],
    *,
    sizes: Sequence[int],
    group: NDArray[np.int64],
    rollout: NDArray[np.int64],
) -> list[NDArray[np.float32]]:
    """Return the loss weights of each sequence; each optimizer step is a mean over its own part of the batch."""
    ends = np.cumsum(sizes)
    return [
        weight
        for begin, end in zip(ends - sizes, ends, strict=True)
        for weight in algorithm.aggregation(
            trained[begin:end],
            group=group[begin:end] - group[begin],
            rollout=rollout[begin:end] - rollout[begin],
        )
    ]


def _is_cut(parts: Sequence[Trajectory]) -> bool:
    """Return whether a limit ended the rollout. Only its last part counts, whatever ended the earlier contexts."""
    return parts[-1].finish_reason == "length"


def _turns(rollouts: Sequence[Sequence[Trajectory]]) -> dict[str, NDArray[Any]]:
    """Return AdvantageInputs' ``turn`` and ``turn_rewards``; empty if no turn of the batch has a reward."""
    if not any(one.turn_rewards for parts in rollouts for one in parts):
        return {}
    turns, earned = list[NDArray[np.int64]](), list[NDArray[np.float64]]()
    for parts in rollouts:
        before = 0  # the parts of a rollout are one sequence of turns
        for one in parts:
            numbers, rewards = turns_of(one.response_mask, one.turn_rewards)
            turns.append(numbers + before)
            earned.append(rewards)
            before += int(numbers[-1]) + 1 if len(numbers) else 0
    return {"turn": np.concatenate(turns), "turn_rewards": np.concatenate(earned)}


def _shaped_rewards(rollouts: Sequence[Sequence[Trajectory]], algorithm: Algorithm) -> NDArray[np.float64]:
    """Return the rewards after DAPO's overlong penalty on the longest part, the one that a limit cuts.  -> f64[R]"""
    rewards = np.array([parts[0].reward for parts in rollouts], np.float64)
    if not algorithm.overlong_tokens:
        return rewards
    lengths = np.array([max(np.count_nonzero(one.response_mask) for one in parts) for parts in rollouts])
    penalty = overlong_penalty(
        lengths,
        max_tokens=algorithm.max_response_tokens,
        cache_tokens=algorithm.overlong_tokens,
        factor=algorithm.overlong_factor,
        has_floor=algorithm.overlong_floor,
    )
    return rewards + penalty.astype(np.float64)


def gather(of_tokens: Sequence[NDArray[Scalar]], masks: Sequence[NDArray[np.bool_]]) -> NDArray[Scalar]:
    """Concatenate the values of each sequence where its mask is True.  [B][T], [B] bool[T] -> [M]"""
    return np.concatenate([values[mask] for values, mask in zip(of_tokens, masks, strict=True)])


def scatter(values: NDArray[Any], masks: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.float32]]:
    """The inverse of ``gather``, with 0 where a mask is False.  [M], [B] bool[T] -> [B] f32[T]"""
    of_tokens = [np.zeros(len(mask), np.float32) for mask in masks]
    pieces = np.split(values, np.cumsum([np.count_nonzero(mask) for mask in masks])[:-1])
    for one, mask, piece in zip(of_tokens, masks, pieces, strict=True):
        one[mask] = piece
    return of_tokens


def _sequence_numbers(masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return the number of each masked token's sequence."""
    return np.repeat(np.arange(len(masks)), [np.count_nonzero(mask) for mask in masks])


def _sequence(
    group: TrajectoryGroup,
    trajectory: Trajectory,
    *,
    mask: NDArray[np.bool_],
    advantages: NDArray[np.float32],
    loss_weights: NDArray[np.float32],
    staleness: NDArray[np.int32],
    images: tuple[ImagePatches, ...],
) -> TrainingSequence:
    """Return the sequence: prompt, then response, with zeros for the prompt in every per-token array.

    ``mask`` marks the trained tokens. Logprobs and staleness are also kept for sampled tokens that serve only as
    context: a KL in the reward may include them, and no token after them is fresh.
    """
    prompt_tokens = group.prompt_of(trajectory)
    prompt = len(prompt_tokens)

    def behind_prompt(values: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.concatenate([np.zeros(prompt, values.dtype), values])

    sampled = trajectory.response_mask
    known: dict[str, NDArray[np.float32]] = {}
    if len(trajectory.teacher_logprobs):
        known["teacher_logprobs"] = behind_prompt(np.where(sampled, trajectory.teacher_logprobs, np.float32(0)))  # type: ignore[assignment]
    return TrainingSequence(
        tokens=np.concatenate([prompt_tokens, trajectory.tokens]),
        response_mask=behind_prompt(mask),  # type: ignore[arg-type]
        behavior_logprobs=behind_prompt(np.where(sampled, trajectory.behavior_logprobs, np.float32(0))),  # type: ignore[arg-type]
        advantages=behind_prompt(np.where(mask, advantages, np.float32(0))),  # type: ignore[arg-type]
        loss_weights=behind_prompt(loss_weights),  # type: ignore[arg-type]
        staleness=behind_prompt(np.where(sampled, staleness, np.int32(0))),  # type: ignore[arg-type]
        experts=trajectory.experts,
        model_outputs=known,
        support=join([(prompt, WHOLE), (len(mask), trajectory.support)]),
        temperature=group.temperature,
        images=images,
        likeliest={
            name: likeliest.join([(prompt, likeliest.NONE), (len(mask), its)])
            for name, its in (
                ("behavior_likeliest", trajectory.likeliest),
                ("teacher_likeliest", trajectory.teacher_likeliest),
            )
            if its.count
        },
    )


def _staleness_metrics(
    ages: Sequence[NDArray[np.int32]],
    masks: Sequence[NDArray[np.bool_]],
    group: NDArray[np.int64],
    rollout: NDArray[np.int64],
    max_staleness: int,
) -> dict[str, Metric]:
    """Return the staleness metrics of the trained tokens; ``ages`` and ``masks`` are per trajectory."""
    staleness = gather(ages, masks)
    if staleness.size == 0:
        return {}
    sequence = _sequence_numbers(masks)
    found = statistics(staleness, rollout[sequence], num_sequences=int(rollout.max()) + 1)
    of_groups = statistics(staleness, group[sequence], num_sequences=int(group.max()) + 1)
    there = np.isfinite(of_groups.oldest)
    lags = [
        lag(policy_version=0, start=-int(oldest), end=-int(newest))
        for oldest, newest in zip(of_groups.oldest[there], of_groups.newest[there], strict=True)
    ]
    # Tokens of rolled-back versions may be newer than the version being trained, but never older.
    counts = np.bincount(np.maximum(staleness, 0), minlength=max_staleness + 1)
    return {
        "staleness/mean": found.mean,
        "staleness/min": found.smallest,
        "staleness/spread": float(np.nanmean(found.spread)),
        "staleness/in_flight": float(np.mean([one.in_flight for one in lags])),
        "staleness/in_queue": float(np.mean([one.in_queue for one in lags])),
        "staleness/p50": float(np.percentile(staleness, 50)),
        "staleness/p95": float(np.percentile(staleness, 95)),
        "staleness/max": found.largest,
        "staleness/histogram": Histogram(
            edges=tuple(float(edge) for edge in range(len(counts) + 1)), counts=tuple(int(count) for count in counts)
        ),
    }


def _sample_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, Metric]:
    rollouts = [parts for group in groups for parts in group.rollouts]
    rewards = np.array([parts[0].reward for parts in rollouts])
    lengths = rollout_lengths(rollouts)
    metrics: dict[str, Metric] = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "staleness/cancelled": float(sum(group.cancelled for group in groups)),
        "staleness/failed_samples": float(sum(group.failed_samples for group in groups)),
        "rollout/extra_samples": float(sum(group.extra_samples for group in groups)),
        "reward/same_in_group": float(np.mean([len(set(group.rewards)) == 1 for group in groups])),
        "length/trained": histogram(lengths),
        "length/trained_mean": float(np.mean(lengths)),
        "length/truncated_fraction": float(np.mean([_is_cut(parts) for parts in rollouts])),
        "length/parts_mean": float(np.mean([len(parts) for parts in rollouts])),
    }
    cut = [counts[counts > 0] for group in groups for one in group.trajectories if len(counts := one.support.counts)]
    if cut:
        metrics["rollout/support_mean"] = float(np.concatenate(cut).mean())
    metrics |= _pass_rates(groups) | _turn_metrics(rollouts)
    if len(solved := np.array(lengths)[rewards >= SOLVED_AT]):
        metrics |= {"length/solved_mean": float(solved.mean()), "length/solved_max": float(solved.max())}
    of_parts: dict[str, list[float]] = {}
    for first, *_ in rollouts:
        for name, value in first.reward_parts.items():
            of_parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}": _mean_of_part(name, values, len(rollouts)) for name, values in of_parts.items()}


def _mean_of_part(name: str, values: Sequence[float], num_rollouts: int) -> float:
    """Return the mean over the rollouts that have the part; of a category over all: the share that is in it."""
    is_category = f".{CATEGORY}/" in f".{name}"  # category/NAME, or PART.category/NAME with reward.parts
    return sum(values) / (num_rollouts if is_category else len(values))


SOLVED_AT: Final = 1.0
"""An answer with at least this reward counts as solved in reward/pass@k and length/solved_*."""


def _pass_rates(groups: Sequence[TrajectoryGroup]) -> dict[str, Metric]:
    """Return pass@k of the groups' answers, for k = 1, 2, 4, ..., over groups with at least k answers."""
    counts = [(len(group.rewards), sum(reward >= SOLVED_AT for reward in group.rewards)) for group in groups]
    most = max(num_answers for num_answers, _ in counts)
    if most < 2:
        return {}
    ks = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return {f"reward/pass@{k}": float(np.mean([pass_at_k(n, solved, k) for n, solved in counts if n >= k])) for k in ks}


def _turn_metrics(rollouts: Sequence[Sequence[Trajectory]]) -> dict[str, Metric]:
    """Return statistics of turns; empty if every rollout is one answer."""
    turns = [sum(_num_turns(one.response_mask) for one in parts) for parts in rollouts]
    told = [sum(int(np.count_nonzero(~one.response_mask)) for one in parts) for parts in rollouts]
    if max(turns) < 2 and not any(told):
        return {}
    return {
        "rollout/turns_mean": float(np.mean(turns)),
        "rollout/turns_max": float(max(turns)),
        "length/observed_mean": float(np.mean(told)),
    }


def _num_turns(mask: NDArray[np.bool_]) -> int:
    """Return how often the model begins to speak: runs of True.  Example: 1 1 0 1 has two."""
    return int(np.count_nonzero(mask[1:] & ~mask[:-1])) + int(mask[0])


def rollout_lengths(rollouts: Sequence[Sequence[Trajectory]]) -> list[int]:
    """Return the number of response tokens of each rollout, over all its parts."""
    return [sum(len(one.tokens) for one in parts) for parts in rollouts]
