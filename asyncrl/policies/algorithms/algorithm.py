"""An algorithm: advantage, loss, correction and aggregation, plus options that apply to any of them.

Backends only call its methods, chiefly ``objective``. ``spec.resolve`` builds an algorithm from the table and the run
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.advantages.advantage import Advantage, AdvantageInputs
from asyncrl.policies.advantages.returns import whiten
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
from asyncrl.policies.learning_rate import vcpo_learning_rate
from asyncrl.policies.losses.aggregation import Aggregation, total
from asyncrl.policies.losses.kl import Penalty
from asyncrl.policies.losses.loss import Loss, LossInputs
from asyncrl.policies.losses.ratios import difference
from asyncrl.policies.losses.segments import segment_mean, spread

Denominator = Literal["before", "after"]

COMPUTED_BY: Final[Mapping[str, str]] = {
    "values": "critic",
    "ref_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "teacher_likeliest": "teacher",
    "prox_logprobs": "policy",
}
"""Which model computes each model output, before the step (Backend.forward)."""

OF_BATCH: Final = ("effective_fraction", "keep")
"""Loss inputs that are computed over the whole batch, from the policy's logprobs (model_outputs.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The components and options of one algorithm.

    whitening           deviation by which the batch's advantages are whitened; empty: not whitened (``advantages``)
    denominator         whether tokens that a correction rejects still count in the mean (losses/aggregation.py)
    kl                  penalty for moving away from the reference model; None for no penalty
    overlong_tokens     over this many tokens before max_response_tokens, the reward falls by overlong_factor;
                        with overlong_floor it falls no further beyond (filters.overlong_penalty)
    masks_truncated     whether truncated answers are masked, so that they train nothing
    steps_per_batch     optimizer steps on each batch, one on each mini-batch
    learning_rate_rule  rule of vcpo_learning_rate, "sqrt" or "linear"; empty keeps the learning rate
    """

    name: str
    paper: str
    advantage: Advantage
    loss: Loss
    aggregation: Aggregation
    correction: Chain
    whitening: Literal["", "unbiased", "biased"] = ""
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
        """Whether rewards influence training at all."""
        return bool({"advantages", "rewards"} & set(self.loss.inputs)) and self.advantage.name != "none"

    @property
    def trusts_behavior(self) -> bool:
        """Whether data of older weights is trained as if the current policy had sampled it."""
        is_covered = self.loss.is_around_behavior or self.loss.is_supervised
        return chains.is_uncorrected(self.correction) and not is_covered

    @property
    def outputs_for_advantage(self) -> frozenset[str]:
        """The outputs in COMPUTED_BY that the advantages need, so that they must wait for the current weights."""
        is_in_reward = self.kl is not None and self.kl.place == "reward"
        named = {*self.advantage.inputs, *(("prox_logprobs", "ref_logprobs") if is_in_reward else ())}
        return frozenset(COMPUTED_BY.keys() & named)

    @property
    def outputs_for_loss(self) -> frozenset[str]:
        """The outputs in COMPUTED_BY that the loss needs; the current policy's logprobs are available without a
        pass."""
        named = {*self.loss.inputs, *(("ref_logprobs",) if self.kl else ())} - {"prox_logprobs"}
        if named & set(OF_BATCH) or self.keeps_prox:  # computed before the first micro-batch
            named.add("prox_logprobs")
        return frozenset(COMPUTED_BY.keys() & named)

    @property
    def keeps_prox(self) -> bool:
        """Whether logprobs are computed once, before several optimizer steps; they are those of the proximal policy."""
        return self.steps_per_batch > 1 and not self.loss.is_supervised

    @property
    def batch_inputs(self) -> frozenset[str]:
        """Inputs of the loss that are computed over the whole batch, besides outputs of models (model_outputs.py)."""
        return frozenset({*OF_BATCH, "rewards"} & set(self.loss.inputs))

    @property
    def needs_logits(self) -> bool:
        """Whether the loss is over the whole vocabulary."""
        return "logits" in self.loss.inputs

    @property
    def models(self) -> frozenset[str]:
        """Models besides the policy that the algorithm needs: "critic", "reference", "teacher"."""
        return frozenset(COMPUTED_BY[name] for name in self.outputs_for_advantage | self.outputs_for_loss) - {"policy"}

    def advantages(self, batch: AdvantageInputs) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the advantage of each response token, and the returns that a critic learns, if any.  f32[M] each

        With ``whitening``, any estimator's advantages become (A - mean) / sqrt(variance + 1e-8) over the trained tokens
        of the whole batch, all data-parallel ranks included; the returns stay as they are. As slime's
        --normalize-advantages and verl's masked_whiten, both with the unbiased variance.
        """
        made, returns = self.advantage.with_returns(batch)
        if not self.whitening:
            return made, returns
        return whiten(made.astype(np.float64), batch.is_trained, std=self.whitening).astype(np.float32), returns

    def objective(self, inputs: LossInputs) -> tuple[torch.Tensor, Sums]:
        """Return the tensor to call backward() on (this micro-batch's part of the batch loss), and sums for metrics.

        As in decoupled PPO (arXiv:2110.00641, 2505.24298), the proximal policy is the learner at the start of the
        batch. The correction therefore covers both staleness and engine mismatch, and the clip is a trust region
        around the learner.
        """
        prox_logprobs = inputs.prox_logprobs
        loss, clipped = self.loss(inputs)
        log_ratio = difference(prox_logprobs, inputs.behavior_logprobs)
        correction_inputs = CorrectionInputs(
            log_ratio=log_ratio,
            sequence=inputs.sequence,
            num_sequences=inputs.num_sequences,
            advantages=self.loss.trained_advantages(inputs),
            behavior_logprobs=inputs.behavior_logprobs,
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
        if inputs.model_outputs:
            sums += divergence_sums(prox_logprobs, model_outputs=inputs.model_outputs)
        if self.entropy_coef:
            objective = objective - self.entropy_coef * total(inputs.entropy, self._shares(loss_weights, weights))
        if self.kl is not None and self.kl.place == "loss":
            distance = self.kl(inputs.logprobs, inputs.model_outputs["ref_logprobs"], inputs.behavior_logprobs)
            objective = objective + total(distance, self._shares(loss_weights, weights))
        return objective, sums

    def _loss_weights(self, inputs: LossInputs, weights: torch.Tensor) -> torch.Tensor:
        """Return the loss weights; with denominator "after", the kept tokens of a sequence share the sequence's weight.

        A sequence is never split, so its micro-batch is enough. A rollout's parts are sequences of their own: the kept
        tokens of a part share that part's weight. ``gradient_scale`` handles means over the whole batch.
        """
        if self.denominator == "before" or self.aggregation.divides_by != "sequence":
            return inputs.loss_weights
        kept = segment_mean((weights != 0).float(), inputs.sequence, num_sequences=inputs.num_sequences)
        shares: torch.Tensor = inputs.loss_weights / spread(kept, inputs.sequence).clamp(min=1e-30)
        return shares.where(weights != 0, 0.0)

    def _shares(self, loss_weights: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weight of each token in the means of entropy and KL, before ``gradient_scale`` divides them.

        The correction does not weight entropy and KL unless it defines what the mean is over: with self_norm they are
        weighted by its weights, and with denominator "after" only the kept tokens count.
        """
        if chains.norm_level(self.correction) is not None:
            return loss_weights * weights
        return loss_weights * (weights != 0) if self.denominator == "after" else loss_weights

    def zero(self, device: torch.device) -> Sums:
        """Return the sums over no tokens."""
        return zero(device)

    def metrics(self, totals: Sums) -> Mapping[str, float]:
        """Return the metrics of the batch from its totals."""
        made, scale = metrics(totals), self.gradient_scale(totals)
        return made if scale is None else made | {"loss": made["loss"] * scale}

    @property
    def scales_gradients(self) -> bool:
        """Whether the gradients of a batch are multiplied by ``gradient_scale`` after they are summed."""
        divides_by_kept = self.denominator == "after" and self.aggregation.divides_by == "batch"
        return divides_by_kept or chains.norm_level(self.correction) is not None

    def gradient_scale(self, totals: Sums) -> float | None:
        """Return the factor for the summed gradients of the whole batch before the step; None if it is 1.

        The divisor is known only after all micro-batches: the mean weight (self_norm), or the share of kept tokens
        (denominator "after").
        """
        if not self.scales_gradients:
            return None
        level = chains.norm_level(self.correction)
        if level is not None:
            return 1.0 / mean_weight(totals, level=level)
        return totals["tokens"] / max(totals["tokens"] - totals["rejected"], 1.0)

    def learning_rate_share(self, totals: Sums) -> float:
        """Return the factor for the learning rate of this step, in [0, 1]: VCPO's share, from the ESS of the batch.

        It scales the learning rate because AdamW cancels a scale of the gradients. A backend calls this once loss and
        norm are on the host; the sums are computed by then, so nothing waits for them. A batch without tokens gets 1.
        """
        if not self.learning_rate_rule or not totals["sequences"]:
            return 1.0
        effective = effective_samples(totals["sequence_ratio"], totals["sequence_ratio_squared"])
        return vcpo_learning_rate(1.0, ess_fraction=effective / totals["sequences"], rule=self.learning_rate_rule)
