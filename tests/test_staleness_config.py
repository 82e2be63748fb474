"""[staleness] of the run file: what it says reaches the loop, and what cannot work is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl import app, tables
from asyncrl.bus.memory import MemoryBus
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError


def run_config(folder: Path = Path(), *, mode: str = "async", **staleness: Any) -> RunConfig:
    table = {
        "run": {"mode": mode, "directory": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl")},
        "learner": {"backend": "reference", "device": "cpu"},
        "staleness": staleness,
    }
    return tables.build(RunConfig, table, "run.toml")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no room to adapt": ({"adaptive": True, "smallest": 5}, "between smallest and max_staleness; got 5 > 4"),
    "adaptive without staleness": ({"adaptive": True, "mode": "sync"}, 'adaptive needs run.mode = "async"; sync has'),
    "crossed": ({"ess_low": 0.95}, "0 <= ess_low <= ess_high <= 1 must hold, got 0.95 and 0.9"),
    "no patience": ({"patience": 0}, "patience must be > 0, got 0"),
}


@pytest.mark.parametrize(("section", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_that_says_what_to_change(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config(**section)
    assert str(raised.value).startswith("run.toml: staleness: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_the_run_file_reaches_the_loop(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    run = run_config(tmp_path, adaptive=True, smallest=2, ess_low=0.3, ess_high=0.8, patience=7)
    bus = MemoryBus(max_prompts=256, max_log_bytes=2**26, ack_seconds=60.0, max_message_bytes=2**23)
    learner, _ = await app.build_learner(run, bus=bus, resume=False)
    await learner.stop()
    bound = learner._feed.bound
    assert (bound.bound, bound.largest, bound.smallest) == (4, 4, 2)
    assert (bound.low, bound.high, bound.patience) == (0.3, 0.8, 7)
