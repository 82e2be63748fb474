"""Alarms for runs that do not train what they appear to train. Each alarm warns once each time its condition begins.

A warning is one line: what is seen, with numbers; what it costs; and one remedy (policies/health/conditions.py, which
observers of the run show as well). metrics/ruin.py has the alarms for a model that gets worse.

Tests: tests/unit/metrics/test_alarms.py.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import Final

from asyncrl.policies.health.conditions import CONDITIONS
from asyncrl.policies.metric import Histogram, Metric

log = logging.getLogger("asyncrl.metrics")

STEPS: Final = 10
"""Steps over which an alarm looks."""
LEAST_STEPS: Final = 5
"""With a few groups per batch, rewards may be equal in all of them for some steps by chance."""
WORTH_SECONDS: Final = 10.0
"""Time lost in STEPS steps from which on it is worth a warning that costs speed alone."""


def steps_of(run_steps: int) -> int:
    """Return the steps over which an alarm for ruin looks: fewer than STEPS in a short run, which would end before."""
    return min(STEPS, max(LEAST_STEPS, run_steps // 4))


class Alarm:
    """name: used in heartbeats, which report whether the alarm ``is_on``;  text: its latest warning"""

    name = ""

    def __init__(self) -> None:
        self.is_on = False
        self.text = ""

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Update the alarm with the metrics of a step, and return more metrics. Called for every step, in order."""
        raise NotImplementedError

    def _begins(self, is_on: bool) -> bool:
        """Switch the alarm. Return whether it was off and is on."""
        was_on, self.is_on = self.is_on, is_on
        return is_on and not was_on

    def _warn(self, text: str, *values: object, or_else: str = "") -> None:
        """Warn of what is seen, and add what it costs and what to do, ``or_else`` last."""
        self.text = CONDITIONS[f"alarm/{self.name}"].line(text % values) + or_else
        log.warning("%s", self.text)


class MismatchAlarm(Alarm):
    """Warns when engine and trainer do not compute the same policy.

    ``threshold`` is in nats per token; 0 disables the alarm.

    Fresh samples were sampled by the version that trains them, so their behavior and trainer logprobs differ only by
    numerics: 0.005 to 0.02 nats per token if both compute in bfloat16, 1e-4 or less in float32. The default of 0.05
    lies above what rounding explains and below the 0.1 or more of a real difference.
    """

    name = "mismatch"

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the metric ``mismatch/alarm``: 1 above the threshold. Empty if no sample was fresh."""
        mean = metrics.get("mismatch/fresh_mean")
        if not self._threshold or not isinstance(mean, float | int):
            return {}
        if self._begins(not mean <= self._threshold):  # NaN counts as a mismatch
            self._warn(
                "trainer and engine disagree: mean |trainer - behavior logprob| of fresh samples is %.3f nats per "
                "token, over metrics.mismatch_alarm = %g",
                mean,
                self._threshold,
            )
        return {"mismatch/alarm": float(self.is_on)}


class DropAlarm(Alarm):
    """Warns when more than ``threshold`` of the answers of STEPS steps were too old to train; 0 disables it.

    A group is usually too old because its longest answer took long. Dropped answers are therefore longer than trained
    ones, and training sees fewer long answers than the policy produces. A single burst, such as after a fallback to a
    checkpoint, does not count: answers must have been dropped in at least LEAST steps. The alarm ends below half the
    threshold.
    """

    name = "drop"
    LEAST = 3

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold
        self._trained: deque[tuple[int, float]] = deque(maxlen=STEPS)
        """Per step: number of answers, and their tokens."""
        self._dropped: deque[tuple[int, float]] = deque(maxlen=STEPS)

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the metric ``staleness/dropped_share``, in [0, 1], over the last STEPS steps (fewer at the start)."""
        self._trained.append(_count_answers(metrics, "trained"))
        self._dropped.append(_count_answers(metrics, "dropped"))
        dropped, trained = (tuple(map(sum, zip(*of, strict=True))) for of in (self._dropped, self._trained))
        share = dropped[0] / max(dropped[0] + trained[0], 1)
        is_lasting = len(self._dropped) == STEPS and sum(count > 0 for count, _ in self._dropped) >= self.LEAST
        begins = bool(self._threshold) and share > self._threshold and is_lasting
        if self._begins(begins or (self.is_on and share >= self._threshold / 2)):
            self._warn(
                "%.0f %% of the answers of the last %d steps were dropped as too stale, over metrics.drop_alarm = %g: "
                "they are %.0f tokens long on average, trained answers %.0f; a bound a few above (seconds of the "
                "longest answer) / (seconds of a step) would keep them",
                100 * share,
                STEPS,
                self._threshold,
                dropped[1] / dropped[0],
                trained[1] / max(trained[0], 1),
            )
        return {"staleness/dropped_share": share}


