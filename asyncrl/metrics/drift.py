"""An alarm for old tokens: the policy has moved so far since they were sampled that they may teach the wrong thing.

    drift = k3 / (entropy + 0.01)        both per token of the batch, in nats: offpolicy/k3, entropy

The same k3 means more to a policy that is nearly certain: for small moves the squared log ratio grows with the entropy
(ESTR, arXiv:2607.22186, divides that of single tokens by it). Without stale tokens k3 is the engine's numerics. Error
rates on recorded runs: docs/results/old_tokens.md.

Tests: tests/unit/metrics/test_drift.py.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Final

from asyncrl.config.staleness_bound import LOSSES_OF_TIS
from asyncrl.metrics.alarms import LEAST_STEPS, Alarm, number_of
from asyncrl.policies.metric import Metric

_LEAST_ENTROPY: Final = 0.01
_OTHER_LOSS: Final = '; or, with GRPO, set algorithm.loss = "topr", correction = "none"'


class DriftAlarm(Alarm):
    """Warns while the median drift of LEAST_STEPS steps exceeds ``threshold``; 0 disables it. It ends at half of it."""

    name = "drift"

    def __init__(self, threshold: float, *, loss: str = "") -> None:
        """loss: name of the run's; if another may serve old tokens better, the warning names it"""
        super().__init__()
        self._other_loss = _OTHER_LOSS if loss in LOSSES_OF_TIS else ""
        self._threshold = threshold
        self._drifts: deque[float] = deque(maxlen=LEAST_STEPS)

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the metric ``offpolicy/drift`` of the step; empty without a policy loss."""
        if "offpolicy/k3" not in metrics or "entropy" not in metrics:
            return {}
        k3, entropy = number_of(metrics, "offpolicy/k3"), number_of(metrics, "entropy")
        drift = k3 / (max(entropy, 0.0) + _LEAST_ENTROPY)
        self._drifts.append(drift)
        median = statistics.median(self._drifts) if len(self._drifts) == LEAST_STEPS else 0.0
        limit = self._threshold / 2 if self.is_on else self._threshold
        if self._begins(bool(self._threshold) and median > limit):
            self._warn(
                "in the last %d steps the policy was %.2g times its entropy away from what sampled its tokens (median; "
                "in the last one k3 %.2g at an entropy of %.2g nats), over metrics.drift_alarm = %g, at staleness %.3g "
                "and learning rate %.3g",
                LEAST_STEPS,
                median,
                k3,
                entropy,
                self._threshold,
                number_of(metrics, "staleness/mean"),
                number_of(metrics, "learner/learning_rate"),
                or_else=self._other_loss,
            )
        return {"offpolicy/drift": drift}
