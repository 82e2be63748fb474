"""run.exact: what the engine sampled with and what the learner trains with are equal to the bit, and it learns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrl.config import RunConfig
from asyncrl.config.run import PoolSection
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import exact
from tests.harness.learning import demo_run, memory_bus, train

ON_GPU: Final[dict[str, Any]] = {"engine": {"kind": "sglang", "device": "cuda"}, "learner": {"device": "cuda"}}


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


@pytest.mark.parametrize(("dtype", "stored"), [("float32", ""), ("bfloat16", ""), ("float32", "bfloat16")])
async def test_logprobs_of_engine_and_learner_are_equal_to_the_bit(dtype: str, stored: str, tmp_path: Path) -> None:
    """Rows of many lengths, decoded beside each other and trained in rectangles; and how far apart they are without.

    stored: dtype that config.json names, instead of its own
    """
    run = exact_run(tmp_path, model={"dtype": dtype})
    file = Path(run.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ({"dtype": stored} if stored else {})))
    rows = await train(run, memory_bus())
    assert [row["mismatch/max"] for row in rows] == [0.0] * 3
    assert rows[-1]["weights/version"] == 3
    if (dtype, stored) == ("float32", ""):  # 16 bits hide what a tiny model loses
        ordinary = await train(exact_run(tmp_path, run={"exact": False, "name": "ordinary"}), memory_bus())
        assert max(row["mismatch/max"] for row in ordinary) > 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"learner": {"backend": "megatron"}}, 'learner.backend = "megatron" fuses'),
        ({"engine": {"kind": "sglang"}}, 'engine.kind = "sglang" on cpu rounds in another way'),
        ({"learner": {"device": "cuda"}}, "on cpu rounds in another way than a learner on cuda"),
        ({"engine": {"options": {"threads": 2}}}, "set both to the same number"),
        ({"rollout": {"pools": {"p": PoolSection(options={"threads": 2})}}}, "rollout.pools.p.options.threads = 2"),
        ({**ON_GPU, "rollout": {"top_p": 0.9}}, "use top_p = 1.0 and top_k = 0"),
        ({**ON_GPU, "weights": {"quantization": "fp8"}}, '"fp8" rounds the weights of engines alone'),
        (
            {**ON_GPU, "rollout": {"pools": {"p": PoolSection(options={"tensor_parallel": 2})}}},
            "rollout.pools.p.options: tensor_parallel = 2 adds in another order",
        ),
    ],
)
def test_parts_that_round_in_other_ways_are_refused(changes: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        exact.check(exact_run(tmp_path, **changes))


@pytest.mark.parametrize(
    ("entries", "changes", "reason"),
    [
        ({}, {}, None),
        ({}, ON_GPU, None),
        ({"architectures": ["LlamaForCausalLM"]}, {}, None),
        ({"architectures": ["LlamaForCausalLM"]}, ON_GPU, 'not tried with engine.kind = "sglang"; use one of Qwen3'),
        ({"use_sliding_window": True}, {}, "exact attention has no sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "exact attention has no sliding window"),
    ],
)
def test_models_that_are_not_computed_to_the_bit_are_refused(
    entries: dict[str, Any], changes: Any, reason: str | None, tmp_path: Path
) -> None:
    run = exact_run(tmp_path, **changes)
    file = Path(run.model.path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    with pytest.raises(ConfigError, match=reason) if reason else contextlib.nullcontext():
        exact.check(run)
