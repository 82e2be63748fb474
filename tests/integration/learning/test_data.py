"""In-process runs whose data is more than one file of prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.data import demo_task
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.environments.builtin import single_turn
from asyncrl.environments.port import Generate
from asyncrl.messages import PromptGroup, Trajectory, TrajectoryGroup
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.evaluation.results import Answered
from asyncrl.rewards.port import Sample
from tests import ROOT

pytestmark = pytest.mark.slow

SEEN: Counter[tuple[str, str, int]] = Counter()
TOGETHER: Counter[tuple[str, int]] = Counter()


def reward(sample: Sample) -> float:
    """The demo's reward; also records what it was asked to judge: file, reward name and length of the answer."""
    SEEN[(sample.dataset, sample.reward, len(sample.trajectory.tokens))] += 1
    return demo_task.reward(sample).value


class Together:
    """Makes all samples of a group, the last one first and one after the other; records its data set and their
    number."""

    makes_groups = True

    def __init__(self, tokenizer: Any) -> None: ...

    async def __call__(self, prompt: PromptGroup, generates: Sequence[Generate]) -> list[Trajectory]:
        TOGETHER[(prompt.dataset, len(generates))] += 1
        made = [await single_turn(prompt, one, index=0) for one in reversed(generates)]
        return made[::-1]


async def held_out(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """The rollout function of an evaluation's data set."""
    TOGETHER[(prompt.dataset, 1)] += 1
    return await single_turn(prompt, generate, index=index)


def best(answered: Sequence[Answered]) -> dict[str, float]:
    """Metrics of an evaluation."""
    return {"best": max(max(one.rewards) for one in answered)}


def run_of(tmp_path: Path, **overrides: object) -> asyncrl.Run:
    table: dict[str, object] = {
        "bus.kind": "memory",
        "run.directory": str(tmp_path / "runs"),
        "run.steps": 4,
        "learner.backend": "reference",
        "learner.groups_per_batch": 4,
        "rollout.workers": 1,
        "metrics.console": False,
    }
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return asyncrl.Run.from_file(ROOT / "examples" / "demo.toml", overrides=table | named)


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_files_by_weight_whose_rows_have_rewards_and_limits_of_their_own(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    plain = demo_task.prompts()
    short = [row | {"rm": "short", "how": {"max_new_tokens": 2, "stop": ["7"]}} for row in plain]
    files = [
        {"path": lines(tmp_path / "plain.jsonl", plain), "weight": 1.0},
        {
            "path": lines(tmp_path / "short.jsonl", short),
            "name": "short",
            "weight": 3.0,
            "function": "tests.integration.learning.test_data:Together",
        },
    ]
    name = "tests.integration.learning.test_data:reward"
    SEEN.clear()
    TOGETHER.clear()
    run = run_of(
        tmp_path,
        model__path=str(tmp_path / "model"),
        data__path="",
        data__files=files,
        data__reward_key="rm",
        data__sampling_key="how",
        reward__kind=name,
        reward__rows={"short": name},
    )
    result = await run.train()
    assert (result.exit_code, result.steps) == (0, 4)
    assert {(dataset, judged) for dataset, judged, _ in SEEN} == {("plain.jsonl", ""), ("short", "short")}
    assert max(length for dataset, _, length in SEEN if dataset == "short") == 2
    assert set(TOGETHER) == {("short", 8)}
    assert sum(TOGETHER.values()) * 8 == sum(count for (dataset, *_), count in SEEN.items() if dataset == "short")
    assert max(length for dataset, _, length in SEEN if dataset == "plain.jsonl") > 2


async def test_a_row_is_trained_at_the_temperature_and_over_the_tokens_it_was_sampled_from(tmp_path: Path) -> None:
    """Its mismatch with the engine is rounding, as where nothing was cut. Answers have a context of 20 tokens."""
    demo_task.write(tmp_path)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.6, "top_p": 1.0},
        {"top_k": 3},
        {"temperature": 1.4},
        {},
        {"max_context_tokens": 12},
    ]
    rows = [row | {"how": ways[n % len(ways)]} for n, row in enumerate(demo_task.prompts())]
    run = run_of(
        tmp_path,
        model__path=str(tmp_path / "model"),
        data__path=lines(tmp_path / "rows.jsonl", rows),
        data__sampling_key="how",
        data__max_prompt_tokens=10,
        rollout__top_p=0.8,
        rollout__max_context_tokens=20,
        rollout__max_new_tokens=64,
        rollout__min_new_tokens=0,
        run__mode="sync",
    )
    result = await run.train()
    assert (result.exit_code, result.steps) == (0, 4)
    for line in run.open().metrics():
        assert 1 < line["rollout/support_mean"] < 50
        assert line["mismatch/max"] < 1e-4
        assert line["length/trained_mean"] < 20


