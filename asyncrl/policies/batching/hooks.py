"""Functions of the user's own on what is trained and logged: algorithm.hooks of the run file.

A hook is a class (made once, without arguments) with at least one of these methods. Each sees what the hooks before it
returned; None changes nothing.

    group(group) -> TrajectoryGroup | None      every group that arrives with answers, also those that filters reject
                                                next: rewards, reward parts, rewards of turns, and fewer tokens to train
    batch(batch, groups) -> Batch | None        the sequences of a step before they are packed: tokens left out,
                                                advantages, loss weights (``Batch.without`` leaves out whole sequences)
    row(step, metrics) -> Mapping | None        what every sink writes for a step: names to numbers

Arrays are read-only copies: a hook returns replace(...) of what it got. Advantage and loss weight of a token that is
left out of a mask become 0.

They must give the same for the same input: a resumed learner and `asyncrl replay` ask ``group`` and ``batch`` again.
What the log holds never changes, so `asyncrl audit` and `asyncrl samples` show what workers sent.

Tests: tests/unit/policies/batching/test_hooks.py, tests/integration/learning/test_data.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import plugins
from asyncrl.errors import AsyncRLError, ConfigError, FilterError
from asyncrl.messages import Trajectory, TrajectoryGroup, replace
from asyncrl.messages.user_copies import own_group, read_only
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.policies.metric import Histogram, Metric

METHODS: Final = {"group": ("group",), "batch": ("batch", "groups"), "row": ("step", "metrics")}
"""What a hook may have, and the arguments."""
_KEPT: Final = ("tokens", "prompt_tokens", "behavior_logprobs", "version_spans", "rollout", "part")
"""What a hook cannot change of an answer: the past."""
_ARRAYS: Final = ("tokens", "response_mask", "behavior_logprobs", "advantages", "loss_weights", "staleness")
_KEPT_OF_SEQUENCE: Final = (
    *("tokens", "behavior_logprobs", "staleness", "temperature"),
    *("support", "experts", "model_outputs", "likeliest"),
)


class Hooks:
    """The hooks of a run, by their names in the run file."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Make the hooks. Raises ConfigError."""
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"algorithm.hooks: {twice[0]!r} is named twice; name it once")
        self._hooks = {name: _make(name) for name in names}

    def group(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group as the hooks change it. Raises FilterError if one raises or returns what cannot be."""
        for name, call in self._calls("group"):
            try:
                with plugins.contain_exits():
                    made = call(own_group(group))
                group = group if made is None else _changed_group(made, group)
            except Exception as error:  # user code may raise anything
                raise FilterError(f"{name}.group raised {plugins.describe_raised(error)}") from error
        return group

    def batch(self, batch: Batch, groups: Sequence[TrajectoryGroup], *, has_advantages: bool = True) -> Batch:
        """Return the batch as the hooks change it. Raises FilterError if one raises or returns what cannot be.

        has_advantages  whether the batch has its advantages; False if they wait for outputs of other models
        """
        for name, call in self._calls("batch"):
            try:
                with plugins.contain_exits():
                    made = call(_own_batch(batch), list(map(own_group, groups)))
                batch = batch if made is None else _changed_batch(made, batch, has_advantages=has_advantages)
            except Exception as error:  # user code may raise anything
                raise FilterError(f"{name}.batch raised {plugins.describe_raised(error)}") from error
        return batch

    def row(self, step: int, row: Mapping[str, Metric]) -> Mapping[str, Metric]:
        """Return the row as the hooks change it. Raises AsyncRLError if one raises: it ends the run, as a sink does."""
        for name, call in self._calls("row"):
            try:
                with plugins.contain_exits():
                    made = call(step, dict(row))
                row = row if made is None else _changed_row(made)
            except Exception as error:  # user code may raise anything
                raise AsyncRLError(f"{name}.row raised {plugins.describe_raised(error)}") from error
        return row

    def _calls(self, method: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        for name, hook in self._hooks.items():
            if (call := getattr(hook, method, None)) is not None:
                yield f"algorithm.hooks: {name}", call


def _make(name: str) -> Any:
    where = "algorithm.hooks"
    kind = plugins.load(name, where=where, kind=type)
    methods = {method: its for method in METHODS if (its := getattr(kind, method, None)) is not None}
    if not methods:
        raise ConfigError(f"{where}: {name!r} has none of {', '.join(f'{method}()' for method in METHODS)}")
    hook = plugins.make(kind, where=where, name=name)
    for method in methods:
        wanted = f"{where}: {name!r} must have def {method}(self, {', '.join(METHODS[method])})"
        plugins.check_call(getattr(hook, method), METHODS[method], wanted=wanted)
    return hook


def _changed_group(made: Any, group: TrajectoryGroup) -> TrajectoryGroup:
    """Return ``group`` with what a hook may change. Raises TypeError or ValueError."""
    if not isinstance(made, TrajectoryGroup):
        raise TypeError(f"it must return a TrajectoryGroup or None, not {made!r:.50}")
    if len(made.trajectories) != len(group.trajectories):
        raise ValueError(
            f"it returned {len(made.trajectories)} of {len(group.trajectories)} answers, and all are in the baseline; "
            "leave tokens out of response_mask, or a whole answer with Batch.without in batch()"
        )
    pairs = zip(made.trajectories, group.trajectories, strict=True)
    changed: TrajectoryGroup = replace(group, trajectories=tuple(_changed(one, before) for one, before in pairs))
    return changed


def _changed(one: Trajectory, before: Trajectory) -> Trajectory:
    for field in _KEPT:
        if not np.array_equal(getattr(one, field), getattr(before, field)):
            raise ValueError(f"it changed {field} of an answer, which is what was sampled")
    if (one.response_mask & ~before.response_mask).any():
        raise ValueError("it trains tokens that the policy did not sample")
    if not one.response_mask.any():
        raise ValueError("it left out every token of an answer; do that with Batch.without in batch()")
    if not np.isfinite([one.reward, *one.reward_parts.values()]).all():
        raise ValueError(f"the reward of an answer is {one.reward}, with parts {one.reward_parts}")
    changed: Trajectory = replace(
        before,
        response_mask=read_only(one.response_mask),
        reward=float(one.reward),
        reward_parts={name: float(value) for name, value in one.reward_parts.items()},
        turn_rewards=one.turn_rewards,
        resumed=min(before.resumed, int(one.response_mask.sum())),
    )
    return changed


def _own_batch(batch: Batch) -> Batch:
    """Return the batch for a hook: with arrays that it cannot write to, and metrics of its own."""
    own: Batch = replace(
        batch,
        sequences=[
            replace(one, **{name: read_only(getattr(one, name)) for name in _ARRAYS}) for one in batch.sequences
        ],
        metrics=dict(batch.metrics),
    )
    return own


def _changed_batch(made: Any, batch: Batch, *, has_advantages: bool) -> Batch:
    """Return ``batch`` with what a hook may change. Raises TypeError or ValueError."""
    if not isinstance(made, Batch):
        raise TypeError(f"it must return a Batch or None, not {made!r:.50}")
    if list(map(len, made.sequences)) != list(map(len, batch.sequences)) or (
        made.mini_batch_sizes != batch.mini_batch_sizes
    ):
        raise ValueError("it must return the batch's sequences, each as long as before")
    if made.advantage_inputs is not batch.advantage_inputs:
        raise ValueError("it changed advantage_inputs; change rewards in group(), or advantages of the sequences")
    pairs = zip(made.sequences, batch.sequences, strict=True)
    sequences = [_changed_sequence(one, before) for one, before in pairs]
    if not has_advantages and any(one.advantages.any() for one in sequences):
        raise ValueError(
            "it set advantages, which this algorithm computes only at the step; change rewards in group(), or the "
            "loss_weights"
        )
    count = sum(int(np.count_nonzero(one.response_mask)) for one in sequences)
    metrics = _changed_row(made.metrics) | {"length/trained_tokens": float(count)}
    changed: Batch = replace(batch, sequences=sequences, num_tokens=count, metrics=metrics)
    return changed


def _changed_sequence(one: TrainingSequence, before: TrainingSequence) -> TrainingSequence:
    for field in _KEPT_OF_SEQUENCE:
        new, old = getattr(one, field), getattr(before, field)
        if not (new is old or (isinstance(old, np.ndarray | float) and np.array_equal(new, old))):
            raise ValueError(f"it changed {field} of a sequence, which is what was sampled")
    mask = one.response_mask
    if mask.dtype != np.bool_ or mask.shape != before.response_mask.shape:
        raise ValueError(f"response_mask must be bool[{len(before)}], not {mask.dtype}{list(mask.shape)}")
    if (mask & ~before.response_mask).any():
        raise ValueError("it trains tokens that were not to be trained: not sampled, or too old")
    numbers = {name: _numbers(getattr(one, name), mask, name) for name in ("advantages", "loss_weights")}
    changed: TrainingSequence = replace(before, response_mask=mask, **numbers)
    return changed


def _numbers(values: Any, mask: NDArray[np.bool_], name: str) -> NDArray[np.float32]:
    """Return ``values`` as f32[T], 0 outside ``mask``. Raises ValueError."""
    found = np.asarray(values, np.float32)
    if found.shape != mask.shape or not np.isfinite(found[mask]).all():
        raise ValueError(f"{name} must be {len(mask)} finite numbers")
    return np.where(mask, found, np.float32(0))


def _changed_row(made: Any) -> dict[str, Metric]:
    """Return a row that a hook returned. Raises TypeError or ValueError if it is none."""
    row = dict(made)
    for name, value in row.items():
        if not isinstance(name, str) or name == "step" or not isinstance(value, Histogram | Real):
            raise TypeError(f"{name!r:.50}: {value!r:.50} is no metric: a name (not step) and a number, as float(...)")
    return {name: value if isinstance(value, Histogram) else float(value) for name, value in row.items()}
