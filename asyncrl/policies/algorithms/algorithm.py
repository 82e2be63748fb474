"""An algorithm: advantage + loss + correction + aggregation, and what goes with any of them.

Backends call ``objective`` and know nothing else. ``spec.resolve`` makes one from the table and the run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from asyncrl.policies.advantages.advantage import Advantage
from asyncrl.policies.corrections import chains
from asyncrl.policies.corrections.chains import Chain
from asyncrl.policies.corrections.correction import CorrectionInputs
from asyncrl.policies.corrections.diagnostics import (
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
from asyncrl.policies.losses.aggregation import Aggregation, total
from asyncrl.policies.losses.kl import Penalty
from asyncrl.policies.losses.loss import Loss, LossInputs
from asyncrl.policies.losses.ratios import difference
from asyncrl.policies.losses.segments import segment_mean, spread
from asyncrl.policies.staleness.adaptive import vcpo_learning_rate

Denominator = Literal["before", "after"]

SCORED_BY: Final[Mapping[str, str]] = {
    "values": "critic",
    "ref_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "prox_logprobs": "policy",
}
"""Which model says it of every token, before the step (protocols.Backend.score)."""

OF_BATCH: Final = ("effective_fraction", "keep")
"""What a loss may ask for that is decided over the whole batch, from the policy's logprobs of it (apply_scores.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """denominator: whether what a correction rejects still counts in the mean (losses/aggregation.py).

    kl  the penalty for moving away from the reference model; None without one
    overlong_tokens     over that many tokens before max_response_tokens the reward falls by overlong_factor, and beyond
                        no further with overlong_floor (filters.overlong_penalty)
    masks_truncated     answers that were cut train nothing
    steps_per_batch     optimizer steps on each batch, each on its own part of it
    learning_rate_rule  of adaptive.vcpo_learning_rate, "sqrt" or "linear"; empty leaves the learning rate alone
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
    overlong_factor: float = 1.0
    overlong_floor: bool = True
    max_response_tokens: int = 0
    masks_truncated: bool = False
    learning_rate_rule: str = ""
    steps_per_batch: int = 1

    @property
    def correction_name(self) -> str:
        return " + ".join(step.name for step in self.correction)

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards have any influence on what it trains."""
        return bool({"advantages", "rewards"} & set(self.loss.inputs)) and self.advantage.name != "none"

    @property
    def trusts_behavior(self) -> bool:
        """Whether data of older weights would be trained as if this policy had sampled it."""
        is_covered = self.loss.is_around_behavior or self.loss.is_supervised
        return chains.is_uncorrected(self.correction) and not is_covered

    @property
    def advantage_scores(self) -> frozenset[str]:
        """Which of SCORED_BY the advantages are made from, so that they have to wait for the present weights."""
        is_in_reward = self.kl is not None and self.kl.place == "reward"
        named = {*self.advantage.inputs, *(("prox_logprobs", "ref_logprobs") if is_in_reward else ())}
        return frozenset(SCORED_BY.keys() & named)

    @property
    def loss_scores(self) -> frozenset[str]:
        """Which of SCORED_BY the loss asks for; the present policy's logprobs are at hand anyway."""
        named = {*self.loss.inputs, *(("ref_logprobs",) if self.kl else ())} - {"prox_logprobs"}
        if named & set(OF_BATCH) or self.keeps_prox:  # before the first micro-batch
            named.add("prox_logprobs")
        return frozenset(SCORED_BY.keys() & named)

    @property
    def keeps_prox(self) -> bool:
        """Whether the policy is scored before the first of several steps: the proximal policy of all of them."""
        return self.steps_per_batch > 1 and not self.loss.is_supervised

    @property
    def batch_scores(self) -> frozenset[str]:
        """What the loss asks for of the whole batch, beyond what other models say (apply_scores.py)."""
        return frozenset({*OF_BATCH, "rewards"} & set(self.loss.inputs))

    @property
    def models(self) -> frozenset[str]:
        """Models besides the policy: "critic", "reference", "teacher"."""
        return frozenset(SCORED_BY[name] for name in self.advantage_scores | self.loss_scores) - {"policy"}

    def objective(self, inputs: LossInputs) -> tuple[torch.Tensor, Sums]:
        """What to call backward() on (this micro-batch's part of the batch's loss), and sums for the metrics.

        Decoupled PPO (arXiv:2110.00641, 2505.24298): the proximal policy is the learner at the start of the batch, so
        the correction covers staleness and engine mismatch at once, and the clip is a trust region around the learner.
        """
        prox_logprobs = inputs.prox_logprobs
        loss, clipped = self.loss(inputs)
        log_ratio = difference(prox_logprobs, inputs.behavior_logprobs)
        correction_inputs = CorrectionInputs(
            log_ratio=log_ratio,
            sequence=inputs.sequence,
            num_sequences=inputs.num_sequences,
            advantages=self.loss.trained_advantages(inputs),
            mean_weight=1.0,  # gradient_scale divides by it
        )
        weights = chains.weights(self.correction, correction_inputs)
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
        """With denominator "after" the tokens of an answer that are kept share what the answer counts.

        Answers are never cut, so the micro-batch knows; what a whole batch keeps, ``gradient_scale`` does.
        """
        if self.denominator == "before" or self.aggregation.divides_by != "sequence":
            return inputs.loss_weights
        kept = segment_mean((weights != 0).float(), inputs.sequence, num_sequences=inputs.num_sequences)
        shares: torch.Tensor = inputs.loss_weights / spread(kept, inputs.sequence).clamp(min=1e-30)
        return shares.where(weights != 0, 0.0)

    def _shares(self, loss_weights: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What a token counts in the means of entropy and KL, so that ``gradient_scale`` divides them as it should.

        The correction does not weigh them, except where it says what the mean is over: under self_norm a mean by its
        weights, with denominator "after" one over the tokens it keeps.
        """
        if chains.norm_level(self.correction) is not None:
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
        level = chains.norm_level(self.correction)
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
