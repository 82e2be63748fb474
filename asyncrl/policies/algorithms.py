"""What an algorithm is: advantage + loss + correction + aggregation + defaults + paper, put together from a row.

rows.py is the table. ``resolve`` turns the run file's [algorithm] into an ``Algorithm``: a row, parts of it exchanged
by name, options set. What the parts need of other models says which ones a run loads. Backends call ``objective`` and
know nothing else. A new algorithm is one row there, or "package.module:ROW" in the run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.policies import correction_chains
from asyncrl.policies.adaptive import vcpo_learning_rate
from asyncrl.policies.aggregation import total
from asyncrl.policies.catalogue import (
    ADVANTAGES,
    AGGREGATIONS,
    LOSSES,
    OF_BATCH,
    SCORED_BY,
    Advantage,
    Aggregation,
    Loss,
)
from asyncrl.policies.combinations import refuse_wrong_combinations
from asyncrl.policies.correction_chains import Chain, Evidence
from asyncrl.policies.diagnostics import (
    Sums,
    divergence_sums,
    effective_samples,
    mean_weight,
    metrics,
    sequence_sums,
    token_sums,
    version_sums,
    zero,
)
from asyncrl.policies.filters import overlong_penalty
from asyncrl.policies.kl import Penalty
from asyncrl.policies.losses.ratios import difference
from asyncrl.policies.option_ranges import refuse_wrong_numbers
from asyncrl.policies.part_options import set_option
from asyncrl.policies.segments import segment_mean, spread

Denominator = Literal["before", "after"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The response tokens of one micro-batch, M of them, prompt and observation tokens left out.

    logprobs           f32[M]  trainer logprobs at the sampling temperature, with gradient
    entropy            f32[M]  of the trainer's distribution, in nats
    behavior_logprobs, advantages, loss_weights  f32[M]
    is_fresh           bool[M]  the version being trained sampled the token and all before it
    staleness          i32[M]   version being trained - version that sampled the token
    sequence           i64[M]   which of the micro-batch's ``num_sequences`` documents the token belongs to, rising
    scores             f32[M] each: what other models say of the tokens, by name (packing.MicroBatch)
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    is_fresh: torch.Tensor
    staleness: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An algorithm by the names of its parts, or with parts of one's own, and where it departs from their defaults."""

    name: str
    paper: str
    advantage: str | Advantage
    loss: str | Loss
    aggregation: str | Aggregation
    correction: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A row put together. denominator: whether what a correction rejects still counts in the mean (aggregation.py).

    kl: how far from the reference model is too far; None without one.
    learning_rate_rule: of adaptive.vcpo_learning_rate, "sqrt" or "linear"; empty leaves the learning rate alone.
    """

    name: str
    paper: str
    advantage: Advantage
    loss: Loss
    aggregation: Aggregation
    correction: Chain
    denominator: Denominator = "before"
    entropy_coef: float = 0.0
    kl: Penalty | None = None
    overlong_tokens: int = 0
    max_response_tokens: int = 0
    masks_truncated: bool = False
    learning_rate_rule: str = ""

    def shaped(self, rewards: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Rewards with what DAPO takes off long answers, arXiv:2503.14476 eq. 13.  [B], response tokens [B] -> [B]"""
        if not self.overlong_tokens:
            return rewards
        penalty = overlong_penalty(lengths, max_tokens=self.max_response_tokens, cache_tokens=self.overlong_tokens)
        return rewards + penalty.astype(np.float64)

    @property
    def correction_name(self) -> str:
        return " + ".join(step.name for step in self.correction)

    @property
    def trusts_behavior(self) -> bool:
        """Whether data of older weights would be trained as if this policy had sampled it."""
        is_covered = self.loss.is_around_behavior or self.loss.is_supervised
        return correction_chains.is_uncorrected(self.correction) and not is_covered

    @property
    def advantage_scores(self) -> frozenset[str]:
        """Which of SCORED_BY the advantages are made from, so that they have to wait for the present weights."""
        is_in_reward = self.kl is not None and self.kl.place == "reward"
        named = {*self.advantage.needs, *(("prox_logprobs", "ref_logprobs") if is_in_reward else ())}
        return frozenset(SCORED_BY.keys() & named)

    @property
    def loss_scores(self) -> frozenset[str]:
        """Which of SCORED_BY the loss takes; the present policy's logprobs it has at hand."""
        named = {*self.loss.takes, *self.loss.needs, *(("ref_logprobs",) if self.kl else ())} - {"prox_logprobs"}
        if named & set(OF_BATCH):  # before the first micro-batch
            named.add("prox_logprobs")
        return frozenset(SCORED_BY.keys() & named)

    @property
    def models(self) -> frozenset[str]:
        """Models besides the policy: "critic", "reference", "teacher"."""
        return frozenset(SCORED_BY[name] for name in self.advantage_scores | self.loss_scores) - {"policy"}

    def objective(self, inputs: LossInputs) -> tuple[torch.Tensor, Sums]:
        """What to call backward() on (this micro-batch's part of the batch's loss), and sums for the metrics.

        Decoupled PPO (arXiv:2110.00641, 2505.24298): the proximal policy is the learner at the start of the step, so
        the correction covers staleness and engine mismatch at once, and the clip is a trust region around the learner.
        """
        prox_logprobs = inputs.logprobs.detach()
        values = {name: getattr(inputs, name) for name in LossInputs.__slots__}
        values |= dict(inputs.scores) | {"prox_logprobs": prox_logprobs}
        loss, clipped = self.loss(values)
        log_ratio = difference(prox_logprobs, inputs.behavior_logprobs)
        evidence = Evidence(
            log_ratio=log_ratio,
            sequence=inputs.sequence,
            num_sequences=inputs.num_sequences,
            advantages=self.loss.advantages_of(values),
            mean_weight=1.0,  # gradient_scale divides by it
        )
        weights = correction_chains.weights(self.correction, evidence)
        loss_weights = self._loss_weights(inputs, weights)
        objective = total(loss, weights * loss_weights)
        sums = token_sums(
            log_ratio=log_ratio,
            weights=weights,
            clipped=clipped,
            entropy=inputs.entropy.detach(),
            is_fresh=inputs.is_fresh,
            loss=objective.detach(),
        )
        sums += sequence_sums(
            logprobs=prox_logprobs,
            behavior_logprobs=inputs.behavior_logprobs,
            weights=weights,
            sequence=inputs.sequence,
            num_sequences=inputs.num_sequences,
        )
        sums += version_sums(log_ratio=log_ratio, weights=weights, clipped=clipped, staleness=inputs.staleness)
        if inputs.scores:
            sums += divergence_sums(prox_logprobs, scores=inputs.scores)
        if self.entropy_coef:
            objective = objective - self.entropy_coef * total(inputs.entropy, self._shares(loss_weights, weights))
        if self.kl is not None and self.kl.place == "loss":
            distance = self.kl(inputs.logprobs, inputs.scores["ref_logprobs"], inputs.behavior_logprobs)
            objective = objective + total(distance, self._shares(loss_weights, weights))
        return objective, sums

    def _loss_weights(self, inputs: LossInputs, weights: torch.Tensor) -> torch.Tensor:
        """With denominator "after" an answer's tokens share what it counts among those of them that are kept.

        Answers are never cut, so the micro-batch knows; what a whole batch keeps, ``gradient_scale`` does.
        """
        if self.denominator == "before" or self.aggregation.divides_by != "sequence":
            return inputs.loss_weights
        kept = segment_mean((weights != 0).float(), inputs.sequence, num_sequences=inputs.num_sequences)
        shares: torch.Tensor = inputs.loss_weights / spread(kept, inputs.sequence).clamp(min=1e-30)
        return shares.where(weights != 0, 0.0)

    def _shares(self, loss_weights: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What a token counts in the means of entropy and KL, so that ``gradient_scale`` divides them as it should.

        The correction does not weigh them, but where it says what the mean is over: under self_norm a mean by its
        weights, with denominator "after" one over the tokens it keeps.
        """
        if correction_chains.norm_level(self.correction) is not None:
            return loss_weights * weights
        return loss_weights * (weights != 0) if self.denominator == "after" else loss_weights

    def zero(self, device: torch.device) -> Sums:
        """The sums of no tokens."""
        return zero(device)

    def metrics(self, totals: Sums) -> Mapping[str, float]:
        """The batch's metrics from its totals."""
        made, scale = metrics(totals), self.gradient_scale(totals)
        return made if scale is None else made | {"loss": made["loss"] * scale}

    def gradient_scale(self, totals: Sums) -> float | None:
        """What the summed gradients of the whole batch are multiplied by before the step; None where it is 1.

        A divisor that is known only when every micro-batch was seen: the mean weight (self_norm), or the share of the
        tokens that were kept (denominator "after").
        """
        level = correction_chains.norm_level(self.correction)
        if level is not None:
            return 1.0 / mean_weight(totals, level=level)
        if self.denominator == "after" and self.aggregation.divides_by == "batch":
            return totals["tokens"] / max(totals["tokens"] - totals["rejected"], 1.0)
        return None

    def learning_rate_share(self, totals: Sums) -> float:
        """What the learning rate of this step is multiplied by, in [0, 1]: VCPO's share of the whole batch's ESS.

        Of the learning rate, because AdamW undoes a scale of the gradients. A backend asks once loss and norm are on
        the host: the sums are computed then, so nothing waits for them. A batch without tokens gets the whole rate.
        """
        if not self.learning_rate_rule or not totals["sequences"]:
            return 1.0
        effective = effective_samples(totals["sequence_ratio"], totals["sequence_ratio_squared"])
        return vcpo_learning_rate(1.0, ess_fraction=effective / totals["sequences"], rule=self.learning_rate_rule)


def resolve(
    row: Row,
    *,
    advantage: str = "",
    loss: str = "",
    aggregation: str = "",
    correction: str = "",
    denominator: Denominator = "before",
    entropy_coef: float = 0.0,
    kl: Penalty | None = None,
    options: Mapping[str, Any] | None = None,
) -> Algorithm:
    """``row`` with other parts and hyper-parameters.

    An option belongs to the one part that has it; ``part.option`` says which where several do. Raises ConfigError for
    names that do not exist and for combinations that are wrong, with the reason.
    """
    parts: dict[str, Any] = {what: _pick(what, getattr(row, what)) for what in _TABLES}
    chain = list(correction_chains.chain(row.correction))
    for key, value in parts["loss"].with_choices(row.options).items():
        set_option(parts, chain, key, value, name=row.name)
    given = {"advantage": advantage, "loss": loss, "aggregation": aggregation}
    parts |= {what: _pick(what, part) for what, part in given.items() if part}
    if correction:
        chain = list(correction_chains.chain(correction))
    for key, value in parts["loss"].with_choices(options or {}).items():
        set_option(parts, chain, key, value, name=row.name)
    refuse_wrong_numbers([*parts.values(), *chain])
    made = Algorithm(
        name=row.name,
        paper=row.paper,
        correction=tuple(chain),
        denominator=denominator,
        entropy_coef=entropy_coef,
        kl=kl,
        **parts,
    )
    refuse_wrong_combinations(made)
    return made


_TABLES: Mapping[str, Mapping[str, Any]] = {"advantage": ADVANTAGES, "loss": LOSSES, "aggregation": AGGREGATIONS}


def _pick(what: str, part: str | Advantage | Loss | Aggregation) -> Any:
    if not isinstance(part, str):
        return part
    if part not in _TABLES[what]:
        raise ConfigError(f"algorithm: {what} must be one of {', '.join(_TABLES[what])}, got {part!r}")
    return _TABLES[what][part]
