"""What an algorithm is put together from: the tables of advantages, losses and aggregations, each a row per formula.

A row names its pure function, what of the batch and of other models it needs, and the defaults of its options; it says
what it must not be combined with. To add one: a function in advantages.py, returns.py or losses/, and a row in
advantage_rows.py, loss_rows.py or here (docs/algorithms.md, tests/test_algorithms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.policies import aggregation
from asyncrl.policies.advantage_rows import ADVANTAGES, Advantage, Rewarded
from asyncrl.policies.loss_rows import LOSSES, Loss, Options

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CHOICES",
    "LOSSES",
    "OF_BATCH",
    "SCORED_BY",
    "Advantage",
    "Aggregation",
    "Loss",
    "Options",
    "Rewarded",
]

SCORED_BY: Mapping[str, str] = {
    "values": "critic",
    "ref_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "prox_logprobs": "policy",
}
"""Which model says it of every token, before the step (protocols.Backend.score)."""

OF_BATCH = ("effective_fraction", "keep")
"""What a loss may need that is decided over the whole batch, from the policy's logprobs of it (scored.py)."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "cap_mode": ("one_plus", "absolute"),
    "count": ("groups_with_variance", "nonzero_rewards"),
    "std": ("unbiased", "biased", "none"),
    "std_over": ("group", "batch"),
    "singleton": ("zero", "raw"),
    "observations": ("carry", "reset"),
    "truncated": ("end", "bootstrap"),
    "level": ("sequence", "token"),
    "divergence": ("tv", "kl"),
    "anchor": ("prox", "behavior"),
}
"""What the options that are words may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """needs: "group" i64[B] where prompts count alike.

    divides_by  what the denominator counts tokens of, so that rejection may change it: "batch", "prompt" or "sequence";
                empty where it counts answers or nothing
    """

    name: str
    function: Callable[..., list[NDArray[Any]]]
    needs: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    divides_by: Literal["batch", "prompt", "sequence", ""] = ""

    def at_most(self, max_response_tokens: int, *, unless: Options) -> Aggregation:
        """With the run's longest response as the constant, where there is one and ``unless`` does not set it."""
        name = "max_response_tokens"
        if name not in self.options or any(key.rpartition(".")[2] == name for key in unless):
            return self
        return replace(self, options={**self.options, name: float(max_response_tokens)})

    def __call__(self, masks: Sequence[NDArray[np.bool_]], *, group: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """The weight of each response token in the batch's loss.  [B] bool[T] -> [B] f32[T]"""
        needed = {"group": group} if "group" in self.needs else {}
        return self.function(masks, **needed, **self.options)


AGGREGATIONS: dict[str, Aggregation] = {
    row.name: row
    for row in (
        Aggregation(name="token_mean", function=aggregation.token_mean, divides_by="batch"),
        Aggregation(name="token_sum", function=aggregation.token_sum),
        Aggregation(name="seq_mean_token_mean", function=aggregation.seq_mean_token_mean, divides_by="sequence"),
        Aggregation(name="seq_mean_token_sum", function=aggregation.seq_mean_token_sum),
        Aggregation(
            name="seq_mean_token_sum_norm",
            function=aggregation.seq_mean_token_sum_norm,
            options={"max_response_tokens": 1024.0},
        ),
        Aggregation(name="prompt_mean", function=aggregation.prompt_mean, needs=("group",), divides_by="prompt"),
    )
}
