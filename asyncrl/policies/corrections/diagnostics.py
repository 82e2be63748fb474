"""Diagnostics of a batch besides its loss, kept as sums that add up over micro-batches and ranks.

Averaging ratios of micro-batches is wrong if they differ in size; adding sums is right. ``Sums`` can be added and
all-reduced as two flat vectors, and ``metrics`` turns the totals into the names of the metrics schema. There are three
parts, added as needed:

  token_sums      the loss, the weights, and the divergence per token
  sequence_sums   values of whole sequences: ratios, chi-squared, perplexities
  version_sums    a few of these numbers by staleness, in buckets that double

Each part leaves the entries of the others at 0 (at the lowest value in maxima), so the parts add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from asyncrl.policies.corrections.correction import geometric_ratio, ratio, sequence_ratio
from asyncrl.policies.losses.ratios import MAX_LOG_RATIO, difference, finite, log_ratio
from asyncrl.policies.losses.segments import Array, as_floats, segment_sum

BUCKETS: Final = (0, 1, 2, 4, 8, 16)
"""Lowest staleness of each bucket of the breakdown; the last bucket is open-ended."""

_BUCKET_SUMS: Final = ("tokens", "weight", "weight_squared", "clipped", "rejected", "k3", "difference")

_TOKEN_SUMS: Final = (
    "loss",
    "tokens",
    "entropy",
    "weight",
    "weight_squared",
    "clipped",
    "rejected",
    "truncated",
    "k1",
    "k3",
    "difference",
    "fresh_tokens",
    "fresh_difference",
    "fresh_k3",
)

_BARELY_LESS: Final = 1 - 1e-5
"""Weights are float32: a weight that is below its ratio only by rounding was not truncated."""

_DIVERGENCE_SUMS: Final = ("ref_tokens", "ref_k3", "teacher_tokens", "teacher_k3")

_SEQUENCE_SUMS: Final = (
    "sequences",
    "rejected_sequences",
    "sequence_weight",
    "sequence_ratio",
    "sequence_ratio_squared",
    "ratio_squared",
    "ratio_error",
    "k3_reverse",
    "sampled_entropy",
    "js",
    "trainer_perplexity",
    "behavior_perplexity",
    "perplexity_ratio",
    "trainer_nll",
    "behavior_nll",
    "nll_difference",
    "nll_distance",
)

SUMS: Final = (
    *_TOKEN_SUMS,
    *_SEQUENCE_SUMS,
    *(f"{name}@{low}" for name in _BUCKET_SUMS for low in BUCKETS),
    *_DIVERGENCE_SUMS,
)
MAXIMA: Final = ("ratio", "difference", "fresh_difference", "inverse_ratio", "sequence_ratio", "nll_rise", "nll_fall")
_LOWEST: Final = {"nll_rise": -torch.inf, "nll_fall": -torch.inf}  # maxima that may be negative; the others start at 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """sums f64[len(SUMS)], maxima f64[len(MAXIMA)]: element-wise sum and maximum over any set of tokens."""

    sums: torch.Tensor
    maxima: torch.Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    def __getitem__(self, name: str) -> float:
        """Return the entry of SUMS called ``name``."""
        return float(self.sums[SUMS.index(name)])


def zero(device: torch.device | str = "cpu") -> Sums:
    return _of({}, {}, device)


def _of(sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor], device: torch.device | str) -> Sums:
    """Put the scalars under their names; the other entries are 0, or the lowest value of a maximum.

    Copies nothing from the host, because the host would wait for the device.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return Sums(
        sums=torch.stack([sums[name].double() if name in sums else nothing for name in SUMS]),
        maxima=torch.stack(
            [maxima[name].double() if name in maxima else nothing + _LOWEST.get(name, 0.0) for name in MAXIMA]
        ),
    )


# -- sums over one micro-batch -----------------------------------------------------------------------------------------


