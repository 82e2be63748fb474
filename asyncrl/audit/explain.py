"""What moved a metric, for `asyncrl explain`: which worker, engine, task, age, length or prompt did.

The steps up to the one in question are split where the metric changed most: *before* and *since*. A set of groups is
**suspect** if it moved against the other groups of the same steps: what all of them did, such as learning, cancels.
Two tests look at the groups of a value of a field and at all others, before and since; the stronger one counts:

  means   (m1 - m0) - (M1 - M0), in standard errors of group means (a difference in differences)
  shapes  the Kolmogorov-Smirnov distance of the answers' rewards: 1.1 in place of 1.0 moves the mean little, and the
          distribution entirely. Answers to one prompt are alike, so they count for fewer (Kish, 1965: the design effect
          1 + (k - 1) x intraclass correlation of groups of k answers)

A value that is new, as a worker that joined, is compared with the others since then. ``bisect`` finds the smallest set
of values whose absence removes the change, with at most two tests for each halving.

Tests: tests/unit/audit/test_explain.py, tests/integration/undo/test_explain.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.audit.recorded_groups import Fate, PromptFinder, fields_of
from asyncrl.bus.port import Record
from asyncrl.messages import TrajectoryGroup

SUSPECT: Final = 4.0
"""Standard errors from which on a value is suspect: chance gives this once in 16,000 values."""
LEAST_GROUPS: Final = 3
"""Groups of a value since the change, below which nothing is said about it."""
STEPS_BEFORE: Final = 10
FIELDS: Final = ("worker", "engine", "task", "age", "length", "prompt")
"""Fields that are looked at, in this order where two explain the same."""
_FEWEST_STEPS: Final = 2
_KS_TO_Z: Final = 1.45
"""The KS statistic 1.36 and 1.96 standard errors are both what chance exceeds in one of twenty cases."""
_MOST: Final = 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A trained group.  fields: by name, as texts;  value: of the metric;  answers: their rewards"""

    group: int
    step: int
    fields: Mapping[str, str]
    value: float
    answers: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """What the groups of one value of a field did.  before: NaN if it is new;  strength: in standard errors"""

    field: str
    value: str
    groups: int
    share: float
    before: float
    since: float
    others_before: float
    others_since: float
    strength: float


def observe(
    record: Record[TrajectoryGroup], fate: Fate, *, metric: str, finder: PromptFinder | None = None
) -> Observed:
    """Return what is known of a trained group. ``metric``: reward/..., length/..., or any other, for the reward"""
    group = record.message
    assert group is not None
    facts = fields_of(record, fate, finder=finder)
    firsts = [parts[0] for parts in group.rollouts]
    answers = [one.reward for one in firsts]
    part = metric.removeprefix("reward/")
    if part != metric and all(part in one.reward_parts for one in firsts):
        answers = [one.reward_parts[part] for one in firsts]
    if metric.startswith("length/"):
        answers = [float(sum(int(one.response_mask.sum()) for one in parts)) for parts in group.rollouts]
    named = {name: str(facts[name]) for name in ("worker", "engine", "task", "prompt") if facts.get(name, "") != ""}
    return Observed(
        group=group.group_id,
        step=fate.step,
        fields=named | {"age": _range(facts["age"]), "length": _range(facts["length"])},
        value=float(np.mean(answers)),
        answers=tuple(answers),
    )


