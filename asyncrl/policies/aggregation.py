"""How token losses become one number: a weight per token of the whole batch, decided before it is split.

The batch's loss is the sum of loss x weight over all its tokens, so gradients do not depend on how the batch is cut
into micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def token_mean(masks: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.float32]]:
    """Every response token of the batch counts the same: 1 / (number of response tokens).  [B][T] -> [B] f32[T]

    Source: DAPO, arXiv:2503.14476 section 3.3.
    """
    total = sum(int(mask.sum()) for mask in masks)
    return [mask.astype(np.float32) / np.float32(max(total, 1)) for mask in masks]
