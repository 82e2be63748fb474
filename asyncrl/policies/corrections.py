"""Off-policy corrections: how much a token counts that something other than the learner's policy sampled.

Each is a small function of the token log ratios: a *weight* (an importance ratio, tamed) or a *mask* (1 keeps, 0
rejects). They multiply; ``correction_chains.py`` composes them by name. ``log_ratio`` f32[M] is proximal - behavior
logprobs: the learner's weights at the start of the step, in the learner's numerics, against whatever really sampled the
token, so it covers staleness and engine mismatch at once, also where the tokens of a sequence come from several
versions. Every result is f32[M] without gradient. Shapes as in segments.py: M tokens of S sequences.

"Sequence ratio" is the product of the token ratios here, as in verl, TRL, SkyRL, slime and NeMo-RL; AReaL and
open-instruct mean the geometric mean by it, which is "geometric" here. Log ratios are clamped before exp, so an
infinite one is a large one and no result is nan.
"""

from __future__ import annotations

import math

import torch

from asyncrl.policies.losses.ratios import MAX_LOG_RATIO
from asyncrl.policies.segments import Array, as_floats, segment_max, segment_mean, segment_sum, spread

_SUMMAND_LIMIT = 1e4
"""Token log ratios are clamped to +- this before they are summed: -inf + inf would be nan."""


# -- ratios ------------------------------------------------------------------------------------------------------------


def ratio(log_ratio: Array) -> torch.Tensor:
    """exp of the clamped log ratio, in float32 or better.  f32[M] -> f32[M] in [e^-20, e^20]"""
    return as_floats(log_ratio).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(log_ratio: Array, *, sequence: Array, num_sequences: int) -> torch.Tensor:
    """Product of each sequence's token ratios; 1 for one without tokens.  f32[M] -> f32[S]

    The clamp acts on the sum, as in verl, not on its parts.
    """
    total = segment_sum(_summands(log_ratio), sequence, num_sequences=num_sequences)
    return ratio(total).to(as_floats(log_ratio).dtype)


def geometric_ratio(log_ratio: Array, *, sequence: Array, num_sequences: int) -> torch.Tensor:
    """Geometric mean of each sequence's token ratios; 1 for one without tokens.  f32[M] -> f32[S]"""
    mean = segment_mean(_summands(log_ratio), sequence, num_sequences=num_sequences)
    return ratio(mean).to(as_floats(log_ratio).dtype)


def prefix_ratio(log_ratio: Array, *, sequence: Array, num_sequences: int) -> torch.Tensor:
    """Product of the ratios of a token and all before it in its sequence.  f32[M] -> f32[M]"""
    summands = _summands(log_ratio)
    totals = segment_sum(summands, sequence, num_sequences=num_sequences)
    before_sequence = totals.cumsum(0) - totals
    return ratio(summands.cumsum(0) - spread(before_sequence, sequence)).to(as_floats(log_ratio).dtype)


def _summands(log_ratio: Array) -> torch.Tensor:
    return as_floats(log_ratio).detach().double().clamp(-_SUMMAND_LIMIT, _SUMMAND_LIMIT)


# -- weights -----------------------------------------------------------------------------------------------------------


def none(log_ratio: Array) -> torch.Tensor:
    """Every token counts 1: stale data is trained as if it were fresh.  f32[M] -> f32[M]"""
    return torch.ones_like(as_floats(log_ratio)).detach()


def tis_token(log_ratio: Array, *, cap: float = 2.0) -> torch.Tensor:
    """Truncated importance sampling per token: min(ratio, cap).  f32[M] -> f32[M] in (0, cap]

    Source: fengyao.notion.site/off-policy-rl (2025), Espeholt et al. arXiv:1802.01561 for the truncation. Cap 2.0 as in
    slime, verl, SkyRL and open-instruct; ROLL calls it TIS with cap 1, OpenRLHF with both sides clamped (``clamp``).
    With logprobs of the live policy it is the weight of LlamaRL's AIPO, arXiv:2505.24034. cap = inf is plain importance
    sampling.
    """
    return ratio(log_ratio).clamp(max=cap)


