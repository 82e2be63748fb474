"""Bad workers and steps without effect, through the real learner: they are named, dropped and reported."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.actors.learner.group_remover import MOST_FAILED_OF_WORKER
from asyncrl.actors.learner.validator import MOST_IMPOSSIBLE, Validator
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Bus, Record
from asyncrl.engines.generation import Generation
from asyncrl.errors import EngineError, HopelessError, RewardError
from asyncrl.messages import SamplingParams, Trajectory, TrajectoryGroup, VersionSpan, replace
from asyncrl.messages.topics import ACTORS, EVENTS, PROMPTS, QUARANTINE, TRAJECTORIES, answer_key
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.groups.logprob_mismatch import LogprobMismatch
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.groups.validation import GroupValidation
from asyncrl.rewards.port import Reward, Sample
from tests.conftest import BUS_SIZES
from tests.harness.fakes import Backend, Engine, Judge, Loop, run_worker, token_sum, worker
from tests.harness.groups import group
from tests.harness.learning import memory_bus


class Trainer(Backend):
    """forward matches the fake engine's logprobs: -1 per token."""

    def forward(self, shares: Any, *, model: str = "policy") -> list[list[NDArray[np.float32]]]:
        def of(micro_batch: MicroBatch) -> NDArray[np.float32]:
            return np.full(micro_batch.num_tokens, -1.0, np.float32)

        return [[of(micro_batch) for micro_batch in share] for share in shares]


class Liar(Engine):
    """An engine that reports logprobs of another distribution than it samples from."""

    async def generate(
        self, prompt_tokens: NDArray[np.int32], sampling: SamplingParams, *, seed: int, partial: Any = None
    ) -> Generation:
        made = await super().generate(prompt_tokens, sampling, seed=seed)
        return Generation(
            tokens=made.tokens,
            logprobs=np.full(len(made.tokens), -4.0, np.float32),
            version_spans=made.version_spans,
            finish_reason=made.finish_reason,
        )


def judged_loop(bus: Bus, directory: Path, *, steps: int = 6) -> Loop:
    validator = Validator(
        bus, validation=GroupValidation(vocabulary_size=14), logprob_check=LogprobMismatch(bound=0.5, every=1)
    )
    loop = Loop(bus, directory, steps=steps, validator=validator)
    loop.backend = Trainer()
    return loop


async def events(bus: Bus, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    last = await bus.last_sequence(EVENTS)
    async with bus.read(EVENTS) as records:
        for _ in range(last):
            record = await anext(records)
            if record.message is not None and record.message.kind == kind:
                found.append(record.message.data)
    return found


async def test_a_worker_that_lies_about_its_logprobs_is_quarantined_told_and_no_longer_trained(
    bus: Bus, bus_factory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = judged_loop(bus, tmp_path, steps=8)
    liar, honest = Liar(), Engine()
    honest.gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), honest, name="w1", max_running=2)))
        await until_alive(bus, "w1")
        group.create_task(run_worker(worker(await bus_factory(), liar, name="w0", max_running=2)))
        learner = group.create_task(loop.run_learner())
        while not await bus.states(QUARANTINE):
            await asyncio.sleep(0.01)
        honest.gate.set()
        await learner
    (told,) = (await bus.states(QUARANTINE)).values()
    assert told.worker == "w0"
    assert "3 nats per token off" in told.reason
    assert [event["worker"] for event in await events(bus, "quarantined")] == ["w0"]
    assert any("quarantined this worker" in record.getMessage() for record in caplog.records)
    behavior = [one.behavior_logprobs.min() for step in loop.backend.trained for one in step]
    assert behavior[-4:] == [-1.0] * 4  # the liar reports -4
    assert loop.recorder.rows[-1]["rollout/quarantined"] == 1
    assert loop.backend.steps == 8


async def heir(bus: Bus, *, token: int = 5, every: int = 3) -> None:
    """A worker that takes over every third group, or says so. The saved part has two tokens with invented logprobs.

    token: the first token that was saved
    """
    async with bus.consume(PROMPTS) as deliveries:
        async for delivery in deliveries:
            assert (prompt := delivery.message) is not None
            saved = 2 * (prompt.group_id % every == 0)
            answer = Trajectory(
                tokens=np.array([token if saved else 5, 5, 5, 5], np.int32),
                response_mask=np.ones(4, np.bool_),
                behavior_logprobs=np.array([-4.0] * saved + [-1.0] * (4 - saved), np.float32),
                version_spans=(
                    VersionSpan(start=0, incarnation=prompt.incarnation, policy_version=prompt.min_policy_version),
                ),
                reward=1.0,
                resumed=saved,
            )
            made = TrajectoryGroup(
                group_id=prompt.group_id,
                prompt_tokens=prompt.prompt_tokens,
                trajectories=(answer,) * prompt.group_size,
                epoch=prompt.epoch,
                worker="heir",
            )
            await bus.publish(TRAJECTORIES, made, key=answer_key(prompt.group_id, worker="heir", ticket=""))
            await delivery.ack()


