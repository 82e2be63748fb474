"""weights.every_steps: versions that nobody needs are not published, and staleness is counted in steps all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl import tables
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.topics import WEIGHTS
from tests.fakes import Engine, Loop, run_worker, worker

pytestmark = pytest.mark.timeout(60)


async def trained(bus_factory: Any, folder: Path, **changes: Any) -> tuple[Loop, Engine]:
    loop, engine = Loop(await bus_factory(), folder, **changes), Engine()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), engine)))
        await loop.run_learner()
    return loop, engine


async def test_only_each_third_version_and_the_last_are_published(bus_factory: Any, tmp_path: Path) -> None:
    loop, engine = await trained(bus_factory, tmp_path, steps=8, max_staleness=2, publish_every=3)
    assert loop.backend.steps == 8
    assert set(engine.loads) <= {3, 6, 8}
    assert (await loop.bus.states(WEIGHTS))[""].policy_version == 8


async def test_what_is_sampled_between_two_published_versions_is_as_stale_as_it_is(
    bus_factory: Any, tmp_path: Path
) -> None:
    """Version 0 alone is there for three steps: they train it at staleness 0, 1 and 2, the bound."""
    loop, _ = await trained(bus_factory, tmp_path, steps=9, max_staleness=2, publish_every=3)
    assert [row["staleness/max"] for row in loop.recorder.rows[:3]] == [0.0, 1.0, 2.0]
    assert max(row["staleness/max"] for row in loop.recorder.rows) <= 2


def built(*, mode: str = "async", function: str = "single_turn", max_staleness: int = 4, every_steps: int) -> RunConfig:
    table = {
        "run": {"mode": mode},
        "model": {"path": "model"},
        "data": {"path": "prompts.jsonl"},
        "rollout": {"function": function},
        "staleness": {"max_staleness": max_staleness},
        "weights": {"every_steps": every_steps},
    }
    return tables.build(RunConfig, table, "run.toml")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"every_steps": 0}, "every_steps must be"),
        ({"every_steps": 6}, "every_steps 6 is more than staleness.max_staleness + 1 = 5"),
        ({"every_steps": 2, "mode": "sync"}, 'every_steps 2 needs run.mode = "async"'),
        ({"every_steps": 2, "mode": "one_step_off"}, 'every_steps 2 needs run.mode = "async"'),
    ],
)
def test_what_would_starve_the_learner_is_refused_in_one_line(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        built(**settings)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_where_nobody_samples_any_number_of_steps_may_lie_between() -> None:
    assert built(function="given", every_steps=1000).weights.every_steps == 1000
    assert built(every_steps=5).weights.every_steps == 5
