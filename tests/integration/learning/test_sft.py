"""Supervised fine-tuning on answers in the data, through the loop of reinforcement learning."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from asyncrl import config
from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines.null import NullEngine
from asyncrl.environments.builtin import given
from asyncrl.errors import BackendError, ConfigError, PromptError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.processes.gpus import placement
from asyncrl.launch.summary import summarize
from asyncrl.messages import ANY_INCARNATION, PromptGroup, SamplingParams, VersionSpan, WeightVersion, codec
from asyncrl.policies.groups.validation import GroupValidation
from asyncrl.policies.staleness.staleness import effective_version, per_token
from asyncrl.rewards.load import load_reward
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes
from tests.harness.learning import memory_bus, train

EXAMPLE = ROOT / "examples" / "sft.toml"
PAGE = ROOT / "docs" / "guides" / "data_and_rewards.md"


def sft_run(folder: Path, *overrides: str) -> RunConfig:
    """Return the example on the reference backend; ``folder`` holds the files of data.demo_task.write."""
    return config.load(
        EXAMPLE,
        [
            f"run.directory={folder / 'runs'}",
            f"model.path={folder / 'model'}",
            f"data.path={folder / 'prompts.jsonl'}",
            "learner.backend=reference",
            "metrics.console=false",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


def prompt(**changes: Any) -> PromptGroup:
    values = {
        "group_id": 3,
        "prompt_tokens": [1, 2],
        "group_size": 1,
        "sampling": SamplingParams(max_new_tokens=4),
        "response_tokens": [7, 8, 9],
        "policy_version": 5,
    }
    return PromptGroup(**(values | changes))


async def generate(tokens: Any, *, max_new_tokens: int | None = None) -> Any:
    raise AssertionError("nothing is to be generated")


# -- the parts ---------------------------------------------------------------------------------------------------------


async def test_a_given_answer_is_a_trajectory_of_no_policy() -> None:
    made = await given(prompt(), generate, index=0)
    assert made.tokens.tolist() == [7, 8, 9]
    assert made.response_mask.all() and not made.behavior_logprobs.any()
    assert made.version_spans == (VersionSpan(start=0, incarnation=ANY_INCARNATION, policy_version=5),)
    assert made.finish_reason == "stop"


async def test_a_longer_answer_is_cut_and_says_so() -> None:
    exactly = await given(prompt(response_tokens=[5, 6, 7, 8]), generate, index=0)
    assert (len(exactly.tokens), exactly.finish_reason) == (4, "stop")
    cut = await given(prompt(response_tokens=[5, 6, 7, 8, 9]), generate, index=0)
    assert (cut.tokens.tolist(), cut.finish_reason) == ([5, 6, 7, 8], "length")


async def test_a_prompt_without_an_answer_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="set data.response_key"):
        await given(prompt(response_tokens=[]), generate, index=0)


def test_the_answer_travels_with_its_prompt() -> None:
    sent = codec.decode(codec.encode(prompt()), PromptGroup)
    assert sent.response_tokens.dtype == np.int32
    assert (sent.response_tokens.tolist(), sent.policy_version) == ([7, 8, 9], 5)


def test_no_resume_makes_a_given_answer_older() -> None:
    """The learner fell back to version 4, then to 3. Samples of lost versions count as version 3; given answers keep
    theirs."""
    resume_points = {1: 4, 2: 3}
    spans = (VersionSpan(start=0, incarnation=ANY_INCARNATION, policy_version=7),)
    assert effective_version(spans[0], resume_points) == 7
    assert effective_version(VersionSpan(start=0, incarnation=0, policy_version=7), resume_points) == 3
    assert per_token(spans, length=2, policy_version=9, resume_points=resume_points).tolist() == [2, 2]
    assert per_token(spans, length=2, policy_version=5, resume_points=resume_points).tolist() == [0, 0]


async def test_no_engine_notes_versions_and_says_what_to_set_when_asked_to_generate() -> None:
    engine = NullEngine(Path("nowhere"), device="cpu", dtype="float32", version=(0, 0))
    await engine.start()
    await engine.load(WeightVersion(incarnation=1, policy_version=2, uri="nowhere"))
    assert engine.version == (1, 2)
    with pytest.raises(PromptError, match=r'set engine.kind = "sglang" or "inprocess", or rollout.function = "given"'):
        await engine.generate(np.array([1], np.int32), SamplingParams(max_new_tokens=1), seed=0)


async def test_no_reward_is_0_for_everything() -> None:
    made = await given(prompt(), generate, index=0)
    sample = fakes.Sample(
        prompt="", completion="", label=None, metadata={}, trajectory=made, prompt_tokens=np.zeros(1, np.int32)
    )
    assert [r.value for r in await load_reward(config.RewardSection(kind="none"))([sample, sample])] == [0.0, 0.0]


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "loss of samples": (["algorithm.name=grpo", "algorithm.advantage=reinforce"], "loss ppo_clip needs their behavior"),
    "no column": (['data.response_key=""'], "set data.response_key to their column"),
    "group": (["rollout.group_size=4"], '"given" would train it 4 times; use 1'),
    "correction": (["algorithm.correction=tis_token"], "algorithm.correction compares the policy with what sampled"),
    "unbiased kl": (["reference.kl_coef=0.1"], 'reference.kl = "unbiased" compares .*; use "k2"'),
    "ess learning rate": (["staleness.learning_rate=ess_sqrt"], 'staleness.learning_rate compares .*; use ""'),
    "no engine": (["rollout.function=single_turn"], '"none" generates nothing, but rollout.function = "single_turn"'),
    "own samples": (
        ["rollout.function=single_turn", "engine.kind=inprocess"],
        'data.response_key: "label" is imitated by rollout.function = "given"',
    ),
    "engine options": (["engine.options={threads=1}"], "engine.options: NullEngine takes no options"),
}


@pytest.mark.parametrize(("overrides", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_not_be_supervised_is_refused_in_one_line(folder: Path, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check(sft_run(folder, *overrides))
    assert "\n" not in str(caught.value)


def test_samples_that_nobody_rewards_are_refused_where_the_algorithm_looks_at_rewards(folder: Path) -> None:
    overrides = [
        "rollout.function=single_turn",
        "engine.kind=inprocess",
        'data.response_key=""',
        "rollout.group_size=4",
    ]
    with pytest.raises(ConfigError, match='reward.kind: "none" .* "single_turn" sets none, so grpo') as caught:
        check(sft_run(folder, *overrides, "algorithm.name=grpo"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.mode=sync"],
        ["reference.kl_coef=0.1", "reference.kl=k2"],
        ["algorithm.aggregation=seq_mean_token_mean"],
    ],
    ids=["example", "sync", "kl", "aggregation"],
)
def test_what_can_be_supervised_is_let_through(folder: Path, overrides: list[str]) -> None:
    assert "sft" in str(summarize(sft_run(folder, *overrides)))  # which checks first


def test_the_run_file_of_the_page_can_be_supervised(folder: Path, tmp_path: Path) -> None:
    (page,) = (block for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "given" in block)
    file = tmp_path / "run.toml"
    file.write_text(page)
    made = config.load(file, [f"model.path={folder / 'model'}", f"data.path={folder / 'prompts.jsonl'}"])
    check(made)
    assert made.algorithm.name == "sft"


def test_workers_without_a_model_take_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert str(placement(sft_run(folder))) == "learner 0"


# -- the loop ----------------------------------------------------------------------------------------------------------

ANSWERS = ["7", "20", "643", "1170", "05", "333", "26", "7410", "51", "0", "4567", "62"]
"""A dozen arbitrary answers, which can only be memorized, to the prompts 00, 01, ... 13 (octal)."""


@pytest.mark.slow
async def test_the_loss_falls_to_nothing_and_the_model_says_what_it_was_given(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{index:02o}", "label": answer} for index, answer in enumerate(ANSWERS)]
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = sft_run(
        folder,
        f"run.directory={tmp_path}",
        "run.steps=24",
        "learner.learning_rate=1e-2",
        f"data.path={data}",
        "learner.groups_per_batch=12",
    )
    steps = await train(run, memory_bus(), workers=2)
    losses = [step["loss"] for step in steps]
    # random weights: 8 digits and 4 special tokens are equally likely
    assert losses[0] == pytest.approx(np.log(12), abs=0.3)
    assert losses[-1] < 0.05
    assert steps[-1]["staleness/dropped_groups"] == 0
    assert {row["prompt"]: greedy(run, row["prompt"]) for row in rows} == {row["prompt"]: row["label"] for row in rows}


async def test_a_run_on_given_answers_reports_no_reward_and_no_staleness(folder: Path, tmp_path: Path) -> None:
    run = sft_run(folder, f"run.directory={tmp_path}", "run.steps=2")
    _, step = await train(run, memory_bus())
    absent = ("reward/", "mismatch/", "offpolicy/", "staleness/mean", "staleness/max", "staleness/histogram")
    assert "loss" in step
    assert not [name for name in step if name.startswith(absent)]


def greedy(run: RunConfig, text: str) -> str:
    """Return the trained model's greedy answer without <eos>. The model must generate <eos>."""
    weights = run.weights_directory / f"0-{run.run.steps}"
    tokenizer, model = load_tokenizer(weights), transformers.AutoModelForCausalLM.from_pretrained(weights)
    messages = [{"role": "user", "content": text}]
    prompt_text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt_text, add_special_tokens=False)["input_ids"]
    start = len(tokens)
    with torch.no_grad():
        while len(tokens) < start + 8 and tokens[-1] != tokenizer.eos_token_id:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert tokens[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(tokens[start:-1]))


