"""Says when the engine and the trainer do not compute the same policy.

Fresh samples were sampled by the very version that trains them, so their behavior and trainer logprobs differ by
numerics alone: 0.005 to 0.02 nats per token when both compute in bfloat16, 1e-4 or less in float32. The alarm's default
of 0.05 is above what rounding explains, and below the 0.1 and more that a real difference makes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from asyncrl.policies.batch import Metric

log = logging.getLogger("asyncrl.metrics")


class MismatchAlarm:
    """Warns once for each time that the mismatch rises above ``threshold`` (nats per token; 0 never does)."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._is_on = False

    def look(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The metric ``mismatch/alarm`` of a step: 1 above the threshold. Nothing when no sample was fresh."""
        mean = metrics.get("mismatch/fresh_mean")
        if not self._threshold or not isinstance(mean, float | int):
            return {}
        was_on, self._is_on = self._is_on, not mean <= self._threshold  # NaN is no agreement
        if self._is_on and not was_on:
            log.warning(
                "trainer and engine disagree: mean |trainer - behavior logprob| of fresh samples is %.3f nats per "
                "token, over metrics.mismatch_alarm = %g. Usual causes: weights that engines did not get whole, a "
                "quantised engine or KV cache, a sampling option that the trainer does not know of, tokens that a "
                "rollout function or chat template changed after they were sampled",
                mean,
                self._threshold,
            )
        return {"mismatch/alarm": float(self._is_on)}
