"""Run files of the demo's task for these tests."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import RunConfig
from tests.harness.learning import demo_run

HERE = "tests.integration.undo.rewards"
COMMON = (
    "checkpoint.every_steps=2",
    "checkpoint.keep_log=true",
    "checkpoint.keep=9",
    "weights.keep=20",
    "staleness.order=in_order",
    "rollout.workers=2",
)


def there(task: Path, directory: Path, *overrides: str) -> RunConfig:
    return demo_run(task, *COMMON, f"run.directory={directory}", *overrides)