def given_worker(bus: MemoryBus) -> Any:
    engine = NullEngine(Path("nowhere"), device="cpu", dtype="float32", version=(0, 0))
    return fakes.worker(bus, engine, rollout=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("bus_lost", [False, True], ids=["the bus goes on", "the bus is new"])
async def test_a_learner_that_falls_back_drops_no_answer(tmp_path: Path, bus_lost: bool) -> None:
    """It dies in step 8 with a checkpoint at 4. Answers of batches up to 10 are rolled back."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    settings: dict[str, Any] = {"steps": 16, "group_size": 1, "checkpoint_every": 4, "staleness": {"order": "in_order"}}
    not_sampled = GroupValidation(are_sampled=False)
    first = fakes.Loop(bus, tmp_path, **settings, validator=Validator(bus, validation=not_sampled))

    def die(step: int) -> None:
        if step == 7:
            raise BackendError("killed")

    first.backend.before_step = die
    worker = asyncio.create_task(fakes.run_worker(given_worker(bus)))
    with pytest.raises(BackendError, match="killed"):
        await first.run_learner()
    if bus_lost:
        worker.cancel()
        bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
        worker = asyncio.create_task(fakes.run_worker(given_worker(bus)))
    second = fakes.Loop(bus, tmp_path, **settings, validator=Validator(bus, validation=not_sampled))
    await second.run_learner(resume=True)
    await worker
    rows = second.recorder.rows
    assert [row["step"] for row in rows] == list(range(5, 17))
    assert rows[-1]["staleness/dropped_groups"] == 0
    assert max(row["staleness/max"] for row in rows) <= second.max_staleness
    assert min(row["staleness/mean"] for row in rows) >= 0
    assert len(second.table.done) == 32  # every answer once: 16 steps of two