class Counted:
    """A hook: sees every group, halves the reward of every other, leaves out a sequence, and says so in the row."""

    def __init__(self) -> None:
        self.groups = 0

    def group(self, group: TrajectoryGroup) -> None:
        self.groups += 1

    def batch(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> Batch:
        return batch.without([0])

    def row(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        return metrics | {"mine/groups": float(self.groups)}


def odd(group: TrajectoryGroup) -> bool | str:
    return True if group.group_id % 2 else "even"


def newest_first(group: TrajectoryGroup, oldest_version: int) -> int:
    return -group.group_id


async def test_hooks_an_order_and_reasons_of_filters_are_the_users_own(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    TOGETHER.clear()
    here = "tests.integration.learning.test_data"
    of_sets = {"function": f"{here}:held_out", "metrics": f"{here}:best"}
    held = {"name": "held", "path": str(tmp_path / "prompts.jsonl"), "limit": 2, **of_sets}
    run = run_of(
        tmp_path,
        model__path=str(tmp_path / "model"),
        data__path=str(tmp_path / "prompts.jsonl"),
        algorithm__hooks=[f"{here}:Counted"],
        algorithm__filters=[f"{here}:odd"],
        staleness__order=f"{here}:newest_first",
        evaluation__datasets=[held],
    )
    result = await run.train()
    assert (result.exit_code, result.steps) == (0, 4)
    assert result.metrics["staleness/filtered/odd/even"] == result.metrics["staleness/filtered_groups"] > 0
    assert TOGETHER[("held", 1)] == 4  # before and after the run
    best_of = [line["evaluation/held/best"] for line in run.open().metrics() if "evaluation/held/best" in line]
    assert len(best_of) == 2
    assert all(0 <= value <= 1 for value in best_of)
    assert 0 <= result.metrics["reward/pass@1"] <= result.metrics["reward/pass@8"] <= 1
    assert result.metrics["mine/groups"] >= 2 * 4 * 3  # before the filter, which leaves every other


async def test_conversations_are_learned_by_what_the_assistant_says(tmp_path: Path) -> None:
    """The user's turns are noise, which cannot be learned. The assistant answers the same each time."""
    model = make_tiny_model(tmp_path / "model", seed=0)
    talks = [
        [
            {"role": "user", "content": f"{a} {b}"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": f"{b}-{a}"},
            {"role": "assistant", "content": "two"},
        ]
        for a in range(10)
        for b in range(10)
    ]
    run = run_of(
        tmp_path,
        model__path=str(model),
        run__steps=20,
        data__path=lines(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks]),
        data__conversation_key="messages",
        data__chat_template=True,
        data__max_prompt_tokens=64,
        rollout__function="given",
        rollout__group_size=1,
        rollout__max_new_tokens=64,
        engine__kind="none",
        engine__options={},
        reward__kind="none",
        algorithm__name="sft",
        algorithm__correction="none",
        learner__groups_per_batch=16,
        learner__learning_rate=1e-2,
    )
    result = await run.train()
    rows = list(asyncrl.open_run(run.folder).metrics())
    assert (result.exit_code, len(rows)) == (0, 20)
    assert rows[0]["loss"] > 3.0 and rows[-1]["loss"] < 0.1
    assert rows[0]["length/trained_tokens"] == 16 * 2 * 4  # "one<eos>" and "two<eos>"
