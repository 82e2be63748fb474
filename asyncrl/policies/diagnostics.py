"""What the learner reports of a batch besides its loss, as sums that add up over micro-batches and ranks.

A ratio of means over micro-batches is wrong when they differ in size; sums are not. ``Sums`` adds, all-reduces as two
flat vectors, and ``metrics`` turns the totals into the names of the metrics schema.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SUMS = (
    "loss",
    "tokens",
    "entropy",
    "weight",
    "weight_squared",
    "clipped",
    "rejected",
    "k1",
    "k3",
    "difference",
    "fresh_tokens",
    "fresh_difference",
    "fresh_k3",
)
MAXIMA = ("ratio", "difference", "fresh_difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """sums f64[len(SUMS)], maxima f64[len(MAXIMA)]: element-wise sum and maximum over any set of tokens."""

    sums: torch.Tensor
    maxima: torch.Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))


def zero(device: torch.device | str = "cpu") -> Sums:
    return Sums(
        sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
        maxima=torch.zeros(len(MAXIMA), dtype=torch.float64, device=device),
    )


def token_sums(
    *,
    log_ratio: torch.Tensor,
    weights: torch.Tensor,
    clipped: torch.Tensor,
    entropy: torch.Tensor,
    is_fresh: torch.Tensor,
    loss: torch.Tensor,
) -> Sums:
    """Sums over M response tokens.  f32[M] each, ``loss`` the micro-batch's scalar part of the batch loss.

    log_ratio = trainer - behavior logprobs. Where ``is_fresh`` the learner's version sampled the token and all before
    it: what differs there is the engine's numerics, not staleness.
    """
    if log_ratio.numel() == 0:
        return zero(log_ratio.device)
    log_ratio = log_ratio.double()
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    difference = log_ratio.abs()
    k3 = ratio - log_ratio - 1.0  # of KL(behavior || trainer), arXiv: joschu.net/blog/kl-approx.html
    fresh = is_fresh.double()
    weights = weights.double()
    sums = torch.stack(
        [
            loss.double(),
            log_ratio.new_tensor(float(log_ratio.numel())),
            entropy.double().sum(),
            weights.sum(),
            weights.square().sum(),
            clipped.double().sum(),
            (weights == 0).double().sum(),
            -log_ratio.sum(),
            k3.sum(),
            difference.sum(),
            fresh.sum(),
            (difference * fresh).sum(),
            (k3 * fresh).sum(),
        ]
    )
    maxima = torch.stack([ratio.max(), difference.max(), (difference * fresh).max()])
    return Sums(sums=sums, maxima=maxima)


def metrics(totals: Sums) -> dict[str, float]:
    """The batch's metrics from its totals.

    offpolicy/ess             effective sample size of the token weights, as a fraction of the tokens, in (0, 1]
    offpolicy/k1, k3          estimates of KL(behavior || trainer) per token, nats
    mismatch/*                |trainer - behavior| logprob; fresh_*: of tokens the learner's own version sampled
    """
    values = dict(zip(SUMS, totals.sums.tolist(), strict=True))
    maxima = dict(zip(MAXIMA, totals.maxima.tolist(), strict=True))
    tokens, fresh = max(values["tokens"], 1.0), max(values["fresh_tokens"], 1.0)
    result = {
        "loss": values["loss"],
        "entropy": values["entropy"] / tokens,
        "offpolicy/ess": values["weight"] ** 2 / (max(values["weight_squared"], 1e-30) * tokens),
        "offpolicy/k1": values["k1"] / tokens,
        "offpolicy/k3": values["k3"] / tokens,
        "offpolicy/ratio_max": maxima["ratio"],
        "offpolicy/clip_fraction": values["clipped"] / tokens,
        "offpolicy/masked_fraction": values["rejected"] / tokens,
        "mismatch/mean": values["difference"] / tokens,
        "mismatch/max": maxima["difference"],
    }
    if values["fresh_tokens"]:
        result |= {
            "mismatch/fresh_mean": values["fresh_difference"] / fresh,
            "mismatch/fresh_max": maxima["fresh_difference"],
            "mismatch/fresh_k3": values["fresh_k3"] / fresh,
        }
    return result