class MissingAlarm(Alarm):
    """Warns when more than ``SHARE`` of the answers of STEPS steps (fewer at the start) have no reward.

    What fails is rarely a fair sample: a reward that raises for answers without a number leaves out the worst ones.
    Answers must have been missing in at least LEAST steps. The alarm ends below half the share.
    """

    name = "missing"
    SHARE = 0.05
    LEAST = 3

    def __init__(self, *, group_size: int) -> None:
        super().__init__()
        self._group_size = group_size
        self._failed_groups: float | None = None  # until the first step
        self._answers: deque[tuple[float, float]] = deque(maxlen=STEPS)
        """Per step: answers without a reward, and trained answers."""

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the metric ``staleness/failed_share``, in [0, 1], over the last STEPS steps (fewer at the start)."""
        failed = number_of(metrics, "staleness/failed_groups")
        if self._failed_groups is None:  # what an earlier incarnation saw does not count
            self._failed_groups = failed if number_of(metrics, "learner/incarnation") else 0.0
        missing = (failed - self._failed_groups) * self._group_size + number_of(metrics, "staleness/failed_samples")
        self._failed_groups = failed
        self._answers.append((missing, _count_answers(metrics, "trained")[0]))
        all_missing, all_trained = map(sum, zip(*self._answers, strict=True))
        share = all_missing / max(all_missing + all_trained, 1)
        is_lasting = sum(count > 0 for count, _ in self._answers) >= self.LEAST
        if self._begins((share > self.SHARE and is_lasting) or (self.is_on and share >= self.SHARE / 2)):
            self._warn(
                "%.0f %% of the answers of the last %d steps failed and have no reward, so they are in no baseline and "
                "are not trained",
                100 * share,
                len(self._answers),
            )
        return {"staleness/failed_share": share}


class StragglerAlarm(Alarm):
    """Warns when the learner waits too long for old groups while engines are idle.

    ``threshold`` is a share of the time of the last STEPS steps; 0 disables the alarm.

    With max_staleness S, the awaited answer takes as long as S + 1 steps and their waits. Without the waits, the same
    time holds proportionally more steps, and a bound of that many steps would avoid the waits. If the engines stay
    busy, waiting costs nothing. The alarm ends below half the threshold.
    """

    name = "stragglers"
    LEAST_IDLE = 0.05

    def __init__(self, threshold: float, *, max_staleness: int) -> None:
        super().__init__()
        self._threshold = threshold
        self._max_staleness = max_staleness
        self._seconds: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        """Per step: seconds of waiting, seconds in total, seconds of idle engines."""

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return no metrics."""
        elapsed = number_of(metrics, "learner/wait_seconds") + number_of(metrics, "learner/step_seconds")
        idle = number_of(metrics, "rollout/idle_ratio") * elapsed
        self._seconds.append((number_of(metrics, "learner/straggler_wait_seconds"), elapsed, idle))
        all_waited, all_elapsed, all_idle = map(sum, zip(*self._seconds, strict=True))
        share, idle_share = all_waited / max(all_elapsed, 1e-9), all_idle / max(all_elapsed, 1e-9)
        is_long = len(self._seconds) == STEPS and all_waited >= WORTH_SECONDS
        is_costly = is_long and share > self._threshold and idle_share > self.LEAST_IDLE
        goes_on = self.is_on and share >= self._threshold / 2 and idle_share >= self.LEAST_IDLE / 2
        if self._begins((bool(self._threshold) and is_costly) or goes_on):
            self._warn(
                "for %.0f %% of the last %d steps' time the learner had a full batch but waited for older groups, and "
                "for %.0f %% engines were idle; with staleness.max_staleness = %d (now %d) these groups would be "
                "finished in time",
                100 * share,
                STEPS,
                100 * idle_share,
                math.ceil((self._max_staleness + 1) / max(1 - share, 0.05)),
                self._max_staleness,
            )
        return {}


