"""[staleness] of the run file: settings reach the loop, and impossible settings are refused in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.adapters import registry
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config import LearnerSection, RunConfig, override, record, run_file, tables
from asyncrl.config.layout import Layout
from asyncrl.config.staleness_bound import beyond_what_was_shown, bound_for
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.build_learner import build_learner


def run_config(folder: Path = Path(), *, mode: str = "async", **staleness: Any) -> RunConfig:
    table = {
        "run": {"mode": mode, "directory": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl")},
        "learner": {"backend": "reference", "device": "cpu"},
        "engine": {"kind": "inprocess", "device": "cpu"},
        "reward": {"kind": "exact"},
        "staleness": staleness,
    }
    return tables.build(RunConfig, table, "run.toml")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "freshest first that waits": ({"order": "freshest_first", "eviction": "wait"}, 'eviction = "wait" waits for; use'),
    "discard that waits": (
        {"discard": "trajectories", "eviction": "wait"},
        'discard = "trajectories" leaves out what eviction = "wait"',
    ),
    "tokens that wait": (
        {"discard": "tokens", "eviction": "wait"},
        'discard = "tokens" leaves out what eviction = "wait"',
    ),
    "tokens in sync": (
        {"discard": "tokens", "mode": "sync"},
        'discard = "tokens" needs run.mode = "async": sync',
    ),
    "tokens one step off": ({"discard": "tokens", "mode": "one_step_off"}, "one_step_off trains no answer of several"),
    "discard of nothing": (
        {"discard": "token"},
        "discard must be one of 'groups', 'trajectories', 'tokens', got 'token'",
    ),
    "weights that do not fall": ({"weight": "exponential", "weight_rate": 0.0}, "weight_rate must be > 0, got 0.0"),
    "unknown weight": ({"weight": "quadratic"}, "weight must be one of 'exponential', 'inverse', 'linear'"),
    "unknown rule": ({"learning_rate": "sqrt"}, "learning_rate must be one of 'ess_sqrt', 'ess_linear', got 'sqrt'"),
    "negative": ({"max_staleness": -1}, 'max_staleness must be "auto" or >= 0 (0 trains on-policy), got -1'),
    "a word": ({"max_staleness": "none"}, """max_staleness must be a whole number or "auto", got 'none'"""),
    "no time": ({"wait_seconds": -1.0}, "wait_seconds must be >= 0 (0 is no limit), got -1.0"),
}


@pytest.mark.parametrize(("section", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_invalid_staleness_is_refused_with_a_remedy(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config(**section)
    assert str(raised.value).startswith("run.toml: staleness: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("section", "waits"),
    [
        ({}, True),
        ({"order": "in_order"}, True),
        ({"order": "freshest_first"}, False),
        ({"discard": "trajectories"}, False),
        ({"discard": "tokens"}, False),
        ({"eviction": "drop"}, False),
    ],
)
def test_wait_eviction_is_the_default_unless_old_groups_are_handled_otherwise(
    section: dict[str, Any], waits: bool
) -> None:
    assert run_config(**section).staleness.waits is waits


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ([], 8),
        (["learner.learning_rate=2.5e-6"], 8),
        (["learner.learning_rate=5e-6"], 4),
        (["learner.learning_rate=6e-6"], 3),  # 2e-5 / 6e-6 = 3.3
        (["learner.learning_rate=1e-4"], 1),
        (["learner.learning_rate=1e-5"], 2),
        (["learner.learning_rate=3e-3"], 4),  # a small model with random weights
        (["learner.learning_rate=5e-3"], 2),
        (["learner.learning_rate=1e-5", "learner.lora={rank = 4}"], 4),  # adapters have rates of their own
        (["learner.learning_rate=1e-4", "staleness.max_staleness=6"], 6),
        (["run.mode=one_step_off"], 1),
        (["learner.learning_rate=1e-6", "learner.steps_per_batch=4"], 5),  # 4e-6 a version
        (["learner.learning_rate=1e-3", "learner.steps_per_batch=4"], 3),
    ],
)
def test_the_bound_is_as_the_learning_rate_allows_unless_it_is_a_number(overrides: list[str], bound: int) -> None:
    table: dict[str, Any] = {"model": {"path": "model"}, "data": {"path": "prompts.jsonl"}}
    for item in overrides:
        override(table, item)
    run = run_file.from_table(table, where="run.toml")
    assert run.max_staleness == bound
    recorded = record.from_table(record.as_table(run), where="history.jsonl")
    assert recorded.staleness.max_staleness == run.staleness_bound  # whatever "auto" means to a later release


@pytest.mark.parametrize(
    "rate", [1e-320, 1e-7, 1e-6, 2.5e-6, 3e-6, 7e-6, 1e-5, 2e-5, 4e-5, 9e-4, 1e-3, 3e-3, 5e-3, 1e-2, 3e-2]
)
def test_nothing_speaks_against_the_default_bound_unless_one_version_is_too_many(rate: float) -> None:
    bound = bound_for(rate, steps=1, trains_adapters=False)
    said = beyond_what_was_shown(rate, bound, steps=1, trains_adapters=False, loss="ppo_clip")
    assert bound == 1 or not said
    if said:
        assert "x 1 version is" in said and "lower learner.learning_rate" in said and "max_staleness" not in said


@pytest.mark.parametrize(
    ("rate", "loss", "wanted"),
    [
        (3e-6, "ppo_clip", "tis_token a 135M model lost held-out reward, up to 0.06 at 4e-05; lower"),
        (2e-5, "reinforce", '"topr", correction = "none" (up to 0.07 at 0.00016) (docs'),
        (1e-5, "ppo_clip", "up to 0.06 at 8e-05; lower learner.learning_rate or staleness.max_staleness (docs"),
        (1e-3, "ppo_clip", "some runs there learned less than synchronous ones; lower"),  # random weights
        (9e-4, "ppo_clip", "up to 0.58 at 0.00032; lower"),  # nothing larger was measured
        (2e-5, "topr", "with topr a 135M model lost held-out reward, up to 0.07 at 0.00016; lower"),
        (2e-5, "cispo", "lower learner.learning_rate or staleness.max_staleness (docs"),  # a guard of its own
    ],
)
def test_what_was_lost_at_a_product_is_said_and_what_loses_less(rate: float, loss: str, wanted: str) -> None:
    said = beyond_what_was_shown(rate, 32 if rate >= 1e-3 else 8, steps=1, trains_adapters=False, loss=loss)
    assert wanted in said and "\n" not in said


def test_every_optimizer_step_of_a_version_counts() -> None:
    said = beyond_what_was_shown(5e-6, 2, steps=4, trains_adapters=False, loss="ppo_clip")
    assert said.startswith("learning rate 5e-06 x 2 versions of 4 steps is 4e-05, over 2e-05: ")


def test_the_algorithm_knows_the_rule_of_the_learning_rate() -> None:
    assert registry.algorithm(run_config(learning_rate="ess_sqrt")).learning_rate_rule == "sqrt"
    assert registry.algorithm(run_config(learning_rate="ess_linear")).learning_rate_rule == "linear"
    assert registry.algorithm(run_config()).learning_rate_rule == ""


async def test_the_run_file_reaches_the_loop(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    run = run_config(tmp_path, order="in_order", weight="linear")
    bus = MemoryBus(max_prompts=256, max_log_bytes=2**26, ack_seconds=60.0, max_message_bytes=2**23)
    learner, _ = await build_learner(run, bus=bus, resume=False)
    await learner.stop()
    assert learner._batcher._selection.order == "in_order"
    assert learner._batcher._run.staleness.weight == "linear"


def test_ranks_are_tensor_parallel_neighbours_then_context_then_data_then_stages() -> None:
    """16 ranks: 2 tensor x 2 context x 2 data x 2 stages, the fastest dimension first."""
    layout = Layout(ranks=16, tensor=2, context=2, pipeline=2)
    assert layout.data_parallel == 2
    assert [layout.context_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.share(rank) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [layout.stage(rank) for rank in range(16)] == [0] * 8 + [1] * 8


def test_outputs_come_from_one_rank_of_each_copy_with_the_last_stage() -> None:
    assert list(Layout(ranks=4, tensor=2).output_ranks) == [0, 2]
    assert list(Layout(ranks=16, tensor=2, context=2, pipeline=2).output_ranks) == [8, 12]


def test_an_export_is_made_by_the_first_copy_without_the_rest_of_its_rows() -> None:
    layout = Layout(ranks=16, tensor=2, context=2, pipeline=2)
    assert [rank for rank in range(16) if layout.is_exporter(rank)] == [0, 1, 8, 9]
    experts = Layout(ranks=8, expert=4)  # ranks of other copies export as well
    assert [rank for rank in range(8) if experts.is_exporter(rank)] == [0, 1, 2, 3]
    assert (layout.exporters, experts.exporters, Layout(ranks=4).exporters) == (4, 4, 1)


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ({}, 1),
        ({"tensor": 2}, 1),
        ({"tensor": 2, "is_sequence_parallel": True}, 2),
        ({"context": 2}, 4),
        ({"context": 2, "tensor": 4, "is_sequence_parallel": True}, 8),  # 2 parts of 2 pieces; 4 ranks share a part
    ],
    ids=["alone", "tensor", "sequence", "context", "both"],
)
def test_row_length_divides_among_ranks(sizes: dict[str, Any], multiple: int) -> None:
    assert Layout(ranks=8, **sizes).row_multiple == multiple


WRONG = {
    "ranks": (
        {"ranks": 6, "tensor": 2, "pipeline": 2},
        "ranks must be a multiple of tensor_parallel x pipeline_parallel (4), got 6",
    ),
    "experts": ({"ranks": 6, "expert": 4}, "ranks must be a multiple of expert_parallel (4), got 6"),
    "one stage": ({"virtual_pipeline": 2}, "set pipeline_parallel to 2 or more"),
    "sequence": ({"is_sequence_parallel": True}, "set tensor_parallel to 2 or more"),
}


@pytest.mark.parametrize(("sizes", "problem"), WRONG.values(), ids=WRONG.keys())
def test_incompatible_layout_sizes_are_refused(sizes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Layout(**sizes)


@pytest.mark.parametrize("key", ["ranks", "pipeline_parallel"])
def test_a_layout_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^learner: {key} must be > 0, got 0$"):
        tables.build(LearnerSection, {key: 0}, "learner")


def test_a_bound_that_the_run_chose_says_what_it_follows() -> None:
    table = record.as_table(run_config(), has_defaults=True) | {"staleness": {}}
    rated = {**table, "learner": {"backend": "megatron", "learning_rate": 1e-5}}
    adapted = {**table, "learner": {"backend": "megatron", "learning_rate": 1e-5, "lora": {"rank": 4}}}
    said = [tables.build(RunConfig, one, "run.toml").why_staleness_bound for one in (rated, adapted)]
    assert said == ["for learning_rate 1e-05", "for adapters"]
    assert run_config(max_staleness=4).why_staleness_bound == run_config(mode="sync").why_staleness_bound == ""
