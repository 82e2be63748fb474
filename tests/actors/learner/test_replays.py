"""A run that trains good groups again: the bound holds, the window is unaffected, and the audit accounts for
everything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.config.staleness import StalenessSection
from asyncrl.errors import BackendError, ConfigError
from tests.harness.fakes import Engine, Loop, run_all, run_worker, worker


@pytest.mark.parametrize("times", [1, 3])
async def test_good_groups_are_trained_again_within_the_bound(bus_factory: Any, tmp_path: Path, times: int) -> None:
    staleness = {"replay_groups": 1, "replay_times": times}
    loop = Loop(await bus_factory(), tmp_path, steps=8, checkpoint_every=2, max_staleness=3, staleness=staleness)
    await run_all(loop, worker(await bus_factory(), Engine(), max_staleness=3))
    rows = loop.recorder.rows
    replayed = [row["staleness/replayed_groups"] for row in rows]
    assert replayed[0] == 0
    assert sum(replayed) >= 1
    assert max(row["staleness/max"] for row in rows) <= 3
    assert loop.table.counts["trained"] == 16  # each counts once in the window
    documents = [sum(len(micro.boundaries) - 1 for micro in step) for step in loop.backend.trained]
    assert documents == [2 * (2 + int(again)) for again in replayed]
    made = await account_with(RecordedRun(loop.directory), loop.bus)
    assert made.problems == ()
    assert (made.trained, made.replayed, made.duplicated) == (16, sum(replayed), 0)


async def test_a_learner_that_is_resumed_begins_with_none_and_the_audit_is_clean(
    bus_factory: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 8, "checkpoint_every": 2, "staleness": {"replay_groups": 1, "replay_times": 4}}
    first = Loop(await bus_factory(), tmp_path, **options)

    def die(step: int) -> None:
        if step == 5:
            raise BackendError("killed")

    first.backend.before_step = die
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(BackendError, match="killed"):
        await first.run_learner()
    second = Loop(await bus_factory(), tmp_path, **options)
    await second.run_learner(resume=True)
    await task
    assert second.recorder.rows[0]["staleness/replayed_groups"] == 0
    made = await account_with(RecordedRun(second.directory), second.bus)
    assert made.problems == ()
    assert made.trained == 16


def test_a_bound_of_no_version_has_nothing_to_replay() -> None:
    for mode, max_staleness in (("sync", 4), ("async", 0)):
        with pytest.raises(ConfigError, match="replay_groups needs a bound of at least one version"):
            StalenessSection(replay_groups=1, max_staleness=max_staleness).check(mode=mode, group_size=2)
    StalenessSection(replay_groups=1).check(mode="one_step_off", group_size=2)
