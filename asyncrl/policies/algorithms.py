"""The table of algorithms: advantage + loss + correction + aggregation + defaults + paper, one row each.

``resolve`` turns the run file's [algorithm] into an ``Algorithm``: a row, parts of it exchanged by name, options set.
Backends call ``objective`` on it and know nothing else. A new algorithm is one row here, or "package.module:ROW" in the
run file. Which to choose: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.policies import correction_chains
from asyncrl.policies.adaptive import vcpo_learning_rate
from asyncrl.policies.aggregation import total
from asyncrl.policies.catalogue import ADVANTAGES, AGGREGATIONS, CHOICES, LOSSES, Advantage, Aggregation, Loss
from asyncrl.policies.correction_chains import Chain, Evidence, Step
from asyncrl.policies.diagnostics import Sums, effective_samples, mean_weight, sequence_sums, token_sums, version_sums
from asyncrl.policies.filters import overlong_penalty

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
        is_covered = self.loss.is_coupled or self.loss.is_supervised
        return correction_chains.is_uncorrected(self.correction) and not is_covered

    def objective(self, inputs: LossInputs) -> tuple[torch.Tensor, Sums]:
        """What to call backward() on (this micro-batch's part of the batch's loss), and sums for the metrics.

        Decoupled PPO (arXiv:2110.00641, 2505.24298): the proximal policy is the learner at the start of the step, so
        the correction covers staleness and engine mismatch at once, and the clip is a trust region around the learner.
        """
        prox_logprobs = inputs.logprobs.detach()
        values = {name: getattr(inputs, name) for name in LossInputs.__slots__} | {"prox_logprobs": prox_logprobs}
        loss, clipped = self.loss(values)
        log_ratio = prox_logprobs - inputs.behavior_logprobs
        evidence = Evidence(
            log_ratio=log_ratio,
            sequence=inputs.sequence,
            num_sequences=inputs.num_sequences,
            advantages=inputs.advantages,
            mean_weight=1.0,  # gradient_scale divides by it
        )
        weights = correction_chains.weights(self.correction, evidence)
        objective = total(loss, weights * inputs.loss_weights)
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
        if self.entropy_coef:
            objective = objective - self.entropy_coef * total(inputs.entropy, inputs.loss_weights)
        return objective, sums

    def gradient_scale(self, totals: Sums) -> float | None:
        """What the summed gradients of the whole batch are multiplied by before the step; None where it is 1.

        A divisor that is known only when every micro-batch was seen: the mean weight (self_norm), or the share of the
        tokens that were kept (denominator "after").
        """
        level = correction_chains.norm_level(self.correction)
        if level is not None:
            return 1.0 / mean_weight(totals, level=level)
        if self.denominator == "after":
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


ALGORITHMS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            name="grpo",
            paper="arXiv:2402.03300, token mean of arXiv:2503.14476",
            advantage="grpo",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="dapo",
            paper="arXiv:2503.14476; filters and overlong_tokens of [algorithm] add the rest",
            advantage="grpo",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
            options={"clip_high": 0.28},
        ),
        Row(
            name="dr_grpo",
            paper="arXiv:2503.20783",
            advantage="dr_grpo",
            loss="ppo_clip",
            aggregation="seq_mean_token_sum_norm",
            correction="tis_token",
        ),
        Row(
            name="gspo",
            paper="arXiv:2507.18071",
            advantage="grpo",
            loss="gspo",
            aggregation="seq_mean_token_mean",
            correction="tis_token",
        ),
        Row(
            name="cispo",
            paper="arXiv:2506.13585: the capped ratio to the behavior policy is the correction",
            advantage="grpo",
            loss="cispo",
            aggregation="token_mean",
            correction="none",
        ),
        Row(
            name="rloo",
            paper="arXiv:2402.14740",
            advantage="rloo",
            loss="reinforce",
            aggregation="seq_mean_token_sum",
            correction="tis_token",
        ),
        Row(
            name="reinforce_pp",
            paper="arXiv:2501.03262",
            advantage="reinforce_pp",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="reinforce_pp_baseline",
            paper="arXiv:2501.03262, the variant with a baseline",
            advantage="reinforce_pp_baseline",
            loss="ppo_clip",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="gpg",
            paper="arXiv:2504.02546",
            advantage="gpg",
            loss="reinforce",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="topr",
            paper="arXiv:2503.14286",
            advantage="reinforce",
            loss="topr",
            aggregation="seq_mean_token_sum",
            correction="none",
        ),
        Row(
            name="sapo",
            paper="arXiv:2511.20347",
            advantage="grpo",
            loss="sapo",
            aggregation="seq_mean_token_mean",
            correction="tis_token",
        ),
        Row(
            name="m2po",
            paper="arXiv:2510.01161",
            advantage="grpo",
            loss="m2po",
            aggregation="token_mean",
            correction="tis_token",
        ),
        Row(
            name="sft",
            paper="maximum likelihood of the responses, whatever their reward",
            advantage="reinforce",
            loss="sft",
            aggregation="token_mean",
            correction="none",
        ),
    )
}


def resolve(
    row: Row,
    *,
    advantage: str = "",
    loss: str = "",
    aggregation: str = "",
    correction: str = "",
    denominator: Denominator = "before",
    entropy_coef: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> Algorithm:
    """``row`` with other parts and hyper-parameters.

    An option belongs to the one part that has it; ``part.option`` says which where several do. Raises ConfigError for
    names that do not exist and for combinations that are wrong, with the reason.
    """
    parts: dict[str, Any] = {what: _pick(what, getattr(row, what)) for what in _TABLES}
    chain = list(correction_chains.chain(row.correction))
    for key, value in row.options.items():
        _set_option(parts, chain, key, value, name=row.name)
    given = {"advantage": advantage, "loss": loss, "aggregation": aggregation}
    parts |= {what: _pick(what, part) for what, part in given.items() if part}
    if correction:
        chain = list(correction_chains.chain(correction))
    for key, value in (options or {}).items():
        _set_option(parts, chain, key, value, name=row.name)
    made = Algorithm(
        name=row.name,
        paper=row.paper,
        correction=tuple(chain),
        denominator=denominator,
        entropy_coef=entropy_coef,
        **parts,
    )
    _refuse_wrong_combinations(made)
    return made


_TABLES: Mapping[str, Mapping[str, Any]] = {"advantage": ADVANTAGES, "loss": LOSSES, "aggregation": AGGREGATIONS}


def _pick(what: str, part: str | Advantage | Loss | Aggregation) -> Any:
    if not isinstance(part, str):
        return part
    if part not in _TABLES[what]:
        raise ConfigError(f"algorithm: {what} must be one of {', '.join(_TABLES[what])}, got {part!r}")
    return _TABLES[what][part]


def _set_option(parts: dict[str, Any], chain: list[Step], key: str, value: Any, *, name: str) -> None:
    """``part.option``: the part is advantage, loss, aggregation, correction, or the name of one of the corrections."""
    prefix, _, option = key.rpartition(".")
    steps = {step.name: step for step in chain}
    owners = [place for place, found in (parts | steps).items() if option in found.options]
    if prefix:
        owners = [place for place in owners if place == prefix or (prefix == "correction" and place in steps)]
    if not owners:
        known = ", ".join(sorted({option for found in (parts | steps).values() for option in found.options}))
        raise ConfigError(f"algorithm.options: {name} has no option {key!r}; it has {known}")
    if len(owners) > 1:
        prefixes = " or ".join(f"{owner}.{option}" for owner in owners)
        raise ConfigError(f"algorithm.options: {key!r} belongs to several parts; write {prefixes}")
    (owner,) = owners
    if owner in parts:
        found = parts[owner]
        parts[owner] = replace(found, options={**found.options, option: _checked(found.options[option], value, key)})
    else:
        found = steps[owner]
        changes = {option: _checked(found.options[option], value, key)}
        (chain[chain.index(found)],) = correction_chains.chain([{"name": owner, **found.options, **changes}])


def _checked(default: Any, value: Any, key: str) -> Any:
    if isinstance(default, str):
        choices = CHOICES.get(key.rpartition(".")[2], ())
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = " or ".join(choices) or f"a word such as {default!r}"
            raise ConfigError(f"algorithm.options: {key} must be {wanted}, got {value!r}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ConfigError(f"algorithm.options: {key} must be a number, got {value!r}")
    if value < 0 and default >= 0:
        raise ConfigError(f"algorithm.options: {key} must be >= 0, got {value}")
    return float(value)


def _refuse_wrong_combinations(made: Algorithm) -> None:
    ratios = [step.name for step in made.correction if step.kind == "weight" and step.name != "none"]
    if made.loss.is_coupled and ratios:
        raise ConfigError(
            f"algorithm: loss {made.loss.name} weights by pi / behavior itself; correction {ratios[0]} would count "
            'that ratio twice. Use correction = "none", or a loss around the learner such as ppo_clip'
        )
    if made.denominator == "after" and made.aggregation.name != "token_mean":
        raise ConfigError(
            f'algorithm: denominator = "after" goes with aggregation token_mean; {made.aggregation.name} divides by '
            "trajectories or prompts, whose number rejection does not change"
        )
