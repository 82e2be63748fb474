"""The five numbers that say whether a run is healthy, with what is normal, and one sentence on the whole run. Pure.

`asyncrl board` and `asyncrl top` show them; docs/start/healthy.md explains them.

Tests: tests/unit/policies/health/test_vital_signs.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from asyncrl.policies.health.conditions import ALARMS, CONDITIONS
from asyncrl.policies.health.faults import Finding

Numbers = Mapping[str, float]

_NAMES: Final = (
    "reward/mean",
    "reward/same_in_group",
    "entropy",
    "mismatch/fresh_mean",
    "mismatch/mean",
    "learner/idle_ratio",
    "rollout/idle_ratio",
    "loss",
)
WATCHED: Final = (*_NAMES, *ALARMS)
"""Metrics that this file reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitalSign:
    """One number.  value: in words;  normal: its normal range, in words;  is_normal: whether it lies there"""

    title: str
    value: str
    normal: str
    is_normal: bool


def vital_signs(now: Numbers, first: Numbers) -> list[VitalSign]:
    """Return the numbers that are known.  now: metrics of the newest step;  first: of the first step that is known"""
    return [
        sign
        for sign in (_goal(now, first), _differing(now, first), _entropy(now, first), _mismatch(now), _idle(now))
        if sign is not None
    ]


def _goal(now: Numbers, first: Numbers) -> VitalSign | None:
    name, title, normal = "reward/mean", "reward", "rises, or stays near its best"
    if name not in now:
        name, title, normal = "loss", "loss", "falls"
    return _compared(name, now, first, title=title, normal=normal, is_normal=not _rings(now, "reward_fell", "diverged"))


def _differing(now: Numbers, first: Numbers) -> VitalSign | None:
    has_risen = now.get("reward/mean", 0.0) > first.get("reward/mean", math.inf)
    is_solved = has_risen and not _rings(now, "reward_fell", "collapse")  # perhaps: then equal rewards are normal
    same = now.get("reward/same_in_group")
    if same is None:
        return None
    return VitalSign(
        title="groups with equal rewards",
        value=f"{same:.0%}",
        normal="under 80 %; more once the task is solved",
        is_normal=(same < 1 or is_solved) and not _rings(now, "standstill", "no_signal"),
    )


def _entropy(now: Numbers, first: Numbers) -> VitalSign | None:
    normal = "falls slowly; near 0 only where the reward is high"
    return _compared("entropy", now, first, title="entropy", normal=normal, is_normal=not _rings(now, "collapse"))


def _mismatch(now: Numbers) -> VitalSign | None:
    """Of fresh samples if there are any: staleness has no part in it."""
    for name, most, normal in (
        ("mismatch/fresh_mean", 0.05, "under 0.05 nats per token"),
        ("mismatch/mean", 1.0, "under 1 nat per token (0.05 where max_staleness = 0)"),
    ):
        if (value := now.get(name)) is not None:
            return VitalSign(
                title="trainer and engine apart", value=f"{value:.2g}", normal=normal, is_normal=value <= most
            )
    return None


def _idle(now: Numbers) -> VitalSign | None:
    sides = {"learner": now.get("learner/idle_ratio"), "engines": now.get("rollout/idle_ratio")}
    known = {name: value for name, value in sides.items() if value is not None}
    if not known:
        return None
    return VitalSign(
        title="idle",
        value=", ".join(f"{name} {value:.0%}" for name, value in known.items()),
        normal="one of them near 0 %",
        is_normal=min(known.values()) <= 0.5,
    )


def _compared(name: str, now: Numbers, first: Numbers, *, title: str, normal: str, is_normal: bool) -> VitalSign | None:
    if name not in now:
        return None
    value = f"{now[name]:.3g}" + (f", was {first[name]:.3g}" if name in first else "")
    return VitalSign(title=title, value=value, normal=normal, is_normal=is_normal)


def _rings(now: Numbers, *names: str) -> bool:
    return any(now.get(f"alarm/{name}") for name in names)


def verdict(
    now: Numbers, findings: Iterable[Finding], rang: Mapping[str, int] | None = None
) -> tuple[bool | None, str]:
    """Return whether the run is healthy, None if that is not clear, and why, in one line.

    findings  of a run that is up; without any, the alarms of its newest step count
    rang      alarm -> the last step at which it was on
    """
    wrong = [f"{finding.cause}; {finding.cost} -> {finding.remedy}" for finding in sorted(findings, key=_urgency)]
    ringing = [CONDITIONS[name] for name in ALARMS if now.get(name)]
    wrong = wrong or [condition.line(f"the learner {condition.message}") for condition in ringing]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return False, f"not healthy: {wrong[0]}{more}"
    if not now:
        return None, "no step is trained yet"
    if rang:
        name, step = max(rang.items(), key=lambda item: item[1])
        return None, f"no alarm now, but until step {step} the learner {CONDITIONS[name].message}"
    return True, "healthy: no fault and no alarm"


_ORDER: Final = [condition.fault for condition in CONDITIONS.values()]


def _urgency(finding: Finding) -> tuple[bool, int]:
    """Sort key: what holds up or stops the run, then what ruins the model, then what costs speed."""
    return (finding.fault in _ORDER, _ORDER.index(finding.fault) if finding.fault in _ORDER else 0)