class SplitAlarm(Alarm):
    """Warns when the learner or the engines limit the run while the other side is often idle.

    A side limits the run if it is busy for LIMITING of the time of STEPS steps with the same workers. The alarm is on
    if the other side is idle for more than ``threshold`` of that time, and ends below half of it; 0 disables it. If
    neither side limits the run (slow rewards, long answers, the staleness bound), other GPUs would not help. The first
    steps do not count, because they fill the window.
    """

    name = "split"
    LIMITING = 0.9

    def __init__(self, threshold: float, *, warmup: int) -> None:
        """warmup: steps that do not count"""
        super().__init__()
        self._threshold = threshold
        self._left = warmup
        self._workers = 0
        self._seconds: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        """Per step with the current number of workers: seconds in total, learner idle, engines idle."""

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return no metrics."""
        waited, workers = number_of(metrics, "learner/wait_seconds"), int(number_of(metrics, "rollout/workers"))
        elapsed = waited + number_of(metrics, "learner/step_seconds")
        if self._left or not workers:
            self._left = max(0, self._left - 1)
            return {}
        if workers != self._workers:
            self._workers = workers
            self._seconds.clear()
        self._seconds.append((elapsed, waited, number_of(metrics, "rollout/idle_ratio") * elapsed))
        if len(self._seconds) < STEPS or not self._threshold:
            return {}
        all_elapsed, *both = map(sum, zip(*self._seconds, strict=True))
        learner_idle, engines_idle = (seconds / max(all_elapsed, 1e-9) for seconds in both)
        most = max(learner_idle, engines_idle) if min(learner_idle, engines_idle) <= 1 - self.LIMITING else 0.0
        if most * all_elapsed < WORTH_SECONDS:
            most = 0.0
        if self._begins(most > self._threshold or (self.is_on and most >= self._threshold / 2)):
            self._warn(
                "in the last %d steps the learner was idle for %.0f %% of the time and engines for %.0f %%: GPUs of "
                "the %s would do more as GPUs of the %s",
                STEPS,
                100 * learner_idle,
                100 * engines_idle,
                "learner" if learner_idle > engines_idle else "engines",
                "engines" if learner_idle > engines_idle else "learner",
            )
        return {}


class _StreakAlarm(Alarm):
    """Warns at the last of ``steps`` consecutive steps for which ``holds`` is true."""

    def __init__(self, *, steps: int = STEPS) -> None:
        super().__init__()
        self._steps = steps
        self._streak = 0

    def update(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return no metrics."""
        self._streak = self._streak + 1 if self.holds(metrics) else 0
        if self._begins(self._streak >= self._steps):
            self.explain(metrics)
        return {}

    def holds(self, metrics: Mapping[str, Metric]) -> bool:
        raise NotImplementedError

    def explain(self, metrics: Mapping[str, Metric]) -> None:
        raise NotImplementedError


class StandstillAlarm(_StreakAlarm):
    """Warns when consecutive steps had no gradient: the run costs as much as before and learns nothing."""

    name = "standstill"

    def holds(self, metrics: Mapping[str, Metric]) -> bool:
        return metrics.get("grad_norm") == 0

    def explain(self, metrics: Mapping[str, Metric]) -> None:
        self._warn(
            "the last %d steps trained nothing: gradients are 0. Rewards average %s, and the share of groups with "
            "equal rewards is %s",
            self._steps,
            in_short(metrics.get("reward/mean")),
            in_short(metrics.get("reward/same_in_group")),
        )


class TruncationAlarm(_StreakAlarm):
    """Warns when nearly every answer of the first steps was truncated and earned next to nothing.

    It counts only from the first step on, because a policy may learn later to use all its tokens for a reward. And a
    reward may need no more than the beginning of an answer: "10" is right, whatever a small model chats behind it.
    """

    name = "truncated"
    SHARE = 0.95
    LEAST_REWARD = 0.1

    def holds(self, metrics: Mapping[str, Metric]) -> bool:
        is_cut = number_of(metrics, "length/truncated_fraction") >= self.SHARE
        earns_nothing = number_of(metrics, "reward/mean") < self.LEAST_REWARD
        return is_cut and earns_nothing and (self._streak > 0 or metrics.get("weights/version") == 1)

    def explain(self, metrics: Mapping[str, Metric]) -> None:
        self._warn(
            "over %.0f %% of the answers of each of the first %d steps were cut at rollout.max_new_tokens, %s tokens "
            "long on average, and the reward is %s",
            100 * self.SHARE,
            self._steps,
            in_short(metrics.get("length/trained_mean")),
            in_short(metrics.get("reward/mean")),
        )


class NoSignalAlarm(_StreakAlarm):
    """Warns when no group's rewards differed in consecutive steps, and the weights still moved.

    The cause may be entropy, KL, weight decay or a critic that learns the constant reward, but not the task.
    StandstillAlarm covers steps without a gradient.
    """

    name = "no_signal"

    def __init__(self, *, has_groups: bool = True, steps: int = STEPS) -> None:
        """has_groups: whether rewards are compared within groups; else all rewards of a step must be equal"""
        super().__init__(steps=steps)
        self._has_groups = has_groups

    def holds(self, metrics: Mapping[str, Metric]) -> bool:
        are_equal = metrics.get("reward/std") == 0 or (self._has_groups and metrics.get("reward/same_in_group") == 1)
        return are_equal and number_of(metrics, "grad_norm") != 0

    def explain(self, metrics: Mapping[str, Metric]) -> None:
        self._warn(
            "in each of the last %d steps the rewards of every group were equal (%s on average in the last), but the "
            "weights still change, so something other than the reward trains them",
            self._steps,
            in_short(metrics.get("reward/mean")),
        )


def number_of(metrics: Mapping[str, Metric], name: str) -> float:
    """Return a metric; 0 if it is absent."""
    value = metrics.get(name)
    return float(value) if isinstance(value, float | int) else 0.0


def in_short(value: Metric | None) -> str:
    return f"{value:.3g}" if isinstance(value, float | int) else "unknown"


def _count_answers(metrics: Mapping[str, Metric], what: str) -> tuple[int, float]:
    """Return the number of trained or dropped answers of the step, and their tokens."""
    lengths, mean = metrics.get(f"length/{what}"), metrics.get(f"length/{what}_mean")
    number = sum(lengths.counts) if isinstance(lengths, Histogram) else 0
    return number, number * mean if isinstance(mean, float | int) else 0.0
