"""How old tokens may be at a learning rate: the default of staleness.max_staleness, and what speaks against more. Pure.

The bias of a step grows with staleness x learning rate (arXiv:2607.01083), and so does what was measured
(docs/results/old_tokens.md): SmolLM2-135M with TIS loses nothing that is shown at 5e-6 with tokens of 4 versions and at
2e-5 with tokens of 1. It loses on an agent's task at 1e-5 with tokens of 4 or 8, on sums at 2e-5 with tokens of 2, and
everywhere from a product of 1.6e-4 on. There the loss "topr" loses at most a tenth; at 1e-5 with tokens of 8 it loses
more than TIS. Those versions are one optimizer step apart; with learner.steps_per_batch the rate counts for each step.

Within that, a larger bound is faster and its tokens are no older, because the learner waits less for slow groups and
only as many groups are outstanding as it needs (docs/results/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LARGEST_SHOWN: Final = 5e-6 * 4
"""Largest learning rate x age of tokens at which nothing lost on any task, nor at a smaller one.
benchmarks/tests/test_old_tokens.py holds it to the rows of a real model."""
MOST_LOST: Final[Mapping[str, Mapping[float, float]]] = {
    "tis_token": {4e-5: 0.06, 8e-5: 0.06, 1.6e-4: 0.47, 3.2e-4: 0.58},
    "topr": {4e-5: 0.04, 8e-5: 0.1, 1.6e-4: 0.07, 3.2e-4: 0.09},
}
"""Held-out reward (of 1) that SmolLM2-135M lost at most on a task, by product: with GRPO and this correction or loss.
benchmarks/tests/test_old_tokens.py holds it to the rows of a real model."""
LOSSES_OF_TIS: Final = ("ppo_clip", "reinforce")
"""Losses that leave it to the correction what old tokens weigh: topr may take their place, where it lost less."""
_SHOWN_OF_RANDOM_WEIGHTS: Final = 3e-3 * 4
"""The same of small networks with random weights: the demo's. At 5e-3 x 4 and at 1e-2 x 2 one task of three lost."""
_LARGEST: Final = 8
"""The largest bound that was measured to be faster."""
_FEW_ROWS: Final = 4
"""The largest for adapters, which have rates of their own, and for random weights: too little was measured for more."""
_OF_RANDOM_WEIGHTS: Final = 1e-3
"""Rates from here on are those of small models with random weights."""
_ROUNDING: Final = 1 + 1e-9


def bound_for(learning_rate: float, *, steps: int, trains_adapters: bool) -> int:
    """Return the default of staleness.max_staleness: 1 to 8 versions.  steps: optimizer steps that a version is

    1e-6 to 2.5e-6: 8    5e-6: 4    1e-5: 2    2e-5 and more: 1
    from 1e-3 to 3e-3: 4    5e-3: 2    1e-2 and more: 1    adapters: 4
    """
    if trains_adapters:
        return _FEW_ROWS
    largest = _FEW_ROWS if learning_rate >= _OF_RANDOM_WEIGHTS else _LARGEST
    return int(max(1, min(largest, _shown_at(learning_rate) * _ROUNDING / (learning_rate * steps))))


def beyond_what_was_shown(
    learning_rate: float, max_staleness: int, *, steps: int, trains_adapters: bool, loss: str
) -> str:
    """Return one line if nothing shows that such a run learns as a synchronous one does; else "".

    steps  optimizer steps that a version is
    loss   name of the algorithm's loss
    """
    if trains_adapters:
        said = "adapters were compared with synchronous training twice, at 1e-4 and up to 4 versions: watch alarm/drift"
        said += " (docs/results/old_tokens.md)"
        return said if max_staleness else ""
    product, shown = learning_rate * steps * max_staleness, _shown_at(learning_rate)
    if product <= shown * _ROUNDING:
        return ""
    mend, versions = "learner.learning_rate", "1 version" if max_staleness == 1 else f"{max_staleness} versions"
    if steps > 1:
        mend, versions = f"{mend} or learner.steps_per_batch", f"{versions} of {steps} steps"
    mend += " or staleness.max_staleness" if max_staleness > 1 else ""
    said = f"learning rate {learning_rate:g} x {versions} is {product:.2g}, over {shown:g}: "
    if learning_rate >= _OF_RANDOM_WEIGHTS:
        return f"{said}some runs there learned less than synchronous ones; lower {mend} (docs/results/old_tokens.md)"
    guard = loss if loss in MOST_LOST else "tis_token"
    lost, at = _most_lost(guard, product)
    said += f"with {guard} a 135M model lost held-out reward, up to {lost:g} at {at:g}; lower {mend}"
    by_topr, there = _most_lost("topr", product)
    if loss in LOSSES_OF_TIS and by_topr < lost:
        said += f', or set algorithm.loss = "topr", correction = "none" (up to {by_topr:g} at {there:g})'
    return f"{said} (docs/results/old_tokens.md)"


def _most_lost(guard: str, product: float) -> tuple[float, float]:
    """Return what was lost at most, and at which product: the next larger that was measured, or the largest."""
    of = MOST_LOST[guard]
    at = min((one for one in of if product <= one * _ROUNDING), default=max(of))
    return of[at], at


def _shown_at(learning_rate: float) -> float:
    return _SHOWN_OF_RANDOM_WEIGHTS if learning_rate >= _OF_RANDOM_WEIGHTS else LARGEST_SHOWN