def token_sums(
    *,
    log_ratio: torch.Tensor,
    weights: torch.Tensor,
    clipped: torch.Tensor,
    entropy: torch.Tensor,
    is_fresh: torch.Tensor,
    loss: torch.Tensor,
) -> Sums:
    """Sum over M response tokens.  f32[M] each; ``loss`` is the micro-batch's scalar part of the batch loss

    log_ratio = trainer - behavior logprobs. Where ``is_fresh``, the learner's version sampled every token of the
    sequence, so a difference comes from the engine's numerics, not from staleness.
    """
    if log_ratio.numel() == 0:
        return zero(log_ratio.device)
    log_ratio = log_ratio.double()
    ratios, distance, k3 = ratio(log_ratio), log_ratio.abs(), k3_of(log_ratio)
    fresh, weights = is_fresh.double(), weights.double()
    fresh_difference = distance.where(is_fresh.bool(), 0.0)  # not a product: inf x 0 is nan
    sums = {
        "loss": loss,
        "tokens": torch.ones_like(log_ratio).sum(),
        "entropy": entropy.double().sum(),
        "weight": weights.sum(),
        "weight_squared": weights.square().sum(),
        "clipped": clipped.double().sum(),
        "rejected": (weights == 0).double().sum(),
        "truncated": ((weights > 0) & (weights < ratios * _BARELY_LESS)).double().sum(),
        "k1": -log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(),
        "k3": k3.sum(),
        "difference": distance.sum(),
        "fresh_tokens": fresh.sum(),
        "fresh_difference": fresh_difference.sum(),
        "fresh_k3": (k3 * fresh).sum(),
    }
    maxima = {
        "ratio": ratios.max(),
        "difference": distance.max(),
        "fresh_difference": fresh_difference.max(),
        "inverse_ratio": ratio(-log_ratio).max(),
    }
    return _of(sums, maxima, log_ratio.device)


def divergence_sums(logprobs: torch.Tensor, *, model_outputs: Mapping[str, torch.Tensor]) -> Sums:
    """Sum the k3 of M tokens to the reference and to the teacher, as far as ``model_outputs`` has them.  f32[M] each"""
    sums: dict[str, torch.Tensor] = {}
    for model in ("ref", "teacher"):
        if (other := model_outputs.get(f"{model}_logprobs")) is not None:
            k3 = k3_of(log_ratio(other.double(), logprobs.double()))
            sums |= {f"{model}_tokens": torch.ones_like(k3).sum(), f"{model}_k3": k3.sum()}
    return _of(sums, {}, logprobs.device)


def sequence_sums(
    *, logprobs: Array, behavior_logprobs: Array, weights: Array, sequence: Array, num_sequences: int
) -> Sums:
    """Sum over the sequences of a micro-batch.  f32[M] trainer logprobs, behavior logprobs and correction weights

    Sequences without response tokens are left out. The weight of a sequence is the mean of its tokens' weights; its
    ratio is the untruncated product of their ratios.
    """
    logprobs, behavior = as_floats(logprobs).detach().double(), as_floats(behavior_logprobs).double()
    if logprobs.numel() == 0:
        return zero(logprobs.device)
    weights, log_ratio = as_floats(weights).double(), difference(logprobs, behavior)

    def per_sequence(values: torch.Tensor) -> torch.Tensor:
        return segment_sum(values, sequence, num_sequences=num_sequences)

    counts = per_sequence(torch.ones_like(weights))
    is_there = counts > 0  # kept as a mask: indexing rows with it would make the host wait for the device

    def mean(values: torch.Tensor) -> torch.Tensor:
        return per_sequence(values) / counts.clamp(min=1)

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.double().where(is_there, 0.0).sum()

    def largest(values: torch.Tensor) -> torch.Tensor:
        return values.where(is_there, -torch.inf).max()

    ratios = sequence_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences)
    trainer_nll, behavior_nll = mean(-logprobs), mean(-behavior)
    rise = -geometric_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences).log()  # bounded by the clamp
    sums = {
        "sequences": total(is_there),
        "rejected_sequences": total(per_sequence((weights != 0).double()) == 0),
        "sequence_weight": total(mean(weights)),
        "sequence_ratio": total(ratios),
        "sequence_ratio_squared": total(ratios.square()),
        "ratio_squared": ratio(log_ratio).square().sum(),
        "ratio_error": ratio(log_ratio.abs()).sum(),
        "k3_reverse": k3_of(-log_ratio).sum(),
        "sampled_entropy": importance_entropy(logprobs, behavior).sum(),
        "js": js_of(log_ratio).sum(),
        "trainer_perplexity": total(ratio(trainer_nll)),
        "behavior_perplexity": total(ratio(behavior_nll)),
        "perplexity_ratio": total(ratio(rise)),
        "trainer_nll": total(trainer_nll),
        "behavior_nll": total(behavior_nll),
        "nll_difference": total(rise),
        "nll_distance": total(rise.abs()),
    }
    maxima = {"sequence_ratio": largest(ratios), "nll_rise": largest(rise), "nll_fall": largest(-rise)}
    return _of(sums, maxima, logprobs.device)


