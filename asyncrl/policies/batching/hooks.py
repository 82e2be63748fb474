"""Functions of the user's own on what is trained and logged: algorithm.hooks of the run file.

A hook is a class (made once, without arguments) with at least one of these methods. Each sees what the hooks before it
returned; None changes nothing.

    group(group) -> TrajectoryGroup | None      every group that arrives with answers, also those that filters reject
                                                next: rewards, reward parts, rewards of turns, and fewer tokens to train
    batch(batch, groups) -> Batch | None        the sequences of a step before they are packed: tokens left out,
                                                advantages, loss weights (``Batch.without`` leaves out whole sequences)
    row(step, metrics) -> Mapping | None        what every sink writes for a step

They must give the same for the same input: a resumed learner and `asyncrl replay` ask ``group`` and ``batch`` again.
What the log holds never changes, so `asyncrl audit` and `asyncrl samples` show what workers sent.

Tests: tests/unit/policies/batching/test_hooks.py, tests/integration/learning/test_data.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from asyncrl.config import plugins
from asyncrl.errors import AsyncRLError, ConfigError, FilterError
from asyncrl.messages import Trajectory, TrajectoryGroup, replace
from asyncrl.messages.user_copies import own_group
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.metric import Metric

METHODS: Final = ("group", "batch", "row")
_KEPT: Final = ("tokens", "prompt_tokens", "behavior_logprobs", "version_spans", "rollout", "part")
"""What a hook cannot change of an answer: the past."""


class Hooks:
    """The hooks of a run, by their names in the run file."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Make the hooks. Raises ConfigError."""
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

    def batch(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> Batch:
        """Return the batch as the hooks change it. Raises FilterError if one raises or returns what cannot be."""
        for name, call in self._calls("batch"):
            try:
                with plugins.contain_exits():
                    made = call(batch, groups)
                batch = batch if made is None else _changed_batch(made, batch)
            except Exception as error:  # user code may raise anything
                raise FilterError(f"{name}.batch raised {plugins.describe_raised(error)}") from error
        return batch

    def row(self, step: int, row: Mapping[str, Metric]) -> Mapping[str, Metric]:
        """Return the row as the hooks change it. Raises AsyncRLError if one raises: it ends the run, as a sink does."""
        for name, call in self._calls("row"):
            try:
                with plugins.contain_exits():
                    made = call(step, dict(row))
                row = row if made is None else dict(made)
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
    if not any(callable(getattr(kind, method, None)) for method in METHODS):
        raise ConfigError(f"{where}: {name!r} has none of {', '.join(f'{method}()' for method in METHODS)}")
    return plugins.make(kind, where=where, name=name)


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
        response_mask=one.response_mask,
        reward=one.reward,
        reward_parts=one.reward_parts,
        turn_rewards=one.turn_rewards,
        resumed=min(before.resumed, int(one.response_mask.sum())),
    )
    return changed


def _changed_batch(made: Any, batch: Batch) -> Batch:
    """Check a batch that a hook returned. Raises TypeError or ValueError."""
    if not isinstance(made, Batch):
        raise TypeError(f"it must return a Batch or None, not {made!r:.50}")
    if list(map(len, made.sequences)) != list(map(len, batch.sequences)) or (
        made.mini_batch_sizes != batch.mini_batch_sizes
    ):
        raise ValueError("it must return the batch's sequences, each as long as before")
    for one, before in zip(made.sequences, batch.sequences, strict=True):
        if (one.response_mask & ~before.response_mask).any():
            raise ValueError("it trains tokens that were not to be trained: not sampled, or too old")
    return made
