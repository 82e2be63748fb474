"""Evaluation during training, on both buses: every counted answer is from the evaluated version."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from asyncrl.launch.assembly.training import outcome
from asyncrl.messages import VersionSpan
from asyncrl.messages.topics import EVALUATION, EVALUATION_PROMPTS, PROGRESS
from tests.harness.evaluation import evaluating_worker, section, sums
from tests.harness.fakes import Engine, Loop, run_all, run_worker, until, worker
from tests.harness.metric_names import is_known


def results(loop: Loop) -> dict[int, dict[str, Any]]:
    """Return step -> the row of the evaluation of its version."""
    return {int(row["step"]): row for row in loop.recorder.rows if "evaluation/complete" in row}


def of_training(loop: Loop) -> list[dict[str, Any]]:
    return [row for row in loop.recorder.rows if "evaluation/complete" not in row]


@pytest.fixture
def evaluated(loop: Loop) -> Loop:
    loop.evaluation, loop.evaluation_sets = section(every_steps=2, place="dedicated"), [sums()]
    return loop


async def test_workers_of_their_own_evaluate_the_versions_that_are_due(evaluated: Loop, bus_factory: Any) -> None:
    await run_all(
        evaluated,
        worker(await bus_factory(), Engine()),
        evaluating_worker(await bus_factory(), Engine(), name="e0", is_dedicated=True),
    )
    found = results(evaluated)
    assert {0, 4} <= set(found) <= {0, 2, 3, 4}  # if version 2 is skipped for a newer one, the newer one is due
    assert evaluated.backend.steps == 4
    for version, row in found.items():
        assert row["evaluation/complete"] == 1.0
        assert row["evaluation/sums/mean@2"] == version, "answers of another version were counted"
        assert row["evaluation/sums[even]/prompts"] == 3
        assert row["evaluation/lag_steps"] <= 4 - version
        assert {name for name in row if not is_known(name)} == {"step"}
    assert [row["step"] for row in of_training(evaluated)] == [1, 2, 3, 4]
    assert (await evaluated.bus.states(EVALUATION))[""].is_over
    assert await evaluated.bus.depth(EVALUATION_PROMPTS) == 0


@pytest.mark.parametrize("mode, load", [("sync", "on_demand"), ("one_step_off", "on_demand"), ("async", "drain")])
async def test_the_only_worker_evaluates_in_every_mode(evaluated: Loop, bus_factory: Any, mode: Any, load: str) -> None:
    """Training waits for the evaluation and then continues: neither blocks the other for good."""
    evaluated.mode = mode
    evaluated.evaluation = section(every_steps=1, place="shared")
    await run_all(evaluated, evaluating_worker(await bus_factory(), Engine(), name="w0", load=load))
    found = results(evaluated)
    assert {0, 4} <= set(found)
    assert all(row["evaluation/sums/mean@2"] == version for version, row in found.items())
    assert evaluated.backend.steps == 4


async def test_a_version_is_held_while_training_goes_on_elsewhere(evaluated: Loop, bus_factory: Any) -> None:
    """The evaluation's engine answers slowly. The learner finishes its steps first, then waits for the last
    evaluation."""
    slow = Engine()
    slow.gate.clear()
    evaluated.steps = 6
    bus = evaluated.bus
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        group.create_task(run_worker(evaluating_worker(await bus_factory(), slow, name="e0", is_dedicated=True)))
        learning = group.create_task(evaluated.run_learner())
        await until(lambda: evaluated.backend.steps == 6)
        assert (await bus.states(EVALUATION))[""].weights.policy_version == 0
        assert slow.version == (0, 0)
        slow.gate.set()
        await learning
    found = results(evaluated)
    assert sorted(found) == [0, 6]
    assert found[0]["evaluation/lag_steps"] == 6
    assert found[6]["evaluation/skipped"] == 2


class Mixing(Engine):
    """The first ``mixes`` answers end with tokens of another version, whatever version the engine was told."""

    mixes = 0

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        made = await super().generate(*arguments, **named)
        if not self.mixes:
            return made
        self.mixes -= 1
        other = VersionSpan(start=2, incarnation=0, policy_version=1)
        return dataclasses.replace(made, version_spans=(*made.version_spans, other))


async def test_answers_of_two_versions_are_made_again_however_often_and_count_in_nothing(
    evaluated: Loop, bus_factory: Any
) -> None:
    """Mixed answers may repeat more often than a prompt has attempts, because the prompt is not at fault."""
    engine = Mixing()
    engine.mixes = 40  # 4 times 5 prompts with 2 answers
    evaluated.steps = 1
    evaluated.evaluation = section(place="dedicated", at_end=False)
    await run_all(
        evaluated,
        worker(await bus_factory(), Engine()),
        evaluating_worker(await bus_factory(), engine, name="e0", is_dedicated=True),
    )
    row = results(evaluated)[0]
    assert (row["evaluation/complete"], row["evaluation/sums/mean@2"]) == (1.0, 0.0)
    assert 20 <= row["evaluation/mixed"] <= 40  # the two answers of a prompt may be mixed separately


async def test_prompts_of_a_lost_worker_are_answered_by_another(evaluated: Loop, bus_factory: Any) -> None:
    stuck, lost = Engine(), await bus_factory()
    stuck.gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        first = asyncio.create_task(run_worker(evaluating_worker(lost, stuck, name="e0", is_dedicated=True)))
        learning = group.create_task(evaluated.run_learner())
        await until(lambda: stuck.running > 0)
        first.cancel()
        await asyncio.wait((first,))
        group.create_task(run_worker(evaluating_worker(await bus_factory(), Engine(), name="e1", is_dedicated=True)))
        await learning
    assert results(evaluated)[0]["evaluation/complete"] == 1.0


async def test_without_an_engine_it_ends_incomplete_and_says_so(
    evaluated: Loop, bus_factory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated.evaluation = section(place="dedicated", timeout_seconds=0.05, at_end=False)
    await run_all(evaluated, worker(await bus_factory(), Engine()))
    (row,) = results(evaluated).values()
    assert row["evaluation/complete"] == 0.0
    assert row["evaluation/sums/missing"] == 5
    assert "evaluation/sums/mean@2" not in row
    assert "is incomplete" in caplog.text


async def test_a_reward_that_fails_leaves_its_prompts_out_and_the_result_incomplete(
    evaluated: Loop, bus_factory: Any
) -> None:
    evaluated.evaluation = section(place="dedicated", at_end=False)
    actors = evaluating_worker(await bus_factory(), Engine(), name="e0", is_dedicated=True)
    rewards = actors[0]._stages[0]._maker._reward._rewards

    class Broken:
        async def __call__(self, samples: Any) -> Any:
            if samples[0].prompt == "p3":
                from asyncrl.errors import RewardError

                raise RewardError("no")
            return await good(samples)

        async def close(self) -> None:
            pass

    good, rewards["sums"] = rewards["sums"], Broken()
    await run_all(evaluated, worker(await bus_factory(), Engine()), actors)
    (row,) = results(evaluated).values()
    assert (row["evaluation/complete"], row["evaluation/sums/missing"]) == (0.0, 1.0)
    assert row["evaluation/sums/mean@2"] == 0.0


async def test_a_resumed_learner_takes_up_the_evaluation_that_its_death_interrupted(
    evaluated: Loop, bus_factory: Any
) -> None:
    engine = Engine()
    engine.gate.clear()
    evaluated.checkpoint_every = 1
    evaluated.evaluation = section(place="dedicated", at_end=False)
    async with asyncio.TaskGroup() as group:
        training = group.create_task(run_worker(worker(await bus_factory(), Engine())))
        answering = group.create_task(
            run_worker(evaluating_worker(await bus_factory(), engine, name="e0", is_dedicated=True))
        )
        first = asyncio.create_task(evaluated.run_learner())
        await until(lambda: engine.running > 0 and evaluated.backend.steps >= 2)
        first.cancel()
        await asyncio.wait((first,))
        assert results(evaluated) == {}
        again = group.create_task(evaluated.run_learner(resume=True))
        await until(lambda: evaluated.backend.steps >= 3)
        engine.gate.set()
        await again
        await asyncio.wait((training, answering))
    assert sorted(results(evaluated)) == [0]
    assert results(evaluated)[0]["evaluation/complete"] == 1.0
    assert results(evaluated)[0]["evaluation/sums/mean@2"] == 0.0


async def test_a_run_that_is_drained_in_its_last_evaluation_is_not_finished_until_it_is_resumed(
    evaluated: Loop, bus_factory: Any
) -> None:
    engine = Engine()
    engine.gate.clear()
    evaluated.steps = 1
    evaluated.evaluation = section(place="dedicated", at_start=False)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        group.create_task(run_worker(evaluating_worker(await bus_factory(), engine, name="e0", is_dedicated=True)))
        first = group.create_task(evaluated.run_learner())
        await until(lambda: engine.running > 0)
        evaluated.learner.drain()
        learner = await first
        assert learner.done and not learner.is_finished
        assert "stopped: 1 steps" in (line := outcome(evaluated.run, learner, was_drained=True, first=0, seconds=1.0))
        assert line.endswith("; its last evaluation is not over")
        assert not (await evaluated.bus.states(PROGRESS))[""].finished
        engine.gate.set()
        assert (await evaluated.run_learner(resume=True)).is_finished
    assert sorted(results(evaluated)) == [1]