def version_sums(*, log_ratio: Array, weights: Array, clipped: Array, staleness: Array) -> Sums:
    """Sum over M tokens by staleness, in versions behind the trained one.  f32[M], f32[M], bool[M], i32[M]"""
    log_ratio, weights = as_floats(log_ratio).detach().double(), as_floats(weights).double()
    behind = torch.as_tensor(staleness)
    bucket = torch.stack([behind >= low for low in BUCKETS[1:]]).sum(0)  # no edges to copy
    columns = {
        "tokens": torch.ones_like(weights),
        "weight": weights,
        "weight_squared": weights.square(),
        "clipped": torch.as_tensor(clipped).double(),
        "rejected": (weights == 0).double(),
        "k3": k3_of(log_ratio),
        "difference": log_ratio.abs(),
    }
    totals = {name: column.new_zeros(len(BUCKETS)).index_add(0, bucket, column) for name, column in columns.items()}
    sums = {f"{name}@{low}": total[i] for name, total in totals.items() for i, low in enumerate(BUCKETS)}
    return _of(sums, {}, log_ratio.device)


def k3_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ratio - 1 - log_ratio: for samples of the denominator's policy, KL(denominator || numerator); >= 0.

    Source: joschu.net/blog/kl-approx.html. Negate the argument for the sum that NeMo-RL calls policy_kl_error.
    """
    return ratio(log_ratio) - log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - 1.0


def js_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence of trainer and behavior: the mean of the k3 of each to their mixture.

    f64[M] -> f64[M]. As in NeMo-RL's js_divergence_error, which treats the samples as samples of the mixture; this is
    nearly right while the two policies are close.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mixture = torch.log1p(bounded.exp()) - math.log(2.0)  # log ratio to behavior
    return (k3_of(-mixture) + k3_of(bounded - mixture)) / 2


# -- metrics from the totals -------------------------------------------------------------------------------------------


def effective_samples(total: float, total_squared: float) -> float:
    """Return Kish's effective sample size (sum w)^2 / sum w^2, a count in [1, n]; 0 if all weights are 0.

    Divided by n it is a fraction, as PipelineRL (arXiv:2509.19128), VCPO and verl log it.
    """
    return total**2 / total_squared if total_squared > 0 else 0.0


def mean_weight(totals: Sums, *, level: str = "token") -> float:
    """Return the batch's mean correction weight, over tokens or over sequences: the divisor of self_norm."""
    count, total = {"token": ("tokens", "weight"), "sequence": ("sequences", "sequence_weight")}[level]
    return totals[total] / max(totals[count], 1.0) or 1.0


def importance_entropy(logprobs: Array, behavior_logprobs: Array) -> torch.Tensor:
    """Estimate the entropy per token of the trainer's policy from behavior samples: -ratio x logprob.  f32[M] -> f32[M]

    It is NeMo-RL's approx_entropy. Compared with the exact entropy of the backends, it shows what the samples miss.
    """
    logprobs = as_floats(logprobs).detach()
    return -ratio(difference(logprobs, behavior_logprobs)) * finite(logprobs)