async def test_what_somebody_else_saved_is_not_held_against_who_took_it_over_and_is_not_trained(tmp_path: Path) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = judged_loop(bus, tmp_path, steps=6)
    taking = asyncio.create_task(heir(bus))
    await loop.run_learner()
    taking.cancel()
    await asyncio.wait((taking,))
    assert await bus.states(QUARANTINE) == {}
    assert {one.behavior_logprobs.min() for step in loop.backend.trained for one in step} == {-1.0}
    failed = await events(bus, "failed")
    assert {event["group_id"] % 3 for event in failed} == {0} and len(failed) >= 4
    assert "2 tokens taken over from an earlier attempt are 3 nats per token off the trainer's" in failed[0]["error"]


async def test_saved_tokens_that_cannot_be_fail_their_group_and_count_against_nobody(tmp_path: Path) -> None:
    """Otherwise who saves such tokens and gives the prompt back would have every honest worker quarantined."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = judged_loop(bus, tmp_path, steps=12)
    taking = asyncio.create_task(heir(bus, token=10**6))
    await loop.run_learner()
    taking.cancel()
    await asyncio.wait((taking,))
    assert await events(bus, "quarantined") == []
    failed = await events(bus, "failed")
    assert {event["group_id"] % 3 for event in failed} == {0} and len(failed) > MOST_IMPOSSIBLE
    assert {event["worker"] for event in failed} == {"heir"}
    assert all("outside the vocabulary" in event["error"] for event in failed)


async def test_a_worker_that_says_of_every_bad_group_that_others_began_it_is_quarantined(tmp_path: Path) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = judged_loop(bus, tmp_path, steps=80)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(bus, Engine(), name="w0")))
        await until_alive(bus, "w0")
        lying = group.create_task(heir(bus, token=10**6, every=1))
        await loop.run_learner()
        lying.cancel()
    (verdict,) = await events(bus, "quarantined")
    assert verdict["worker"] == "heir" and "outside the vocabulary" in verdict["reason"]
    assert loop.backend.steps == 80


class Broken(Engine):
    async def generate(self, *arguments: Any, **options: Any) -> Generation:
        raise EngineError("CUDA error: an illegal memory access was encountered")


async def test_a_worker_that_fails_every_group_is_quarantined_while_the_others_go_on(tmp_path: Path) -> None:
    """Its failures are never in a row on the log, because others' groups come in between."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = judged_loop(bus, tmp_path, steps=80)
    loop.max_failed_in_a_row = 10**6
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(bus, Engine(), name="w0")))
        await until_alive(bus, "w0")
        broken = group.create_task(run_worker(worker(bus, Broken(), name="w1", max_attempts=1)))
        await loop.run_learner()
        broken.cancel()
    (verdict,) = await events(bus, "quarantined")
    assert verdict["worker"] == "w1"
    assert (
        f"its last {MOST_FAILED_OF_WORKER} groups all failed, and those of the other workers do not"
        in (verdict["reason"])
    )
    assert "CUDA error" in verdict["reason"]
    assert loop.table.counts["failed"] <= MOST_FAILED_OF_WORKER + loop.run.window
    assert loop.backend.steps == 80


