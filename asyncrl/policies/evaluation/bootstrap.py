"""Bootstrap confidence intervals for means over prompts. Pure: the same seed gives the same interval."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 1000
_AT_ONCE: Final = 2**22
"""Numbers per block of resamples, which bounds memory."""


def interval(
    values: NDArray[np.float64], *, seed: int, coverage: float = 0.95, resamples: int = RESAMPLES
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return percentile intervals of the means of M quantities over P prompts.  [P, M] -> low [M], high [M]

    Prompts are drawn with replacement; all quantities share the same draws. With one prompt, low equals high.
    """
    num_prompts, num_quantities = values.shape
    if not num_prompts:
        raise ValueError("there is no prompt to resample")
    generator = np.random.default_rng(seed)
    even = np.full(num_prompts, 1 / num_prompts)
    means = np.empty((resamples, num_quantities))
    block = max(1, _AT_ONCE // num_prompts)
    for start in range(0, resamples, block):
        stop = min(resamples, start + block)
        counts = generator.multinomial(num_prompts, even, size=stop - start)
        means[start:stop] = counts @ values / num_prompts
    tail = (1 - coverage) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