def _range(number: float) -> str:
    """Return the range of a number: 0, 1, 2-3, 4-7, 8-15, ..."""
    whole = int(number)
    if whole < 2:
        return str(whole)
    low = 1 << (whole.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def change_point(values: Mapping[int, float], *, step: int) -> int:
    """Return since when the metric is as it is at ``step``: where its mean changed most, in standard errors."""
    steps = [one for one in sorted(values) if one <= step and math.isfinite(values[one])]
    best, strongest = step, -1.0
    for place in range(_FEWEST_STEPS, len(steps)):
        old = np.array([values[one] for one in steps[max(0, place - STEPS_BEFORE) : place]])
        new = np.array([values[one] for one in steps[place:]])
        found = _z(old, new)
        if found > strongest:
            best, strongest = steps[place], found
    return best


def _z(old: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """Return the difference of the means in standard errors, with one variance for both: one step has none."""
    freedom = len(old) + len(new) - 2
    pooled = ((len(old) - 1) * _variance(old) + (len(new) - 1) * _variance(new)) / freedom
    spread = math.sqrt(pooled * (1 / len(old) + 1 / len(new)))
    difference = abs(float(new.mean() - old.mean()))
    return min(_MOST, difference / spread) if spread else (_MOST if difference else 0.0)


def _variance(values: NDArray[np.float64]) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def scan(observed: Sequence[Observed], *, since: int, fields: Sequence[str] = FIELDS) -> list[Suspect]:
    """Return what every value of the fields did since ``since`` against all other groups, strongest first."""
    found: list[Suspect] = []
    for field in fields:
        of: dict[str, list[Observed]] = defaultdict(list)
        for one in observed:
            if field in one.fields:
                of[one.fields[field]].append(one)
        if len(of) < 2:
            continue
        found += [
            suspect
            for value, ones in of.items()
            if (suspect := _suspect(field, value, ones, _without(observed, ones), since=since)) is not None
        ]
    # Of two values each is "the others" of the other one, and as strong; the one that changed more itself comes first.
    return sorted(
        found,
        key=lambda one: (-round(one.strength, 6), FIELDS.index(one.field), -_own_change(one), one.value),
    )


def _own_change(one: Suspect) -> float:
    return math.inf if math.isnan(one.before) else abs(one.since - one.before)


def _without(observed: Sequence[Observed], ones: Sequence[Observed]) -> list[Observed]:
    left = {one.group for one in ones}
    return [one for one in observed if one.group not in left]


def _suspect(
    field: str, value: str, ones: Sequence[Observed], others: Sequence[Observed], *, since: int
) -> Suspect | None:
    (old, new), (old_others, new_others) = (
        ([one for one in of if one.step < since], [one for one in of if one.step >= since]) for of in (ones, others)
    )
    if len(new) < LEAST_GROUPS or len(new_others) < LEAST_GROUPS:
        return None
    has_before = len(old) >= LEAST_GROUPS and len(old_others) >= LEAST_GROUPS
    means, spread = 0.0, 0.0
    for sign, part in ((1, new), (-1, new_others), *(((-1, old), (1, old_others)) if has_before else ())):
        values = np.array([one.value for one in part])
        means += sign * float(values.mean())
        spread += _variance(values) / len(values)
    by_means = abs(means) / math.sqrt(spread) if spread else (_MOST if abs(means) > 1e-9 else 0.0)
    by_shapes = _shape(new, new_others) - (_shape(old, old_others) if has_before else 0.0)
    return Suspect(
        field=field,
        value=value,
        groups=len(new),
        share=len(new) / (len(new) + len(new_others)),
        before=_mean(old) if has_before else math.nan,
        since=_mean(new),
        others_before=_mean(old_others),
        others_since=_mean(new_others),
        strength=min(_MOST, max(by_means, _KS_TO_Z * by_shapes)),
    )


def _mean(ones: Sequence[Observed]) -> float:
    return float(np.mean([one.value for one in ones])) if ones else math.nan


def _shape(ones: Sequence[Observed], others: Sequence[Observed]) -> float:
    """Return the scaled Kolmogorov-Smirnov distance between the answers of two sets of groups."""
    first, second = (np.sort([answer for one in of for answer in one.answers]) for of in (ones, others))
    at = np.concatenate([first, second])
    distance = np.abs(
        np.searchsorted(first, at, side="right") / len(first) - np.searchsorted(second, at, side="right") / len(second)
    ).max()
    counts = [_effective(ones), _effective(others)]
    return float(distance) * math.sqrt(counts[0] * counts[1] / sum(counts))


def _effective(ones: Sequence[Observed]) -> float:
    """Return the number of independent answers that say as much as these answers, in groups of alike ones."""
    total = sum(len(one.answers) for one in ones)
    size = total / len(ones)
    if size <= 1 or len(ones) < 2:
        return float(len(ones))
    between = size * _variance(np.array([one.value for one in ones]))
    within = float(np.mean([_variance(np.array(one.answers)) for one in ones]))
    if not within:
        return float(len(ones))
    correlation = min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))
    return total / (1 + (size - 1) * correlation)


def is_quiet(observed: Sequence[Observed], *, since: int, field: str) -> bool:
    """Return whether no value of a field is suspect."""
    return all(one.strength < SUSPECT for one in scan(observed, since=since, fields=(field,)))


async def bisect(values: Sequence[str], is_gone_without: Callable[[Collection[str]], Awaitable[bool]]) -> list[str]:
    """Return the smallest set of ``values`` whose absence removes the change; empty if half of them never does.

    values  the likeliest first. At most two tests for each halving, so at most 2 log2(n)
    """
    # Example: w3 of w3, w0, w1, w2. Without w3 and w0 it is gone; without w3 alone it is gone: 2 tests for 4 values.
    found: list[str] = []
    left = list(values)
    while len(left) > 1:
        half = (len(left) + 1) // 2 if len(left) > 2 else 1
        first, second = left[:half], left[half:]
        if await is_gone_without(first):
            left = found = first
        elif await is_gone_without(second):
            left = found = second
        else:
            break
    return found


def predicate_of(field: str, values: Collection[str], *, since: int) -> str:
    """Return the predicate that `asyncrl regrade --retract` takes for these groups; "" for a range of numbers."""
    if field not in ("worker", "engine", "task", "prompt"):
        return ""
    quoted = [f'"{value}"' for value in values]
    named = f"{field} == {quoted[0]}" if len(quoted) == 1 else f"{field} in ({', '.join(quoted)})"
    return f"{named} and step >= {since}"


def as_json(one: Suspect) -> dict[str, Any]:
    table = {name: getattr(one, name) for name in one.__dataclass_fields__}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in table.items()}