def is_truncated(log_ratio: Array, *, cap: float = 2.0) -> torch.Tensor:
    """Where ``tis_token`` gives less than the ratio: what the truncation takes part of.  f32[M] -> bool[M]"""
    return ratio(log_ratio) > cap


def clamp(log_ratio: Array, *, low: float = 0.5, high: float = 5.0) -> torch.Tensor:
    """The token ratio clamped on both sides.  f32[M] -> f32[M] in [low, high]

    Bounds 0.5 and 5 as OpenRLHF's "tis". slime has tis_clip_low 0.
    """
    return ratio(log_ratio).clamp(min=low, max=high)


def tis_sequence(log_ratio: Array, *, sequence: Array, num_sequences: int, cap: float = 2.0) -> torch.Tensor:
    """min(product of the sequence's ratios, cap) on each of its tokens.  f32[M] -> f32[M] in (0, cap]

    The only weight without bias as the cap grows, with a variance that grows with length. Cap 2 (verl), 5 (SkyRL), 8
    (VCPO, arXiv:2602.17616).
    """
    weights = sequence_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences).clamp(max=cap)
    return spread(weights, sequence)


def tis_geometric(
    log_ratio: Array, *, sequence: Array, num_sequences: int, low: float = 0.0, high: float = 2.0
) -> torch.Tensor:
    """Geometric mean of the sequence's ratios, clamped, on each of its tokens.  f32[M] -> f32[M] in [low, high]

    What AReaL (level = sequence, upper 5) and open-instruct (upper 2) weight with.
    """
    weights = geometric_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences).clamp(min=low, max=high)
    return spread(weights, sequence)


def tis_prefix(log_ratio: Array, *, sequence: Array, num_sequences: int, cap: float = 2.0) -> torch.Tensor:
    """min(product of the ratios up to and with the token, cap).  f32[M] -> f32[M] in (0, cap]

    Per-decision importance sampling (Precup et al., 2000): right for rewards per token; an advantage of the whole
    trajectory leaves it biased.
    """
    return prefix_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences).clamp(max=cap)


def mis_token(log_ratio: Array, *, low: float = 0.0, high: float = 3.0) -> torch.Tensor:
    """Masked importance sampling: the token's ratio where low <= ratio <= high, else 0.  f32[M] -> f32[M]

    Bounds of TRL's token_mask; slime's helper takes 0.5 (or 1 / high) and 2.
    """
    return _inside(ratio(log_ratio), low=low, high=high)


def mis_sequence(
    log_ratio: Array, *, sequence: Array, num_sequences: int, low: float = 0.0, high: float = 3.0
) -> torch.Tensor:
    """The product of the sequence's ratios where it is within the bounds, else 0.  f32[M] -> f32[M]

    TRL's default (sequence_mask, 3.0).
    """
    ratios = sequence_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences)
    return spread(_inside(ratios, low=low, high=high), sequence)


def icepop(log_ratio: Array, *, low: float = 0.5, high: float = 5.0) -> torch.Tensor:
    """The token's ratio where low <= ratio <= high, else 0: ``mis_token`` with both bounds.  f32[M] -> f32[M]

    Source: Ring-1T, arXiv:2510.18855, alpha 0.5 and beta 5, as in NeMo-RL, verl and OpenRLHF; slime 0.5 and 2. Made for
    mixtures of experts, where the engine routes some tokens elsewhere.
    """
    return _inside(ratio(log_ratio), low=low, high=high)


def _inside(ratios: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    return ratios.where((ratios >= low) & (ratios <= high), 0.0)


# -- masks -------------------------------------------------------------------------------------------------------------


def geo_mask(
    log_ratio: Array, *, sequence: Array, num_sequences: int, low: float = 0.99, high: float = 1.01
) -> torch.Tensor:
    """Keeps sequences whose geometric mean ratio is within the bounds.  f32[M] -> f32[M] of 0 and 1

    0.99 and 1.01 as SkyRL; verl 0.999 and 1.001, NeMo-RL 0.999 and 1.002. What is right depends on length and numerics.
    """
    ratios = geometric_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences)
    return spread(((ratios >= low) & (ratios <= high)).to(ratios.dtype), sequence)


