"""What hooks may change of what is trained, and what not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from asyncrl.errors import AsyncRLError, ConfigError, FilterError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, replace
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch as batches
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.hooks import Hooks

HERE = "tests.unit.policies.batching.test_hooks"


class Doubled:
    """Doubles rewards, leaves out first tokens and the second answer of a batch, and says what it saw."""

    def __init__(self) -> None:
        self.seen = 0

    def group(self, group: TrajectoryGroup) -> TrajectoryGroup:
        self.seen += 1
        made: TrajectoryGroup = replace(
            group,
            trajectories=tuple(
                replace(one, reward=2 * one.reward, response_mask=one.response_mask & (np.arange(len(one.tokens)) > 0))
                for one in group.trajectories
            ),
        )
        return made

    def batch(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> Batch:
        assert len(groups) == 1
        return batch.without([1])

    def row(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        return metrics | {"mine/seen": float(self.seen)}


class Watches:
    """Changes nothing."""

    rewards: ClassVar[list[list[float]]] = []

    def group(self, group: TrajectoryGroup) -> None:
        self.rewards.append(group.rewards)


class Bad:
    """Does what ``how`` says."""

    how = ""

    def group(self, group: TrajectoryGroup) -> Any:
        one, rest = group.trajectories[0], group.trajectories[1:]
        if self.how == "raise":
            raise OSError("no disk")
        every: dict[str, dict[str, Any]] = {
            "tokens": {"tokens": one.tokens + 1},
            "mask": {"response_mask": np.ones(4, np.bool_)},
            "nothing": {"response_mask": np.zeros(4, np.bool_)},
            "reward": {"reward": np.nan},
        }
        changes = every.get(self.how, {})
        return {"fewer": replace(group, trajectories=rest), "type": 3}.get(
            self.how, replace(group, trajectories=(replace(one, **changes), *rest))
        )


class Nothing:
    """Has no hook."""


def group() -> TrajectoryGroup:
    one = Trajectory(
        tokens=np.arange(4, dtype=np.int32),
        response_mask=np.array([True, True, False, True]),
        behavior_logprobs=np.full(4, -1.0, np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        reward=0.0,
    )
    return TrajectoryGroup(
        group_id=0, prompt_tokens=np.array([5], np.int32), trajectories=(one, replace(one, reward=1.0))
    )


def test_hooks_change_rewards_masks_sequences_and_rows_in_turn() -> None:
    Watches.rewards.clear()
    hooks = Hooks([f"{HERE}:Watches", f"{HERE}:Doubled", f"{HERE}:Watches"][:2])
    changed = hooks.group(group())
    assert (changed.rewards, Watches.rewards) == ([0.0, 2.0], [[0.0, 1.0]])
    assert [one.response_mask.tolist() for one in changed.trajectories] == [[False, True, False, True]] * 2
    built = batches.build(
        [changed], algorithm=resolve(ALGORITHMS["grpo"]), policy_version=0, max_staleness=0, resume_points={}
    )
    left = hooks.batch(built, [changed])
    assert [one.response_mask.sum() for one in left.sequences] == [2, 0]
    assert left.num_tokens == 2
    assert not left.sequences[1].loss_weights.any()
    np.testing.assert_array_equal(left.sequences[0].advantages, built.sequences[0].advantages)
    assert hooks.row(1, {"loss": 0.5}) == {"loss": 0.5, "mine/seen": 1.0}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "Bad.group raised OSError: no disk"),
        ("tokens", "it changed tokens of an answer"),
        ("mask", "trains tokens that the policy did not sample"),
        ("nothing", "left out every token"),
        ("reward", "the reward of an answer is nan"),
        ("fewer", "returned 1 of 2 answers"),
        ("type", "must return a TrajectoryGroup or None, not 3"),
    ],
)
def test_what_a_hook_cannot_do_is_named(how: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bad, "how", how)
    with pytest.raises(FilterError, match=words):
        Hooks([f"{HERE}:Bad"]).group(group())


def test_a_hook_that_is_none_is_refused_and_a_row_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.hooks: .*Nothing' has none of group\(\), batch\(\), row\(\)"):
        Hooks([f"{HERE}:Nothing"])
    monkeypatch.setattr(Doubled, "row", lambda self, step, metrics: 1 / 0)
    with pytest.raises(AsyncRLError, match="Doubled.row raised ZeroDivisionError"):
        Hooks([f"{HERE}:Doubled"]).row(1, {})


def built() -> Batch:
    return batches.build(
        [group()], algorithm=resolve(ALGORITHMS["grpo"]), policy_version=0, max_staleness=0, resume_points={}
    )


def with_first(batch: Batch, **changes: Any) -> Batch:
    return replace(batch, sequences=[replace(batch.sequences[0], **changes), *batch.sequences[1:]])  # type: ignore[no-any-return]


def write_mask(batch: Batch) -> None:
    batch.sequences[0].response_mask[:] = True


class OfBatch:
    """Changes a batch as ``change`` does."""

    change: ClassVar[Any] = None

    def batch(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> Any:
        return type(self).change(batch)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (write_mask, "read-only"),
        (lambda batch: with_first(batch, tokens=batch.sequences[0].tokens + 1), "it changed tokens"),
        (lambda batch: with_first(batch, temperature=0.5), "it changed temperature"),
        (lambda batch: with_first(batch, advantages=np.full(5, np.nan)), "advantages must be 5 finite numbers"),
        (lambda batch: with_first(batch, loss_weights=np.ones(4)), "loss_weights must be 5 finite numbers"),
        (lambda batch: with_first(batch, response_mask=np.ones(5, np.int64)), r"must be bool\[5\], not int64"),
        (lambda batch: replace(batch, advantage_inputs=replace(batch.advantage_inputs)), "changed advantage_inputs"),
        (lambda batch: replace(batch, metrics={"a": "b"}), "'a': 'b' is no metric"),
    ],
)
def test_what_a_hook_cannot_do_with_a_batch_is_named(change: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfBatch, "change", staticmethod(change))
    with pytest.raises(FilterError, match=rf"OfBatch.batch raised .*{words}"):
        Hooks([f"{HERE}:OfBatch"]).batch(built(), [group()])


def test_a_mask_that_a_hook_shortens_takes_weights_and_counts_along(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.array([False, True, False, False, False])
    monkeypatch.setattr(OfBatch, "change", staticmethod(lambda batch: with_first(batch, response_mask=mask)))
    before = built()
    made = Hooks([f"{HERE}:OfBatch"]).batch(before, [group()])
    assert (before.num_tokens, made.num_tokens, made.metrics["length/trained_tokens"]) == (6, 4, 4.0)
    assert np.flatnonzero(made.sequences[0].loss_weights).tolist() == [1]
    assert before.metrics["length/trained_tokens"] == 6


def test_advantages_that_the_step_would_compute_anew_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        OfBatch, "change", staticmethod(lambda batch: with_first(batch, advantages=np.ones(5, np.float32)))
    )
    with pytest.raises(FilterError, match="which this algorithm computes only at the step"):
        Hooks([f"{HERE}:OfBatch"]).batch(built(), [group()], has_advantages=False)


class Async:
    async def batch(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> None: ...


class OneArgument:
    def row(self, metrics: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["Async"], r"must have def batch\(self, batch, groups\), it is async"),
        (["OneArgument"], r"must have def row\(self, step, metrics\): too many"),
        (["Watches", "Watches"], "Watches' is named twice"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_before_the_run(names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Hooks([f"{HERE}:{name}" for name in names])


@pytest.mark.parametrize("row", [{"a": "x"}, {"step": 3.0}, {1: 1.0}, {"a": None}])
def test_a_row_of_what_is_no_metric_is_named(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubled, "row", lambda self, step, metrics: row)
    with pytest.raises(AsyncRLError, match="is no metric"):
        Hooks([f"{HERE}:Doubled"]).row(1, {"loss": 1.0})