async def test_a_worker_is_not_blamed_for_what_fails_for_everybody(tmp_path: Path) -> None:
    """Most prompts fail wherever they are made."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = judged_loop(bus, tmp_path, steps=8)
    loop.max_failed_in_a_row = 10**6

    def picky(samples: Sequence[Sample]) -> Sequence[Reward]:
        if int(samples[0].trajectory.tokens.sum()) % 16:
            raise RewardError("no number in it")
        return token_sum(samples)

    async with asyncio.TaskGroup() as group:
        for name in ("w0", "w1"):
            group.create_task(run_worker(worker(bus, Engine(), name=name, reward=Judge(picky))))
        await loop.run_learner()
    assert await events(bus, "quarantined") == []
    assert loop.table.counts["failed"] > 4 * MOST_FAILED_OF_WORKER


async def test_a_quarantined_worker_that_is_started_again_is_judged_anew_and_trained(
    bus: Bus, bus_factory: Any, tmp_path: Path
) -> None:
    loop = judged_loop(bus, tmp_path, steps=8)
    idle = Engine()
    idle.gate.clear()
    async with asyncio.TaskGroup() as group:
        keeps_the_run_up = group.create_task(run_worker(worker(await bus_factory(), idle, name="w1", max_running=2)))
        await until_alive(bus, "w1")
        liar = group.create_task(run_worker(worker(await bus_factory(), Liar(), name="w0")))
        learner = group.create_task(loop.run_learner())
        while (beat := (await bus.states(ACTORS)).get("w0")) is None or beat.phase != "quarantined":
            await asyncio.sleep(0.01)
        assert "3 nats per token off" in beat.problem
        liar.cancel()
        await asyncio.wait((liar,))
        group.create_task(run_worker(worker(await bus_factory(), Engine(), name="w0")))
        while loop.backend.steps < 4:  # w1 has produced nothing yet
            await asyncio.sleep(0.01)
        idle.gate.set()
        await learner
        keeps_the_run_up.cancel()
    assert loop.backend.steps == 8
    assert loop.recorder.rows[-1]["rollout/quarantined"] == 0
    assert await bus.states(QUARANTINE) == {}


async def until_alive(bus: Bus, name: str) -> None:
    while name not in await bus.states(ACTORS):
        await asyncio.sleep(0.01)


async def test_a_run_whose_every_worker_is_quarantined_ends_with_the_reason(tmp_path: Path) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = judged_loop(bus, tmp_path)
    victim = asyncio.create_task(run_worker(worker(bus, Liar())))
    with pytest.raises(HopelessError, match="every rollout worker is quarantined; the last, w0, for its behavior"):
        await loop.run_learner()
    victim.cancel()
    await asyncio.wait((victim,))


async def test_a_worker_whose_groups_cannot_be_is_quarantined_after_three(tmp_path: Path) -> None:
    """Every answer of the fake engine has tokens from 4 to 13, but this model only knows 0 to 3."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = judged_loop(bus, tmp_path)
    loop.validator = Validator(
        bus, validation=GroupValidation(vocabulary_size=4), logprob_check=LogprobMismatch(bound=0.5, every=1)
    )
    victim = asyncio.create_task(run_worker(worker(bus, Engine())))
    with pytest.raises(
        HopelessError, match="every rollout worker is quarantined; the last, w0, for 3 impossible groups"
    ):
        await loop.run_learner()
    failed = await events(bus, "failed")
    assert all("outside the vocabulary" in event["error"] for event in failed)
    assert loop.backend.steps == 0
    victim.cancel()
    await asyncio.wait((victim,))


# -- steps without effect ----------------------------------------------------------------------------------------------


async def run_skipping(loop: Loop, skipped: set[int]) -> None:
    loop.backend.measures = lambda step: {
        "learner/skipped_steps": float(step in skipped),
        "loss": math.nan if step in skipped else 0.5,
    }
    async with asyncio.TaskGroup() as group:
        others = group.create_task(run_worker(worker(loop.bus, Engine())))
        try:
            await loop.run_learner()
        finally:
            others.cancel()


async def test_a_skipped_step_is_said_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=4, max_skipped_steps=2)
    await run_skipping(loop, {1, 3})
    assert loop.backend.steps == 4
    (first, second) = await events(bus, "skipped")
    assert (first["step"], second["step"], len(first["group_ids"])) == (1, 3, 2)
    assert any(record.levelno == logging.ERROR and "loss nan" in record.getMessage() for record in caplog.records)


async def test_too_many_skipped_steps_in_a_row_end_the_run_and_leave_their_groups_in_the_log(tmp_path: Path) -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    loop = Loop(bus, tmp_path, steps=9, max_skipped_steps=3, checkpoint_every=1)
    with pytest.raises(ExceptionGroup) as ended:
        await run_skipping(loop, {2, 3, 4})
    (error,) = ended.value.exceptions
    assert isinstance(error, HopelessError)
    assert error.exit_code == 2
    assert "learner.max_skipped_steps" in str(error) and "3 in a row" in str(error)
    assert loop.backend.steps == 4
    skipped = [group_id for event in await events(bus, "skipped") for group_id in event["group_ids"]]
    assert {f"w0/{group_id}" for group_id in skipped} <= await bus.keys(TRAJECTORIES)
    assert len(loop.recorder.rows) == 4  # the last step is also reported


# -- prompts that kill -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "temperatures", "is_inherited", "why"),
    [
        (0.0, [1.0, 0.5], True, "it was sampled at rollout.temperature 1, and is trained at 0.5"),
        (0.0, [1.0, 0.5], False, ""),
        (0.0, [0.5, 0.5], True, ""),
        (0.7, [1.0, 0.5], True, ""),
    ],
)
def test_a_group_that_a_resumed_run_would_train_at_another_temperature_is_not_trained(
    own: float, temperatures: list[float], is_inherited: bool, why: str
) -> None:
    table = GroupTable(incarnation=1)
    table.publish(0, position=0)
    validator = Validator(memory_bus(), temperatures=temperatures)
    record: Record[TrajectoryGroup] = Record(sequence=1, key="w0/0", message=replace(group(0), temperature=own))
    checked = validator.check(record, table, is_inherited=is_inherited)
    assert (checked.problem, checked.is_counted) == (why, not why)
    assert checked.group is not None
    assert checked.group.error == why
