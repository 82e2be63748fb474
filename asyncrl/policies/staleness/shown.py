"""Which learning rates were shown to lose nothing with old tokens. Pure.

The bias of a step grows with staleness x learning rate (arXiv:2607.01083), and so does what was measured
(docs/results/old_tokens.md): SmolLM2-135M with TIS equals synchronous training at 8e-6 and <= 4 versions, and loses at
8e-6 and <= 8 or 16, and at 2e-5 and <= 4.
"""

from __future__ import annotations

from typing import Final

LARGEST_SHOWN: Final = 8e-6 * 4
"""Largest learning rate x max_staleness at which no run with TIS lost."""
_OF_RANDOM_WEIGHTS: Final = 1e-3
"""Such rates are those of small models with random weights, which nothing here speaks of."""


def beyond_what_was_shown(learning_rate: float, max_staleness: int) -> str:
    """Return one line if nothing shows that such a run learns as a synchronous one does; else ""."""
    product = learning_rate * max_staleness
    if product <= LARGEST_SHOWN * (1 + 1e-9) or learning_rate >= _OF_RANDOM_WEIGHTS:
        return ""
    return (
        f"learning_rate {learning_rate:g} x max_staleness {max_staleness} is {product:.2g}; some runs over "
        f"{LARGEST_SHOWN:g} learned less than synchronous ones: lower either (docs/results/old_tokens.md)"
    )
