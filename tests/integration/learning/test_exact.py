"""run.exact: what the engine sampled with and what the learner trains with are equal to the bit, and it learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import exact
from tests.harness.learning import demo_run, memory_bus, train


def exact_run(folder: Path, **changes: dict[str, Any]) -> RunConfig:
    """The demo's task with exact logprobs.  changes: keys of sections"""
    demo_task.write(folder)
    run = demo_run(folder)
    given: dict[str, dict[str, Any]] = {
        "run": {"exact": True, "steps": 3, "mode": "sync"},
        "engine": {"device": "cpu", "options": {"threads": 1}},
        "learner": {"device": "cpu", "threads": 1},
        "rollout": {"temperature": 0.7},
    }
    for name in {*given, *changes}:
        section = dataclasses.replace(getattr(run, name), **given.get(name, {}) | changes.get(name, {}))
        run = dataclasses.replace(run, **{name: section})
    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_logprobs_of_engine_and_learner_are_equal_to_the_bit(dtype: str, tmp_path: Path) -> None:
    """Rows of many lengths, decoded beside each other and trained in rectangles; and how far apart they are without."""
    rows = await train(exact_run(tmp_path, model={"dtype": dtype}), memory_bus())
    assert [row["mismatch/max"] for row in rows] == [0.0] * 3
    assert rows[-1]["weights/version"] == 3
    if dtype == "float32":  # 16 bits hide what a tiny model loses
        ordinary = await train(exact_run(tmp_path, run={"exact": False, "name": "ordinary"}), memory_bus())
        assert max(row["mismatch/max"] for row in ordinary) > 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"learner": {"backend": "megatron"}}, 'learner.backend = "megatron" fuses'),
        ({"engine": {"kind": "sglang"}}, 'engine.kind = "sglang" on cpu rounds in another way'),
        ({"learner": {"device": "cuda"}}, "on cpu rounds in another way than a learner on cuda"),
        ({"engine": {"options": {"threads": 2}}}, "set both to the same number"),
    ],
)
def test_parts_that_round_in_other_ways_are_refused(changes: Any, reason: str, tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    run = exact_run(tmp_path)
    for name, values in changes.items():
        run = dataclasses.replace(run, **{name: dataclasses.replace(getattr(run, name), **values)})
    with pytest.raises(ConfigError, match=reason):
        exact.check(run)
