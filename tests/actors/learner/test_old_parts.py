"""staleness.parts = "alone": too stale parts of a group are not trained; the rest of the group is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.learner import history
from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.messages import PromptGroup, Trajectory, VersionSpan, replace
from asyncrl.policies.audit.entries import steps
from tests.harness.fakes import Engine, Loop, run_all, worker


async def begins_at_the_start(prompt: PromptGroup, generate: Generate, *, index: int) -> list[Trajectory]:
    """Return a first part sampled by the run's initial weights, and a fresh second part."""
    turns = TrajectoryBuilder(prompt.prompt_tokens)
    turns.answered(await generate(turns.tokens))
    fresh = turns.trajectory()
    first = VersionSpan(start=0, incarnation=0, policy_version=0)
    own: NDArray[np.int32] = np.array([1, 2, 3], np.int32)
    return [replace(fresh, version_spans=(first,), prompt_tokens=own), fresh]


async def test_parts_that_are_too_old_are_left_out_and_their_groups_are_trained(
    bus_factory: Any, tmp_path: Path
) -> None:
    """With a bound of 1, only steps 1 and 2 may train samples of version 0. Each later step of two groups with two
    rollouts leaves out its four first parts."""
    loop = Loop(
        await bus_factory(), tmp_path, steps=5, max_staleness=1, function="mine:agent", staleness={"parts": "alone"}
    )
    await run_all(loop, worker(await bus_factory(), Engine(), rollout=begins_at_the_start, max_staleness=1))
    rows = loop.recorder.rows
    assert [row["staleness/old_parts"] for row in rows] == [0.0, 0.0, 4.0, 4.0, 4.0]
    assert max(row["staleness/max"] for row in rows) <= 1.0
    lines = [entry for entry, _, _ in steps(history.read(tmp_path / "history.jsonl"))]
    assert [entry.old_parts for entry in lines] == [0, 0, 4, 4, 4]