def metrics(totals: Sums) -> dict[str, float]:
    """Return the batch's metrics from its totals; sequence and version metrics only if they were summed.

    offpolicy/ess             effective sample size of the correction's token weights, as a fraction of the tokens, in
                              [0, 1]; 0 if all are rejected. It is 1 without a correction, even if the loss itself
                              weights by the ratio; see sequence_ess and chi2_token for the ratios
    offpolicy/k1, k3          estimates of KL(behavior || trainer) per token, nats
    mismatch/*                |trainer - behavior| logprob; fresh_*: sequences sampled only by the learner's version
    kl, teacher_kl            k3 per token to the reference and to the teacher, if there is one
    """
    values = dict(zip(SUMS, totals.sums.tolist(), strict=True))
    maxima = dict(zip(MAXIMA, totals.maxima.tolist(), strict=True))
    tokens, fresh = max(values["tokens"], 1.0), max(values["fresh_tokens"], 1.0)
    result = {
        "loss": values["loss"],
        "entropy": values["entropy"] / tokens,
        "offpolicy/ess": effective_samples(values["weight"], values["weight_squared"]) / tokens,
        "offpolicy/k1": values["k1"] / tokens,
        "offpolicy/k3": values["k3"] / tokens,
        "offpolicy/ratio_max": maxima["ratio"],
        "offpolicy/clip_fraction": values["clipped"] / tokens,
        "offpolicy/masked_fraction": values["rejected"] / tokens,
        "offpolicy/truncated_fraction": values["truncated"] / tokens,
        "mismatch/mean": values["difference"] / tokens,
        "mismatch/max": maxima["difference"],
    }
    if values["fresh_tokens"]:
        result |= {
            "mismatch/fresh_mean": values["fresh_difference"] / fresh,
            "mismatch/fresh_max": maxima["fresh_difference"],
            "mismatch/fresh_k3": values["fresh_k3"] / fresh,
        }
    for name, model in (("kl", "ref"), ("teacher_kl", "teacher")):
        if values[f"{model}_tokens"]:
            result[name] = values[f"{model}_k3"] / values[f"{model}_tokens"]
    if values["sequences"]:
        result |= _sequence_metrics(values, maxima)
    return result | _version_metrics(values)


def _sequence_metrics(values: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of sequences, from token_sums and sequence_sums of the same tokens.

    offpolicy/ess_count               effective sample size of the token weights, as a count
    offpolicy/sequence_ess*           the same for untruncated sequence ratios; VCPO scales the learning rate with it
    offpolicy/chi2_token, _sequence   mean squared ratio - 1: the variance of an untruncated weight
    offpolicy/perplexity_*, nll_*     of whole sequences, averaged over sequences as in verl
    mismatch/ratio_error              mean exp|difference|, 1 if nothing differs; NeMo-RL warns above 1.05
    """
    tokens, sequences = max(values["tokens"], 1.0), values["sequences"]
    effective = effective_samples(values["sequence_ratio"], values["sequence_ratio_squared"])
    return {
        "offpolicy/ess_count": effective_samples(values["weight"], values["weight_squared"]),
        "offpolicy/sequence_ess": effective / sequences,
        "offpolicy/sequence_ess_count": effective,
        "offpolicy/sequence_ratio_max": maxima["sequence_ratio"],
        "offpolicy/masked_sequences": values["rejected_sequences"] / sequences,
        "offpolicy/ratio_min": 1.0 / max(maxima["inverse_ratio"], 1e-30),
        "offpolicy/chi2_token": values["ratio_squared"] / tokens - 1.0,
        "offpolicy/chi2_sequence": values["sequence_ratio_squared"] / sequences - 1.0,
        "offpolicy/k3_reverse": values["k3_reverse"] / tokens,
        "offpolicy/entropy": values["sampled_entropy"] / tokens,
        "offpolicy/js": values["js"] / tokens,
        "offpolicy/perplexity_trainer": values["trainer_perplexity"] / sequences,
        "offpolicy/perplexity_behavior": values["behavior_perplexity"] / sequences,
        "offpolicy/perplexity_ratio": values["perplexity_ratio"] / sequences,
        "offpolicy/nll_trainer": values["trainer_nll"] / sequences,
        "offpolicy/nll_behavior": values["behavior_nll"] / sequences,
        "offpolicy/nll_difference": values["nll_difference"] / sequences,
        "offpolicy/nll_distance": values["nll_distance"] / sequences,
        "offpolicy/nll_difference_max": maxima["nll_rise"],
        "offpolicy/nll_difference_min": -maxima["nll_fall"],
        "mismatch/ratio_error": values["ratio_error"] / tokens,
    }


def _version_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return offpolicy/staleness_<lowest>/* for the tokens in each staleness bucket; empty buckets are left out."""
    result: dict[str, float] = {}
    for low in BUCKETS:
        of = {name: values[f"{name}@{low}"] for name in _BUCKET_SUMS}
        if of["tokens"]:
            shares = {
                "tokens": of["tokens"],
                "ess": effective_samples(of["weight"], of["weight_squared"]) / of["tokens"],
                "weight": of["weight"] / of["tokens"],
                "clip_fraction": of["clipped"] / of["tokens"],
                "masked_fraction": of["rejected"] / of["tokens"],
                "k3": of["k3"] / of["tokens"],
                "mismatch": of["difference"] / of["tokens"],
            }
            result |= {f"offpolicy/staleness_{low}/{name}": value for name, value in shares.items()}
    return result
