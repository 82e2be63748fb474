"""The guarantees of the pipeline benchmark's simulation, which make its results about the loop and not about itself."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.planning.simulation import Timing
from benchmarks.longest_first import longest_first
from benchmarks.simulated import LENGTH_KINDS, LengthKind, Lengths, SimulatedEngine

PROMPT = np.array([1], np.int32)


def test_a_sample_has_the_same_length_in_every_mode_and_split() -> None:
    first, second = (Lengths("lognormal", mean=100, maximum=400) for _ in range(2))
    seeds = [seed << 50 for seed in range(2**13)]
    assert [first.of(seed) for seed in seeds] == [second.of(seed) for seed in reversed(seeds)][::-1]


@pytest.mark.parametrize("kind", LENGTH_KINDS)
def test_every_distribution_has_the_mean_and_the_maximum_asked_for(kind: LengthKind) -> None:
    lengths = Lengths(kind, mean=250, maximum=1000)
    assert lengths.mean == pytest.approx(250, rel=0.01)
    assert lengths.of(2**63 - 1) == (250 if kind == "constant" else 1000)
    assert lengths.of(0) >= 1


def test_a_block_begins_with_its_longest_answer_and_has_the_groups_that_it_had() -> None:
    drawn = [[4, 1], [2, 9], [3, 3], [8, 8], [5, 5], [1, 6]]
    ordered = longest_first(drawn.__getitem__, block=3)
    assert [ordered(group_id) for group_id in range(6)] == [[2, 9], [4, 1], [3, 3], [8, 8], [1, 6], [5, 5]]


async def test_an_engine_answers_with_the_length_its_seed_stands_for() -> None:
    lengths = Lengths("lognormal", mean=20, maximum=80)
    fast = Timing(
        seconds_per_token=1e-6,
        seconds_per_sequence=0.0,
        capacity=4,
        load_seconds=0.0,
        train_tokens_per_second=1.0,
        train_seconds=0.0,
    )
    engine = SimulatedEngine(fast, lengths)
    await engine.start()
    seeds = [seed << 58 for seed in range(32)]
    sampling = SamplingParams(max_new_tokens=1000)
    answers = await asyncio.gather(*(engine.generate(PROMPT, sampling, seed=seed) for seed in seeds))
    assert [len(answer.tokens) for answer in answers] == [lengths.of(seed) for seed in seeds]
    await engine.load(WeightVersion(incarnation=0, policy_version=7, uri="", sha256="", num_bytes=0))
    answer = await engine.generate(PROMPT, sampling, seed=0)
    assert [span.policy_version for span in answer.version_spans] == [7]
    await engine.close()
