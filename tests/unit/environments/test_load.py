"""A user's rollout.function: how it is found, checked and created; and the example.

tests/docs/test_guides.py tests the guide pages.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.data import demo_task
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.environments.builtin import single_turn
from asyncrl.environments.load import FUNCTIONS
from asyncrl.environments.port import Generate, RolloutFn
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import ConfigError, RewardError
from asyncrl.launch.checks.run_file import check
from asyncrl.messages import PromptGroup, Trajectory
from asyncrl.rewards.load import load_reward
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes, rollouts
from tests.harness.rollouts import on_demo, prompt_of, sample_of, saying

HERE = "tests.unit.environments.test_load"


# -- names in a run file -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    calls: int = 2


class Play:
    def __init__(self, tokenizer: Any, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options

    async def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        return await single_turn(prompt, generate, index=index)


class RefusesToBeMade(Play):
    def __init__(self, tokenizer: Any, options: Options) -> None:
        raise ValueError("no such tool")


class TakesTooLittle(Play):
    def __init__(self, tokenizer: Any) -> None: ...


class Uncallable:
    def __init__(self, tokenizer: Any, options: Options) -> None: ...


class Blocking(Uncallable):
    def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        raise NotImplementedError


class WithoutIndex(Uncallable):
    async def __call__(self, prompt: PromptGroup, generate: Generate) -> Trajectory:
        raise NotImplementedError


async def play(prompt: PromptGroup, generate: Generate, *, index: int, calls: int = 2) -> Trajectory:
    return await single_turn(prompt, generate, index=index)


def blocking(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    raise NotImplementedError


async def without_index(prompt: PromptGroup, generate: Generate) -> Trajectory:
    raise NotImplementedError


async def wants_more(prompt: PromptGroup, generate: Generate, reward: float, *, index: int) -> Trajectory:
    raise NotImplementedError


def load(name: str, *, tokenizer: Any = None, **options: Any) -> RolloutFn:
    """Load like the harness does; a bare name is a function of this file."""
    address = name if ":" in name or name in FUNCTIONS else f"{HERE}:{name}"
    return rollouts.load(address, tokenizer=tokenizer, **options)


def test_a_class_is_made_with_the_workers_tokenizer_and_its_options() -> None:
    tokenizer = object()
    made = load("Play", tokenizer=tokenizer, calls=5)
    assert isinstance(made, Play)
    assert (made.tokenizer, made.options) == (tokenizer, Options(calls=5))


CALL = r"async def __call__\(self, prompt, generate, \*, index\)"
REFUSED = {
    "blocking": (r"must be async def blocking\(prompt, generate, \*, index\), it is not async$", {}),
    "without_index": (r"must be async def without_index\(.*\), it takes \(prompt, generate\)$", {}),
    "wants_more": (r"it takes \(prompt, generate, reward, \*, index\)$", {}),
    "Blocking": (rf"must be {CALL}, it is not async$", {}),
    "WithoutIndex": (rf"must be {CALL}, it takes \(self, prompt, generate\)$", {}),
    "Uncallable": (rf"must be {CALL}, it is a class without __call__$", {}),
    "TakesTooLittle": (r"made with \(tokenizer, options\), as its module has an Options, it takes \(tokenizer\)$", {}),
    "Play": (r"^rollout.options: unknown key 'call'; did you mean 'calls'\?$", {"call": 1}),
    "play": (rf"^rollout.options: '{HERE}:play' takes no options, got calls", {"calls": 1}),
    "single_turn": (r"^rollout.options: 'single_turn' takes no options, got calls", {"calls": 1}),
    "RefusesToBeMade": (r"making '.*:RefusesToBeMade' raised ValueError: no such tool ", {}),
    "os:sep": (r"'os:sep' is a str, not a function or class$", {}),
    "nothing": (r"has no 'nothing'", {}),
}


@pytest.mark.parametrize(("name", "reason", "options"), [(name, *row) for name, row in REFUSED.items()], ids=REFUSED)
def test_what_could_not_be_called_is_refused_in_one_line(name: str, reason: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load(name, **options)
    assert str(caught.value).startswith("rollout.") and "\n" not in str(caught.value)


# -- in a worker -------------------------------------------------------------------------------------------------------


async def trained_on(rollout: RolloutFn, directory: Path) -> dict[str, Any]:
    """Return the metrics of one step with reward.kind = "none"."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop = fakes.Loop(bus, directory, steps=1, function="mine:rollout")
    reward = load_reward(config.RewardSection(kind="none"))
    async with asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(bus, fakes.Engine(), rollout=rollout, reward=reward)))
        await loop.run_learner()
    return dict(loop.recorder.rows[-1])


