"""Answers of given lengths. Each length depends only on (seed, group id, index), so every arm has the same lengths.

    rollout.function = "benchmarks.gpu.lengths:capped"   with rollout.ignore_eos = true
    reward.kind = "benchmarks.gpu.lengths:noise"

Each prompt row carries its ``Lengths`` distribution as metadata.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.environments.builtin import single_turn
from asyncrl.environments.port import Generate
from asyncrl.messages import PromptGroup, Trajectory
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lognormal lengths in tokens.

    mean   mean before cutting at ``maximum``
    sigma  standard deviation of the logarithm
    """

    mean: float
    sigma: float
    maximum: int
    seed: int

    def of(self, *, group_id: int, index: int) -> int:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, group_id, index])))
        logarithm = math.log(self.mean) - self.sigma**2 / 2 + self.sigma * random.standard_normal()
        return max(1, min(self.maximum, round(math.exp(logarithm))))

    def drawn(self, *, groups: int, group_size: int) -> NDArray[np.int64]:
        """Return the lengths of the first ``groups`` groups."""
        return np.array(
            [self.of(group_id=group, index=index) for group in range(groups) for index in range(group_size)]
        )

    def as_metadata(self) -> dict[str, Any]:
        return asdict(self)


async def capped(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """A RolloutFn that samples one answer of exactly the drawn length."""
    length = Lengths(**prompt.metadata).of(group_id=prompt.group_id, index=index)
    return await single_turn(prompt, cast(Generate, partial(generate, max_new_tokens=length)), index=index)


async def noise(samples: Sequence[Sample]) -> list[float]:
    """A RewardFn: numbers in [0, 1) that depend on the answer's first tokens, so that advantages are not zero."""
    return [zlib.crc32(sample.trajectory.tokens[:16].tobytes()) / 2**32 for sample in samples]


# -- what a run reports of its lengths ---------------------------------------------------------------------------------

QUANTILES = (0.5, 0.95, 0.99)

Histogram = Mapping[str, Sequence[float]]
"""As in metrics.jsonl: counts[i] lengths are in [edges[i], edges[i + 1]), with edges 0, 1, 2, 4, 8, ..."""


def merged(histograms: Sequence[Histogram]) -> dict[float, int]:
    """Sum histograms over steps: lower edge -> count."""
    total: dict[float, int] = {}
    for histogram in histograms:
        for edge, count in zip(histogram["edges"], histogram["counts"], strict=False):
            total[edge] = total.get(edge, 0) + int(count)
    return {edge: count for edge, count in sorted(total.items()) if count}


def summary(counts: Mapping[float, int], drawn: NDArray[np.int64]) -> dict[str, float]:
    """Return count, mean, p50, p95, p99 and max of lengths that are known only by octave.

    Within an octave, lengths are assumed to be distributed as those of ``drawn``. Generated and trained lengths are
    treated in the same way, so a difference between them is real. max is the largest drawn length in the highest
    octave.
    """
    number = sum(counts.values())
    if not number:
        return {"count": 0}
    within = {low: np.sort(drawn[(drawn >= low) & (drawn < max(2 * low, 1))]) for low in counts}
    lengths = np.concatenate([_spread(within[low], count, low=low) for low, count in counts.items()])
    found = {f"p{quantile * 100:.0f}": float(np.quantile(lengths, quantile)) for quantile in QUANTILES}
    return {"count": number, "mean": float(lengths.mean()), **found, "max": float(lengths[-1])}


def _spread(known: NDArray[np.int64], count: int, *, low: float) -> NDArray[np.float64]:
    """Return ``count`` lengths at even ranks of the sorted ``known`` ones; at the octave's edge if there are none."""
    if not len(known):
        return np.full(count, low)
    return known[((np.arange(count) + 0.5) * len(known) / count).astype(np.int64)].astype(np.float64)
