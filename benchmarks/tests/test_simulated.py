"""What the pipeline benchmark's simulation promises, so that its results are about the loop and not about itself."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.messages import SamplingParams, VersionSpan, WeightVersion
from benchmarks.ideal import Ideal, Plan, group_lengths
from benchmarks.simulated import LENGTH_KINDS, Decoding, LengthKind, Lengths, SimulatedEngine, Timing, version_spans

TIMING = Timing(
    seconds_per_token=1.0,
    seconds_per_sequence=0.25,
    capacity=2,
    load_seconds=3.0,
    train_tokens_per_second=100.0,
    train_seconds=5.0,
)
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


def test_a_decode_step_takes_longer_the_more_sequences_run() -> None:
    alone, together = Decoding(TIMING), Decoding(TIMING)
    alone.add(0, 4)
    together.add(0, 4)
    together.add(1, 8)
    assert alone.next_finish() == 4 * (1 + 0.25)
    assert together.next_finish() == 4 * (1 + 0.5)


def test_who_remains_goes_faster_when_a_sequence_ends() -> None:
    decoding = Decoding(TIMING)
    decoding.add(0, 4)
    decoding.add(1, 8)
    # Both for 4 steps of 1.5 s, then one alone for 4 steps of 1.25 s.
    assert [ended.number for ended in decoding.advance(10.999)] == [0]
    assert [ended.number for ended in decoding.advance(11.0)] == [1]
    assert decoding.advance(20.0) == []
    assert decoding.busy_seconds == 11.0


def test_a_waiting_sequence_enters_at_the_instant_a_place_comes_free() -> None:
    decoding = Decoding(TIMING)
    for number in range(3):
        decoding.add(number, 4)
    assert (decoding.running, decoding.queued) == (2, 1)
    ended = decoding.advance(100.0)
    # Two for 4 steps of 1.5 s; the third enters at step 4 and needs 4 x 1.25 s more.
    assert [(e.number, e.entered) for e in ended] == [(0, 0.0), (1, 0.0), (2, 4.0)]
    assert decoding.busy_seconds == 6.0 + 5.0


def test_nothing_is_decoded_while_weights_load() -> None:
    decoding = Decoding(TIMING)
    decoding.add(0, 4)
    decoding.advance(2.5)
    decoding.is_paused = True
    assert decoding.advance(50.0) == []
    decoding.is_paused = False
    assert decoding.next_finish() == 52.5


def test_every_token_knows_which_version_sampled_it() -> None:
    changes = [(-1.0, (0, 0)), (10.5, (0, 1)), (12.0, (0, 2)), (14.0, (0, 3))]
    spans = version_spans(changes, entered=10.0, length=4)
    assert spans == (
        VersionSpan(start=0, incarnation=0, policy_version=0),
        VersionSpan(start=1, incarnation=0, policy_version=1),
        VersionSpan(start=2, incarnation=0, policy_version=2),
    )


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


@pytest.mark.parametrize("load_seconds", [0.0, 3.0])
def test_the_ideal_synchronous_run_is_the_formula(load_seconds: float) -> None:
    plan = Plan(
        mode="sync",
        workers=2,
        learner_machines=4,
        groups_per_batch=4,
        group_size=1,
        max_staleness=0,
        warmup=2,
        steps=5,
        seed=0,
    )
    timing = Timing(
        seconds_per_token=1.0,
        seconds_per_sequence=0.25,
        capacity=8,
        load_seconds=load_seconds,
        train_tokens_per_second=100.0,
        train_seconds=5.0,
    )
    lengths = group_lengths(Lengths("constant", mean=10, maximum=10), group_size=1, seed=0)
    # Each of the 2 workers decodes 2 answers of 10 tokens: 10 x (1 + 2 x 0.25) = 15 s. The step trains 4 x (10 + 16
    # prompt) tokens on 4 machines: 104 / 400 + 5 = 5.26 s.
    step_seconds = load_seconds + 15 + 5.26
    assert Ideal(plan, timing, lengths).tokens_per_second() == pytest.approx(40 / step_seconds)


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_an_ideal_run_cannot_train_faster_than_its_learner(mode: str) -> None:
    plan = Plan(
        mode=mode,
        workers=7,
        learner_machines=1,
        groups_per_batch=4,
        group_size=2,
        max_staleness=1 if mode == "one_step_off" else 4,
        warmup=10,
        steps=30,
        seed=0,
    )
    slow_learner = Timing(
        seconds_per_token=0.01,
        seconds_per_sequence=0.0,
        capacity=8,
        load_seconds=0.0,
        train_tokens_per_second=10.0,
        train_seconds=0.0,
    )
    lengths = group_lengths(Lengths("constant", mean=10, maximum=10), group_size=2, seed=0)
    # A batch of 8 x 10 response tokens is 8 x 26 with its prompts: 20.8 s a step, and generation never holds it up.
    assert Ideal(plan, slow_learner, lengths).tokens_per_second() == pytest.approx(80 / 20.8)
