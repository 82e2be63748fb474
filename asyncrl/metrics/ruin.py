"""Alarms for a model that is being ruined: a diverged model, a collapsed policy, a reward that falls.

They compare a run with itself, because no value of entropy, KL or length is right for every task: a policy that became
certain has learned its task if its rewards rose, and has collapsed if they did not. A learner that resumes compares
with the steps since then.

Tests: tests/unit/metrics/test_ruin.py.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl.metrics.alarms import STEPS, Alarm, in_short, number_of
from asyncrl.policies.metric import Metric

_ALSO: Final = ("entropy", "grad_norm")
_FEW: Final = 3
"""Steps whose mean says how a run began, and how it goes now, where the difference is large."""


class DivergenceAlarm(Alarm):
    """Warns at the first step with numbers that no healthy run has.

    They are not finite (a step that was skipped for this is reported as such); or the trainer's logprobs are further
    from those that sampled the tokens than any staleness explains: the demo, which goes from random weights to its task
    in 30 steps, reaches 0.7 nats per token, and 3 nats are a factor of 20 in the probability of a typical token; or one
    step took nearly all entropy away, without a better reward.
    """

    name = "diverged"
    FINITE = ("loss", "grad_norm", "entropy", "kl", "reward/mean", "mismatch/mean", "critic/loss")
    MOST_APART = 3.0
    LEAST_LEFT = 0.01

    def __init__(self) -> None:
        super().__init__()
        self._before: Mapping[str, Metric] = {}

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return no metrics."""
        if self._begins(bool(seen := self._seen(metrics))):
            self._warn("%s; entropy %s, grad norm %s", seen, *(in_short(metrics.get(one)) for one in _ALSO))
        self._before = metrics
        return {}

    def _seen(self, metrics: Mapping[str, Metric]) -> str:
        """Return what is wrong, in words; "" if nothing is."""
        numbers = {name: value for name in self.FINITE if isinstance(value := metrics.get(name), float | int)}
        was_skipped = bool(number_of(metrics, "learner/skipped_steps"))
        endless = [name for name, value in numbers.items() if not math.isfinite(value) and not was_skipped]
        if endless:
            return f"not finite: {', '.join(endless)}"
        if (apart := numbers.get("mismatch/mean", 0.0)) > self.MOST_APART:
            return (
                f"the model is {apart:.3g} nats per token away from the versions that sampled the batch (a healthy run "
                "stays below 1)"
            )
        before, entropy = number_of(self._before, "entropy"), numbers.get("entropy")
        is_gone = entropy is not None and entropy < self.LEAST_LEFT * before
        if is_gone and number_of(metrics, "reward/mean") <= number_of(self._before, "reward/mean"):
            return f"one step took the entropy from {before:.3g} nats to nearly nothing, and the reward is no better"
        return ""


class CollapseAlarm(Alarm):
    """Warns when the policy has become very different from the start without a better reward.

    The entropy is nearly gone, or has risen to noise; the KL to the reference exploded; answers shrank to nearly
    nothing, or grew until all of them are cut. Where the reward rose, each of these may be what the task asks for.
    Where rewards do not differ (SFT, distillation), the loss stands for them.
    """

    name = "collapse"
    MARGIN = 0.05

    def __init__(self) -> None:
        super().__init__()
        self._start: list[Mapping[str, Metric]] = []
        self._last: deque[Mapping[str, Metric]] = deque(maxlen=_FEW)

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return no metrics."""
        if len(self._start) < _FEW:
            self._start.append(metrics)
        self._last.append(metrics)
        seen = self._seen() if len(self._last) == _FEW and not self._is_better else ""
        if self._begins(bool(seen)):
            goal = "reward/mean" if "reward/mean" in metrics else "loss"
            values = in_short(_mean(self._start, goal)), in_short(_mean(self._last, goal))
            self._warn("%s, and the %s went from %s to %s", seen, goal.removesuffix("/mean"), *values)
        return {}

    @property
    def _is_better(self) -> bool:
        reward, spread = _mean(self._start, "reward/mean"), _mean(self._start, "reward/std")
        if not spread and _mean(self._last, "loss") < _mean(self._start, "loss"):
            return True
        return _mean(self._last, "reward/mean") > reward + self.MARGIN * max(abs(reward), spread)

    def _seen(self) -> str:
        """Return the first of the signs, in words; "" if there is none."""
        names = ("entropy", "length/trained_mean", "length/truncated_fraction", "kl")
        (entropy, entropy_now), (length, length_now), (cut, cut_now), (_, kl) = (
            (number_of(self._start[0], name), _mean(self._last, name)) for name in names
        )
        if entropy > 0 and entropy_now < 0.05 * entropy:
            return f"the entropy fell from {entropy:.3g} to {entropy_now:.2g} nats: all answers are nearly the same"
        if entropy_now > max(2 * entropy, entropy + 1):
            return f"the entropy rose from {entropy:.3g} to {entropy_now:.3g} nats: answers become noise"
        if kl > 2:
            return f"the KL to the reference is {kl:.3g} nats per token"
        if length >= 8 and length_now < 0.1 * length:
            return f"answers shrank from {length:.0f} to {length_now:.1f} tokens"
        if cut < 0.5 and cut_now >= 0.95:
            return f"{cut_now:.0%} of the answers are cut at rollout.max_new_tokens, at the start {cut:.0%}"
        return ""


def _mean(rows: Sequence[Mapping[str, Metric]], name: str) -> float:
    return statistics.fmean(number_of(metrics, name) for metrics in rows)


class RewardFallAlarm(Alarm):
    """Warns when the reward is far below its best, each a mean over ``steps`` steps.

    Far is a part of the best value (or of the spread of rewards, where the best is near 0), and more than the rewards
    of single steps vary from one to the next: the best of many means is high by chance. The alarm ends at half of that.
    """

    name = "reward_fell"
    SHARE = 0.25
    DEVIATIONS = 3.0

    def __init__(self, *, steps: int = STEPS) -> None:
        super().__init__()
        self._rewards: deque[float] = deque(maxlen=steps)
        self._spreads: deque[float] = deque(maxlen=steps)
        self._best, self._scale, self._deviation = -math.inf, 0.0, 0.0
        """The best mean, the size of rewards then, and their deviation from step to step."""
        self._jumps, self._num_jumps = 0.0, 0
        """Sum of the squared differences between two steps, and their number."""

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return no metrics."""
        reward = metrics.get("reward/mean")
        if not isinstance(reward, float | int) or not math.isfinite(reward):
            return {}
        if self._rewards:
            self._jumps += (reward - self._rewards[-1]) ** 2
            self._num_jumps += 1
        self._rewards.append(reward)
        self._spreads.append(number_of(metrics, "reward/std"))
        if len(self._rewards) < (self._rewards.maxlen or 0):
            return {}
        now, deviation = statistics.fmean(self._rewards), statistics.stdev(self._rewards)
        if now > self._best:
            self._best, self._scale = now, max(abs(now), statistics.fmean(self._spreads))
            self._deviation = deviation
        noise = max(deviation, self._deviation, math.sqrt(self._jumps / self._num_jumps / 2))
        far = max(self.SHARE * self._scale, self.DEVIATIONS * noise)
        if self._begins(self._best - now > (far / 2 if self.is_on else far)):
            self._warn("the reward fell from %.3g to %.3g (means of %d steps)", self._best, now, len(self._rewards))
        return {}
