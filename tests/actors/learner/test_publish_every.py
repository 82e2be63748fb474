"""weights.every_steps: versions that nobody needs are not published."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig, tables
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import WEIGHTS
from tests.harness.fakes import Engine, Loop, run_worker, worker


async def test_only_each_third_version_and_the_last_are_published(bus_factory: Any, tmp_path: Path) -> None:
    loop, engine = Loop(await bus_factory(), tmp_path, steps=8, max_staleness=2, publish_every=3), Engine()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), engine)))
        await loop.run_learner()
    assert loop.backend.steps == 8
    assert set(engine.loads) <= {3, 6, 8}
    assert (await loop.bus.states(WEIGHTS))[""].policy_version == 8
    assert loop.recorder.rows[-1]["weights/version"] == 8


def built(*, function: str = "single_turn", every_steps: int) -> RunConfig:
    table = {
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl"},
        "rollout": {"function": function},
        "weights": {"every_steps": every_steps},
    }
    return tables.build(RunConfig, table, "run.toml")


@pytest.mark.parametrize(
    ("every_steps", "problem"),
    [(0, "every_steps must be"), (2, 'every_steps 2 needs rollout.function = "given"')],
)
def test_where_engines_need_every_version_it_is_refused_in_one_line(every_steps: int, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        built(every_steps=every_steps)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_where_nobody_samples_any_number_of_steps_may_lie_between() -> None:
    assert built(function="given", every_steps=1000).weights.every_steps == 1000