def outlier_mask(
    log_ratio: Array, *, sequence: Array, num_sequences: int, low: float = 1e-4, high: float = 100.0
) -> torch.Tensor:
    """Keeps sequences all of whose token ratios are within the bounds.  f32[M] -> f32[M] of 0 and 1.  As SkyRL."""
    ratios = ratio(log_ratio)
    is_outlier = ((ratios < low) | (ratios > high)).to(ratios.dtype)
    outliers = segment_sum(is_outlier, sequence, num_sequences=num_sequences)
    return spread((outliers == 0).to(ratios.dtype), sequence)


def veto(log_ratio: Array, *, sequence: Array, num_sequences: int, threshold: float = 1e-4) -> torch.Tensor:
    """Rejects sequences with a token whose ratio is below the threshold.  f32[M] -> f32[M] of 0 and 1

    1e-4 as slime's helper; verl had it and removed it.
    """
    return outlier_mask(log_ratio, sequence=sequence, num_sequences=num_sequences, low=threshold, high=math.inf)


def opsm(
    log_ratio: Array, *, advantages: Array, sequence: Array, num_sequences: int, delta: float = 0.5
) -> torch.Tensor:
    """Rejects tokens of negative advantage in sequences that the policy left behind.  f32[M] x 2 -> f32[M] of 0 and 1

    Off-policy sequence masking: rejected where advantage < 0 and the mean of -log_ratio over the sequence > delta.
    Source: DeepSeek-V3.2, arXiv:2512.02556 eq. 9. TRL suggests delta 0.5, slime takes 1e-4 and the recomputed old
    logprobs in place of the sampling ones. The paper's numerator is the live policy: with one optimizer step per batch
    that is the proximal one.
    """
    divergence = segment_mean(-_summands(log_ratio), sequence, num_sequences=num_sequences)
    is_left = spread(divergence, sequence) > delta
    floats = as_floats(log_ratio)
    return (~(is_left & (torch.as_tensor(advantages).detach() < 0))).to(floats.dtype)


def k_stat(
    log_ratio: Array,
    *,
    sequence: Array,
    num_sequences: int,
    statistic: str = "k3",
    over: str = "mean",
    low: float = -math.inf,
    high: float = 0.01,
) -> torch.Tensor:
    """Keeps what has an estimate of KL(behavior || proximal) within [low, high], nats.  f32[M] -> f32[M] of 0 and 1

    statistic  "k1" (-log_ratio), "k2" (its square / 2) or "k3" (ratio - 1 - log_ratio), per token
    over       "token" judges each alone; "sum", "mean" and "max" judge whole sequences by theirs

    verl's rollout_rs (its k3 preset: mean, 0.01). For k1 verl takes bounds of a ratio, which then hold for 1 / ratio:
    its "0.5_5.0" is low = log 0.5, high = log 5 here and keeps ratios in [0.2, 2]. Raises KeyError for other names.
    """
    clamped = as_floats(log_ratio).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {
        "k1": lambda: -clamped,
        "k2": lambda: clamped.square() / 2,
        "k3": lambda: clamped.exp() - 1 - clamped,
    }[statistic]()
    if over != "token":
        reduce = {"sum": segment_sum, "mean": segment_mean, "max": segment_max}[over]
        values = spread(reduce(values.double(), sequence, num_sequences=num_sequences), sequence)
    return ((values >= low) & (values <= high)).to(clamped.dtype)


# -- normalisation -----------------------------------------------------------------------------------------------------


def self_norm(weights: Array, *, mean_weight: float | torch.Tensor) -> torch.Tensor:
    """weights / mean_weight: their mean over the batch becomes 1.  f32[M] -> f32[M]

    ``mean_weight`` is the whole batch's, over tokens or over sequences (``diagnostics.mean_weight`` of the all-reduced
    sums): one micro-batch's would make the gradient depend on the split. It removes what truncation took from the
    gradient's size, not the bias of its direction. verl's rollout_is_batch_normalize, after truncation.
    """
    return as_floats(weights).detach() / mean_weight
