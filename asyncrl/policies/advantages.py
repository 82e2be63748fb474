"""Rewards to advantages. Pure numpy: one group in, one number per trajectory out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def grpo(rewards: ArrayLike, *, eps: float = 1e-6) -> NDArray[np.float32]:
    """Reward minus the group's mean, over its standard deviation.  [G] -> f32[G]

    All-equal rewards and groups of one give zeros. Source: GRPO, arXiv:2402.03300 section 4.1.2. The standard
    deviation is unbiased (G - 1), as in verl, slime, SkyRL and NeMo-RL; eps is theirs too (TRL adds 1e-4, AReaL 1e-5).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2:
        return np.zeros(len(values), np.float32)
    centered = values - values.mean()
    advantages: NDArray[np.float32] = (centered / (values.std(ddof=1) + eps)).astype(np.float32)
    return advantages
