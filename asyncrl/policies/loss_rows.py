"""The table of losses: each a pure function of losses/, what it takes of the batch and of other models, its options.

Part of catalogue.py, which gathers the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from asyncrl.policies import distillation, losses
from asyncrl.policies.segments import Array

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """takes: positional arguments of the function, by name; needs: keyword arguments besides its options.

    is_coupled     it weights or bounds pi / behavior itself: a correction's weight on top would count that ratio twice
    is_supervised  the data need not be the policy's: staleness does not matter
    advantages     takes the same arguments and gives the advantages that it trains on, where they are not the batch's
    with_choice    {(option, word): defaults}: of options whose numbers mean something else with that word
    """

    name: str
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    is_coupled: bool = False
    is_supervised: bool = False
    advantages: Callable[..., torch.Tensor] | None = None
    with_choice: Mapping[tuple[str, str], Options] = field(default_factory=dict)

    def __call__(self, values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss f32[M] and clipped bool[M] of response tokens, from what ``values`` holds by name."""
        made: tuple[torch.Tensor, torch.Tensor] = self._call(self.function, values)
        return made

    def advantages_of(self, values: Mapping[str, Any]) -> torch.Tensor:
        """What a mask that looks at advantages has to see, from what ``values`` holds by name.  f32[M]"""
        made: torch.Tensor = values["advantages"] if self.advantages is None else self._call(self.advantages, values)
        return made

    def with_choices(self, options: Options) -> Options:
        """``options``, preceded by the defaults that go with the words among them, where they give no number."""
        given = {key.rpartition(".")[2]: value for key, value in options.items()}
        implied = {
            f"loss.{name}": value
            for (option, word), defaults in self.with_choice.items()
            if given.get(option) == word
            for name, value in defaults.items()
            if name not in given
        }
        return implied | dict(options)

    @property
    def is_around_behavior(self) -> bool:
        """Whether the ratio to the behavior policy is in it: by its kind, or by its option ``anchor``."""
        return self.is_coupled or self.options.get("anchor") == "behavior"

    def _call(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        needed = {name: values[name] for name in self.needs}
        return function(*(values[name] for name in self.takes), **needed, **self.options)


Anchor = Literal["prox", "behavior"]


def _ppo_clip(
    logprobs: Array, prox_logprobs: Array, advantages: Array, *, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dual_clip`` 0 is off, as a run file has no None."""
    return losses.ppo_clip(
        logprobs, prox_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip or None
    )


def _gspo(
    logprobs: Array,
    prox_logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    *,
    anchor: Anchor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    center = behavior_logprobs if anchor == "behavior" else prox_logprobs
    return losses.gspo(logprobs, center, advantages, **options)


def _sapo(
    logprobs: Array,
    prox_logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    *,
    anchor: Anchor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    center = behavior_logprobs if anchor == "behavior" else prox_logprobs
    return losses.sapo(logprobs, center, advantages, **options)


def _m2po(
    logprobs: Array, prox_logprobs: Array, advantage: Array, *, keep: Array, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``threshold`` has made ``keep`` of the whole batch (scored.py)."""
    return losses.m2po(logprobs, prox_logprobs, advantage, keep=keep)


def _opd_advantages(
    logprobs: Array, prox_logprobs: Array, advantage: Array, teacher_logprobs: Array, *, coef: float
) -> torch.Tensor:
    """The teacher's part joins the advantages here, where the policy's logprobs are at hand without another pass."""
    return distillation.opd_advantages(advantage, prox_logprobs, teacher_logprobs, coef=coef)


def _opd_reward(
    logprobs: Array, prox_logprobs: Array, advantage: Array, teacher_logprobs: Array, *, coef: float
) -> tuple[torch.Tensor, torch.Tensor]:
    mixed = _opd_advantages(logprobs, prox_logprobs, advantage, teacher_logprobs, coef=coef)
    return losses.reinforce(logprobs, mixed)


_PROX = ("logprobs", "prox_logprobs", "advantages")
_BEHAVIOR = ("logprobs", "behavior_logprobs", "advantages")
_EITHER = ("logprobs", "prox_logprobs", "behavior_logprobs", "advantages")
_SEQUENCE = ("sequence", "num_sequences")
_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}

LOSSES: dict[str, Loss] = {
    row.name: row
    for row in (
        Loss(name="reinforce", function=losses.reinforce, takes=("logprobs", "advantages")),
        Loss(name="ppo_clip", function=_ppo_clip, takes=_PROX, options=_CLIP),
        # losses.decoupled_ppo, whose weights the correction multiplies in: the same as ppo_clip under one.
        Loss(name="decoupled_ppo", function=_ppo_clip, takes=_PROX, options=_CLIP),
        Loss(name="coupled_ppo", function=_ppo_clip, takes=_BEHAVIOR, options=_CLIP, is_coupled=True),
        Loss(
            name="gspo",
            function=_gspo,
            takes=_EITHER,
            needs=_SEQUENCE,
            options={"clip_low": 3e-4, "clip_high": 4e-4, "anchor": "prox"},
        ),
        Loss(
            name="cispo",
            function=losses.cispo,
            takes=_BEHAVIOR,
            options={"cap_mode": "one_plus", "clip_low": 1.0, "clip_high": 4.0},
            with_choice={("cap_mode", "absolute"): {"clip_high": 5.0}},
            is_coupled=True,
        ),
        Loss(
            name="topr",
            function=losses.topr,
            takes=_BEHAVIOR,
            needs=_SEQUENCE,
            options={"level": "sequence"},
            is_coupled=True,
        ),
        Loss(
            name="sapo",
            function=_sapo,
            takes=_EITHER,
            options={"tau_positive": 1.0, "tau_negative": 1.05, "anchor": "prox"},
        ),
        Loss(
            name="aspo",
            function=losses.aspo,
            takes=_BEHAVIOR,
            options={"clip_low": 0.2, "clip_high": 0.2, "cap_positive": 3.0, "cap_negative": 3.0},
            is_coupled=True,
        ),
        Loss(
            name="dppo",
            function=losses.dppo,
            takes=_BEHAVIOR,
            options={"divergence": "tv", "delta_low": 0.2, "delta_high": 0.2, "ratio_cap": 20.0},
            with_choice={("divergence", "kl"): {"delta_low": 0.05, "delta_high": 0.05}},
            is_coupled=True,
        ),
        Loss(name="m2po", function=_m2po, takes=_PROX, needs=("keep",), options={"threshold": 0.04}),
        Loss(name="p3o", function=losses.p3o, takes=_BEHAVIOR, needs=("effective_fraction",), is_coupled=True),
        Loss(
            name="opd_reward",
            function=_opd_reward,
            takes=(*_PROX, "teacher_logprobs"),
            options={"coef": 1.0},
            advantages=_opd_advantages,
        ),
        Loss(
            name="opd",
            function=distillation.opd,
            takes=("logprobs", "behavior_logprobs", "teacher_logprobs"),
            options={"max_drop": 0.2, "kl_coef": 1e-3},
            is_coupled=True,
        ),
        Loss(name="sft", function=losses.sft, takes=("logprobs",), is_supervised=True),
    )
}
