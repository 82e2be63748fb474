"""User code gets its own tables, and arrays that nobody can write to: it cannot change what is trained."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl import config
from asyncrl.actors.learner.group_filters import ask, sample_group
from asyncrl.actors.rollout.group_rules import check_rollout
from asyncrl.errors import RewardError
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory
from asyncrl.messages.user_copies import own_prompt, read_only
from asyncrl.rewards.load import load_reward
from asyncrl.rewards.port import Sample
from tests.harness.rewards import load, sample

PROMPT = PromptGroup(
    group_id=0,
    prompt_tokens=np.arange(3, dtype=np.int32),
    group_size=2,
    sampling=SamplingParams(max_new_tokens=4),
    label=["5"],
    metadata={"k": [1]},
)


def rolled_out() -> tuple[Trajectory, Trajectory]:
    """Return what a rollout function made, and what the worker keeps of it."""
    made = sample().trajectory
    (kept,) = check_rollout(made, PROMPT, index=0, num_resumed=0, context_tokens=100)
    return made, kept


@pytest.mark.parametrize("name", ["tokens", "response_mask", "behavior_logprobs"])
def test_a_rollout_function_that_reuses_its_arrays_changes_nothing(name: str) -> None:
    made, kept = rolled_out()
    before = getattr(kept, name).copy()
    getattr(made, name)[:] = 7 if name == "tokens" else 0
    assert np.array_equal(getattr(kept, name), before)


@pytest.mark.parametrize("name", ["tokens", "response_mask", "behavior_logprobs"])
def test_no_array_of_a_trajectory_can_be_made_writable(name: str) -> None:
    array = getattr(rolled_out()[1], name)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)


@pytest.mark.parametrize("shape", [(0,), (3,), (0, 0, 0), (2, 3, 1)])
def test_a_read_only_copy_is_equal(shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    copied = read_only(array)
    assert copied.dtype == array.dtype and copied.shape == shape and np.array_equal(copied, array)


def test_each_sample_of_a_rollout_function_has_its_own_tables() -> None:
    first, second = own_prompt(PROMPT), own_prompt(PROMPT)
    first.metadata["k"].append(2)
    first.metadata["seen"] = True
    first.label.append("6")
    assert (second.label, second.metadata) == (PROMPT.label, PROMPT.metadata) == (["5"], {"k": [1]})


def writes(sample: Sample) -> float:
    sample.metadata.setdefault("seen", []).append(sample.completion)  # type: ignore[attr-defined]
    sample.label.append("6")
    sample.trajectory.reward_parts["mine"] = 1.0
    return float(len(sample.metadata["seen"]) + len(sample.label))


async def writes_async(samples: list[Sample]) -> list[float]:
    return [writes(sample) for sample in samples]


def writes_tokens(sample: Sample) -> float:
    sample.trajectory.tokens[:] = 0
    return 1.0


@pytest.mark.parametrize("name", ["writes", "writes_async"])
async def test_what_a_reward_writes_is_seen_by_no_other_sample(name: str) -> None:
    label: list[str] = ["5"]
    metadata: dict[str, Any] = {}
    samples = [sample(text, label=label, metadata=metadata) for text in "ab"]
    found = await load(f"{__name__}:{name}")(samples)
    assert [(one.value, one.parts) for one in found] == [(3.0, {}), (3.0, {})]  # type: ignore[union-attr]
    assert (label, metadata) == (["5"], {}) and samples[0].trajectory.reward_parts == {}


async def test_parts_of_a_reward_do_not_see_what_another_part_writes() -> None:
    parts = {name: config.reward.RewardPart(kind=f"{__name__}:writes") for name in "xy"}
    reward = load_reward(config.RewardSection(kind="parts", parts=parts))
    (found,) = await reward([sample("a", label=["5"])])
    assert found.parts == {"x": 3.0, "y": 3.0}  # type: ignore[union-attr]
    await reward.close()


async def test_a_reward_that_writes_to_tokens_fails_in_a_line() -> None:
    made = Sample(
        prompt="",
        completion="",
        label=None,
        metadata={},
        trajectory=rolled_out()[1],
        prompt_tokens=PROMPT.prompt_tokens,
    )
    with pytest.raises(RewardError, match="raised ValueError: assignment destination is read-only "):
        await load(f"{__name__}:writes_tokens")([made])
    await asyncio.sleep(0)


def test_a_filter_cannot_change_reward_parts() -> None:
    group = sample_group()

    def keep(group: Any) -> bool:
        for one in group.trajectories:
            one.reward_parts["mine"] = 1.0
        return True

    assert ask(keep, group) and all(one.reward_parts == {} for one in group.trajectories)
