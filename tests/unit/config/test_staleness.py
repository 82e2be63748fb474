"""[staleness] of the run file: settings reach the loop, and impossible settings are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.adapters import registry
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config import RunConfig, tables
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
    "parts that wait": ({"parts": "alone", "eviction": "wait"}, 'parts = "alone" leaves out what eviction = "wait"'),
    "tokens that wait": ({"parts": "tokens", "eviction": "wait"}, 'parts = "tokens" leaves out what eviction = "wait"'),
    "tokens in sync": (
        {"parts": "tokens", "mode": "sync"},
        'parts = "tokens" needs run.mode = "async": sync',
    ),
    "tokens one step off": ({"parts": "tokens", "mode": "one_step_off"}, "one_step_off trains no answer that new"),
    "parts of nothing": ({"parts": "token"}, "parts must be one of 'whole', 'alone', 'tokens', got 'token'"),
    "weights that do not fall": ({"weight": "exponential", "weight_rate": 0.0}, "weight_rate must be > 0, got 0.0"),
    "unknown weight": ({"weight": "quadratic"}, "weight must be one of 'exponential', 'inverse', 'linear'"),
    "unknown rule": ({"learning_rate": "sqrt"}, "learning_rate must be one of 'ess_sqrt', 'ess_linear', got 'sqrt'"),
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
        ({"parts": "alone"}, False),
        ({"parts": "tokens"}, False),
        ({"eviction": "drop"}, False),
    ],
)
def test_wait_eviction_is_the_default_unless_old_groups_are_handled_otherwise(
    section: dict[str, Any], waits: bool
) -> None:
    assert run_config(**section).staleness.waits is waits


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
    weight = learner._batcher._age_weight
    assert weight is not None
    assert weight([0, 4]).tolist() == pytest.approx([1.0, 0.2])