async def test_the_reward_of_a_rollout_function_stands_where_there_is_no_other(tmp_path: Path) -> None:
    """Samples 0 and 1 of each group get 0.25 and 0.75."""

    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        turns = TrajectoryBuilder(prompt.prompt_tokens)
        turns.add_answer(await generate(turns.tokens))
        turns.add_observation([5, 6])
        turns.add_answer(await generate(turns.tokens))
        return turns.trajectory(reward=0.25 + 0.5 * index, reward_parts={"index": float(index)})

    metrics = await trained_on(rollout, tmp_path)
    assert (metrics["reward/mean"], metrics["reward/index"]) == (0.5, 0.5)
    assert metrics["length/trained_mean"] == 10  # two answers of 4 and an observation of 2


async def test_a_rollout_function_that_sets_no_reward_fails_its_group_with_the_reason(tmp_path: Path) -> None:
    """Group 0 has a sample without a reward. If that counted as 0, it would be trained silently."""

    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        turns = TrajectoryBuilder(prompt.prompt_tokens)
        turns.add_answer(await generate(turns.tokens))
        return turns.trajectory() if prompt.group_id == index == 0 else turns.trajectory(reward=1.0)

    metrics = await trained_on(rollout, tmp_path)
    assert (metrics["reward/mean"], metrics["staleness/failed_groups"]) == (1.0, 1)
    with pytest.raises(RewardError, match=r"the rollout function set no reward; give one to trajectory\(reward="):
        await load_reward(config.RewardSection(kind="none"))([sample_of(reward=float("nan"))])


async def test_a_sample_that_took_too_long_and_has_no_reward_says_so() -> None:
    late = sample_of(reward=float("nan"))
    late = replace(late, trajectory=replace(late.trajectory, reward_parts={"timeout": 1.0}))
    with pytest.raises(RewardError, match=r"longer than rollout.options.timeout_seconds.*set rollout.options.time"):
        await load_reward(config.RewardSection(kind="none"))([late])


# -- the example -------------------------------------------------------------------------------------------------------


def test_its_mistakes_are_found_before_anything_starts(demo: Path) -> None:
    wrong = ["rollout.options={question_rewards=1}"]
    with pytest.raises(ConfigError, match=r"^rollout.options: unknown key 'question_rewards'"):
        check(config.load(ROOT / "examples" / "calculator.toml", on_demo(demo) + wrong))


PLAYS = {
    "right question, right answer": ("7", "0", "700", 1.0),
    "right question, wrong answer": ("7", "3", "703", 0.5),
    "right answer, wrong question": ("1", "0", "120", 0.5),
    "no question": ("<eos>", "1", "1", 0.0),
}


@pytest.mark.parametrize(("question", "answer", "conversation", "reward"), PLAYS.values(), ids=PLAYS)
async def test_the_example_rewards_the_right_question_and_the_right_answer(
    question: str, answer: str, conversation: str, reward: float
) -> None:
    tokenizer = make_tokenizer(demo_task.DIGITS)
    calculate = load("examples.calculator:Calculator", tokenizer=tokenizer)
    prompt = prompt_of("567", tokenizer, label="0123", max_new_tokens=3)
    made = await calculate(prompt, saying(question, answer, tokenizer=tokenizer), index=0)
    assert tokenizer.decode(made.tokens, skip_special_tokens=True) == conversation
    assert (made.reward, sum(made.reward_parts.values()), made.response_mask.sum()) == (reward, reward, 2)
