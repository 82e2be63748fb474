"""The readings of the fleet benchmark are correct."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.engines.generation import PartialGeneration
from asyncrl.messages import SamplingParams, WeightVersion
from benchmarks import fleet
from benchmarks.fleet_probe import COUNTS, Reading, between, memory
from benchmarks.fleet_processes import FleetEngine

PROMPT = np.array([1], np.int32)


def reading(at: float, *, messages: int, cpu: float, megabytes: float) -> Reading:
    counts = dict.fromkeys(COUNTS, 0) | {"in_msgs": messages, "out_msgs": messages}
    return Reading(at=at, counts=counts, cpu_seconds={"server": cpu}, rss_bytes={"server": int(megabytes * 1e6)})


def test_what_lies_between_two_readings_is_per_second() -> None:
    first, last = reading(10, messages=5, cpu=1.0, megabytes=1), reading(14, messages=25, cpu=3.0, megabytes=1)
    found = between(first, last)
    assert found["messages"] == 10  # (20 in + 20 out) / 4 s
    assert found["cpu"] == {"server": 0.5}


def test_memory_that_grows_by_a_megabyte_a_second_grows_by_sixty_a_minute() -> None:
    found = memory([reading(t, messages=0, cpu=0, megabytes=100 + t) for t in range(10)])["server"]
    assert found["max_megabytes"] == 109
    assert found["megabytes_per_minute"] == pytest.approx(60)


async def test_an_answer_of_the_simulated_engine_grows_and_says_which_version_sampled_what() -> None:
    engine, partial = FleetEngine(seconds=4.0, num_tokens=64), PartialGeneration()
    answering = asyncio.create_task(
        engine.generate(PROMPT, SamplingParams(max_new_tokens=64), seed=2**62, partial=partial)  # takes the mean
    )
    while partial.num_tokens <= 8:
        await asyncio.sleep(0.001)
    assert len(partial.so_far().tokens) > 0
    await engine.load(WeightVersion(incarnation=0, policy_version=1))
    answer = await answering
    assert len(answer.tokens) == 64
    assert [span.policy_version for span in answer.version_spans] == [0, 1]
    assert answer.version_spans[1].start > 8


@pytest.mark.slow
def test_a_small_fleet_is_measured_and_its_audit_is_clean() -> None:
    options = ["--groups", "16", "--rate", "40", "--seconds", "0.2", "--warmup", "2", "--steps", "3"]
    given = fleet.arguments([*options, "--idle-seconds", "1"])
    row = fleet.run(fleet.scene_of(given, 3), workers=3)
    assert list(fleet.broken_promises([row])) == []
    assert row["whole"]["messages"] > row["work"]["messages"] > 0
    assert row["audit"]["trained"] == 9 * 16  # 2 + 3 and a window of 4


def test_fleets_whose_workers_bring_the_same_grow_with_their_work() -> None:
    given = fleet.arguments(["--each", "0.2"])
    small, large = fleet.scene_of(given, 10), fleet.scene_of(given, 1000)
    assert (small.rate, large.rate) == (0.25, 25.0)
    assert (small.groups_per_batch, large.groups_per_batch) == (3, 300)
