"""Tokens over the bound are left out of training, and so are parts of rollouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.actors.learner import history
from asyncrl.actors.learner.sample_recorder import SampleRecorder
from asyncrl.audit.account import account_with
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.environments.builtin import single_turn
from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.messages import PromptGroup, Trajectory, VersionSpan, replace
from asyncrl.policies.audit.entries import steps
from tests.actors.learner.test_sample_recorder import read, written
from tests.harness.fakes import Engine, Loop, run_all, until, worker

BOUND = 2
ENDS_AT = 5
"""Version that samples the last two tokens of the late answer. Version 0 sampled the first two."""


def one_answer_takes_long(engine: Engine) -> Callable[..., Any]:
    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        answer = await single_turn(prompt, generate, index=index)
        if (prompt.group_id, index) != (0, 0):
            return answer
        await until(lambda: engine.version[1] >= ENDS_AT)
        incarnation, version = engine.version
        last = VersionSpan(start=2, incarnation=incarnation, policy_version=version)
        return replace(answer, version_spans=(answer.version_spans[0], last))

    return rollout


async def run_loop(bus_factory: Any, folder: Path, *, discard: str, **settings: Any) -> Loop:
    staleness = {"discard": discard, **settings.pop("staleness", {})}
    loop = Loop(
        await bus_factory(),
        folder,
        steps=9,
        checkpoint_every=2,
        max_staleness=BOUND,
        function="mine:agent",
        staleness=staleness,
        **settings,
    )
    engine = Engine()
    changes: dict[str, Any] = {"rollout": one_answer_takes_long(engine), "max_staleness": BOUND}
    await run_all(loop, worker(await bus_factory(), engine, **changes))
    return loop


async def test_an_answer_that_outlasts_the_bound_is_trained_without_its_old_tokens_and_nobody_waits_for_it(
    bus_factory: Any, tmp_path: Path
) -> None:
    writer = written(tmp_path / "samples")
    samples = SampleRecorder(writer, per_step=2, bound=BOUND)
    loop = await run_loop(bus_factory, tmp_path, discard="tokens", samples=samples, writers=[writer])
    rows = loop.recorder.rows
    assert [row["learner/straggler_wait_seconds"] for row in rows] == [0.0] * 9
    lines = {entry.step: entry for entry, _, _ in steps(history.read(tmp_path / "history.jsonl"))}
    (step,) = [step for step, entry in lines.items() if 0 in entry.groups]
    assert step > ENDS_AT  # training continued without it
    assert {step: entry.old_tokens for step, entry in lines.items() if entry.old_tokens} == {step: 6}
    assert [row["staleness/old_tokens"] for row in rows] == [6.0 * (row["step"] == step) for row in rows]
    assert loop.table.counts["dropped"] == 0
    (late,) = [row for row in read(tmp_path / "samples") if row.group_id == 0]
    assert [answer.old_tokens for answer in late.answers] == [2, 4]  # the group's other answer aged while it waited
    assert late.answers[0].staleness is not None and late.answers[0].staleness <= BOUND


@pytest.mark.parametrize("staleness", [{}, {"order": "freshest_first"}], ids=["oldest first", "freshest first"])
async def test_whatever_the_order_what_is_left_out_is_as_recorded_and_on_the_log(
    bus_factory: Any, tmp_path: Path, staleness: dict[str, Any]
) -> None:
    loop = await run_loop(bus_factory, tmp_path, discard="tokens", staleness=staleness)
    assert max(row["staleness/max"] for row in loop.recorder.rows) <= BOUND
    for row, micro_batches in zip(loop.recorder.rows, loop.backend.trained, strict=True):
        trained = sum(int(np.count_nonzero(micro.response_mask)) for micro in micro_batches)
        sequences = sum(len(micro.sequences) for micro in micro_batches)
        assert trained == row["length/trained_tokens"] == 4 * sequences - row["staleness/old_tokens"]
        assert max(int(micro.staleness[micro.response_mask].max()) for micro in micro_batches) <= BOUND
    made = await account_with(RecordedRun(loop.directory), loop.bus)
    assert made.problems == ()
    assert made.max_staleness <= BOUND


async def begins_at_the_start(prompt: PromptGroup, generate: Generate, *, index: int) -> list[Trajectory]:
    """Return a first part sampled by the run's initial weights, and a fresh second part."""
    turns = TrajectoryBuilder(prompt.prompt_tokens)
    turns.add_answer(await generate(turns.tokens))
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
        await bus_factory(),
        tmp_path,
        steps=5,
        max_staleness=1,
        function="mine:agent",
        staleness={"discard": "trajectories"},
    )
    await run_all(loop, worker(await bus_factory(), Engine(), rollout=begins_at_the_start, max_staleness=1))
    rows = loop.recorder.rows
    assert [row["staleness/old_trajectories"] for row in rows] == [0.0, 0.0, 4.0, 4.0, 4.0]
    assert max(row["staleness/max"] for row in rows) <= 1.0
    lines = [entry for entry, _, _ in steps(history.read(tmp_path / "history.jsonl"))]
    assert [entry.old_trajectories for entry in lines] == [0, 0, 4, 4, 4]
