"""The planner: splits of GPUs, the decoding it assumes, ideal runs, and speeds fitted to measurements."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import config
from asyncrl.config.layout import Layout
from asyncrl.config.run import Mode
from asyncrl.messages import VersionSpan
from asyncrl.planning import command
from asyncrl.planning.allocation import Predicted, Split, Units, drawn, likely, predict, recommended
from asyncrl.planning.plan import Allocation, during_steps, timing_of
from asyncrl.planning.simulation import (
    DecodeReading,
    Decoding,
    Ideal,
    Reached,
    Timing,
    TrainReading,
    fit_decode,
    fit_training,
    version_spans,
)
from asyncrl.planning.together import slowdowns
from tests import ROOT
from tests.harness.planning import plan

ONE = Units(copy=1, engine=1)
PLAN = plan(groups_per_batch=8, group_size=4, prompt_tokens=0, eviction="wait")
LENGTHS = [[50, 100, 100, 150], [80, 80, 120, 120]]


def timing(*, decode: float, train: float) -> Timing:
    """An engine samples ``decode`` tokens per second for any number of sequences; a model copy trains ``train``."""
    return Timing(
        seconds_per_token=0.0,
        seconds_per_sequence=1 / decode,
        capacity=64,
        load_seconds=0.0,
        train_tokens_per_second=train,
        train_seconds=0.0,
    )


@pytest.mark.parametrize(
    ("rate", "every", "room", "said"),
    [
        ("2e-6", 1, 0, []),
        ("2e-5", 2, 0, ["not simulated", "is 0.00016"]),
        ("2e-6", 1, 8, ["beside the learner the engine's memory has room for the keys and values of about 8 samples"]),
    ],
)
def test_a_plan_says_what_speaks_against_its_bound_and_what_it_leaves_out(
    rate: str, every: int, room: int, said: list[str]
) -> None:
    run = config.load(ROOT / "examples" / "gpu.toml", [f"learner.learning_rate={rate}", f"weights.every_steps={every}"])
    found: Any = SimpleNamespace(
        engine=SimpleNamespace(num_failed=0, num_unfinished=0, most_running=run.rollout.max_running),
        timing=SimpleNamespace(capacity=run.rollout.max_running, capacity_beside=room),
        learner=SimpleNamespace(larger=None),
        apart="",
        recommended=(SimpleNamespace(max_staleness=8, rate=1.0), False),
        found=[SimpleNamespace(rate=1.0)],
    )
    notes = list(command.notes(run, found))
    assert len(notes) == len(said) and all(part in note for part, note in zip(said, notes, strict=True))


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9))
def test_every_split_has_a_learner_and_an_engine_and_no_gpu_twice(gpus: int, copy: int, engine: int) -> None:
    units = Units(copy=copy, engine=engine)
    if gpus < copy + engine:
        with pytest.raises(ValueError, match=f"give --gpus {copy + engine} at least"):
            units.splits(gpus)
        return
    for split in units.splits(gpus):
        assert split.copies >= 1 and split.engines >= 1
        assert gpus - engine < split.copies * copy + split.engines * engine <= gpus


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9))
def test_engines_beside_the_learner_have_its_gpus_and_no_others(gpus: int, copy: int, engine: int) -> None:
    units = Units(copy=copy, engine=engine)
    try:
        splits = units.splits(gpus, shares=True)
    except ValueError:
        assert gpus < copy + engine and (gpus < copy or engine > gpus // copy * copy)
        return
    for split in splits:
        assert split.engines + split.beside >= 1
        assert split.beside in (0, split.copies * copy // engine)
        assert gpus - engine < split.copies * copy + split.engines * engine <= gpus
    assert [one for one in splits if not one.beside] == (units.splits(gpus) if gpus >= copy + engine else [])


def test_a_split_is_shown_by_its_gpus() -> None:
    units = Units(copy=4, engine=2)
    assert units.shown(Split(1, 3)) == "4+6"
    assert units.shown(Split(2, 1, beside=4)) == "8+2/8"


def test_the_smallest_learner_keeps_the_layout() -> None:
    layout = Layout(ranks=16, tensor=2, pipeline=2, expert=1)
    assert Units.of(layout, gpus_per_engine=0) == Units(copy=4, engine=1)
    assert Units.of(Layout(ranks=8, expert=4), gpus_per_engine=2) == Units(copy=4, engine=2)


@pytest.mark.parametrize(("decode", "train"), [(1000, 3000), (1000, 1000), (3000, 1000), (1000, 7000)])
def test_engines_and_learner_that_are_equally_fast_are_found(decode: float, train: float) -> None:
    """On 8 GPUs; the rates are whole numbers of GPUs."""
    given = timing(decode=decode, train=train)
    splits = ONE.splits(8)
    found = predict(PLAN, given, LENGTHS, splits=splits, bounds=[4])
    best = recommended(found).split
    assert best == Split(round(8 * decode / (decode + train)), 8 - round(8 * decode / (decode + train)))
    assert best in likely(splits, PLAN, given, LENGTHS)


def test_an_engine_on_the_learners_gpu_pays_where_the_engine_is_the_limit_and_costs_little() -> None:
    """One learner that could train three times what an engine samples, on two GPUs."""
    given = timing(decode=1000, train=3000)
    splits = ONE.splits(2, shares=True)
    assert splits == [Split(1, 1), Split(1, 1, beside=1), Split(2, 0, beside=2)]

    def rates(*, decode: float, train: float) -> dict[Split, float]:
        slow = dataclasses.replace(given, decode_beside=decode, train_beside=train)
        assert set(likely(splits, PLAN, slow, LENGTHS)) == set(splits)
        found = predict(PLAN, slow, LENGTHS, splits=splits, bounds=[4])
        return {one.split: one.reached.tokens_per_second for one in found}

    free, dear = rates(decode=1.0, train=1.0), rates(decode=8.0, train=8.0)
    assert free[Split(1, 1)] == dear[Split(1, 1)] == pytest.approx(1000, rel=0.1)
    assert free[Split(1, 1, beside=1)] == pytest.approx(2000, rel=0.1)
    assert dear[Split(1, 1, beside=1)] < dear[Split(1, 1)]


def test_an_engine_beside_a_learner_that_always_trains_is_always_slow() -> None:
    """On one GPU: a batch of 100 tokens trains for 4 s beside the engine, which samples 50 tokens/s meanwhile."""
    slow = dataclasses.replace(timing(decode=200, train=50), decode_beside=4.0, train_beside=2.0)
    (found,) = predict(PLAN, slow, LENGTHS, splits=[Split(1, 0, beside=1)], bounds=[8])
    assert found.reached.learner_busy == pytest.approx(1.0, abs=0.01)
    assert found.reached.tokens_per_second == pytest.approx(25, rel=0.02)  # the learner's 50, by half


def test_an_engine_that_pauses_for_the_steps_leaves_the_learner_its_speed() -> None:
    """On one GPU: 3,200 tokens are sampled in 16 s and trained in 64. In time slices the learner has half of it."""
    alone = timing(decode=200, train=50)
    sliced = dataclasses.replace(alone, decode_beside=2.0, train_beside=2.0)
    for shared, rate in ((during_steps(sliced, "sample"), 25), (during_steps(sliced, "pause"), 40)):
        (found,) = predict(PLAN, shared, LENGTHS, splits=[Split(1, 0, beside=1)], bounds=[8])
        assert found.reached.tokens_per_second == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize(("cache_tokens", "capacity"), [(0, 256), (10**9, 256), (113_000, 161)])
def test_sequences_that_find_no_room_in_the_cache_do_not_run(cache_tokens: int, capacity: int) -> None:
    """A decode step of 10 ms, whatever runs: what an engine says to run, and waits in it, takes no part."""
    run: Any = SimpleNamespace(rollout=SimpleNamespace(max_running=256))
    readings = (DecodeReading(running=256, context=256 * 700, tokens=capacity * 100, seconds=1.0),)
    engine: Any = SimpleNamespace(cache_tokens=cache_tokens, readings=readings)
    learner: Any = SimpleNamespace(readings=(TrainReading(tokens=1000, seconds=1.0),))
    found = timing_of(run, engine, learner, room=700.0)
    assert found.capacity == capacity
    assert found.decode_step(capacity, capacity * 700) == pytest.approx(0.01)


def test_an_engine_beside_the_learner_runs_no_more_sequences_than_its_cache_holds() -> None:
    """A decode step of 1 s however many run: half of the sequences are half of the tokens."""
    alone = dataclasses.replace(timing(decode=1e9, train=1e9), seconds_per_token=1.0, capacity=16)
    half = dataclasses.replace(alone, capacity_beside=8)
    for split, share in ((Split(1, 0, beside=1), 0.5), (Split(1, 1), 1.0)):
        most, found = (predict(PLAN, its, LENGTHS, splits=[split], bounds=[8])[0].reached for its in (alone, half))
        assert found.tokens_per_second == pytest.approx(share * most.tokens_per_second, rel=0.02)


@pytest.mark.parametrize(("rate", "is_said"), [(101, False), (120, True)])
def test_a_plan_recommends_the_other_way_beside_the_learner_where_it_is_clearly_faster(
    rate: float, is_said: bool
) -> None:
    run = config.load(ROOT / "examples" / "gpu.toml", [])

    def of(tokens_per_second: float) -> Predicted:
        reached = Reached(tokens_per_second=tokens_per_second, learner_busy=1.0, engines_busy=1.0)
        return Predicted(split=Split(1, 0, beside=1), max_staleness=4, reached=reached)

    unknown: Any = None
    learner: Any = SimpleNamespace(larger=None)
    found = Allocation(
        units=ONE,
        timing=unknown,
        engine=unknown,
        learner=learner,
        context=0.0,
        apart="",
        kept=1.0,
        found=(of(100),),
        best=of(100),
        now=None,
        other_way="pause",
        other=of(rate),
    )
    assert (("rollout", "beside_learner", "pause") in command.settings(run, found)) == is_said


def test_slowdowns_are_how_much_longer_both_take_than_alone() -> None:
    alone = dataclasses.replace(timing(decode=100, train=1000), seconds_per_token=0.01, train_seconds=1.0)
    decode = [
        DecodeReading(running=one, tokens=one * 50, seconds=50 * 3 * alone.decode_step(one)) for one in (1, 4, 16)
    ]
    train = [TrainReading(tokens=one, seconds=1.5 * alone.train_step(one, machines=1)) for one in (500, 2000)]
    assert slowdowns(alone, decode, train) == pytest.approx((3.0, 1.5))
    assert slowdowns(alone, [], []) == (1.0, 1.0)


def test_of_bounds_that_train_as_much_the_lowest_is_recommended() -> None:
    def of(bound: int, rate: float) -> Predicted:
        reached = Reached(tokens_per_second=rate, learner_busy=1.0, engines_busy=1.0)
        return Predicted(split=Split(1, 1), max_staleness=bound, reached=reached)

    assert recommended([of(1, 50), of(2, 98), of(4, 100), of(8, 99)]).max_staleness == 2


def test_answers_to_one_prompt_stay_together() -> None:
    of = drawn(LENGTHS, group_size=4, seed=3)
    groups = [of(group_id) for group_id in range(50)]
    assert {tuple(group) for group in groups} == {tuple(group) for group in LENGTHS}
    assert [of(group_id) for group_id in range(50)] == groups


def test_filters_that_drop_half_of_the_groups_ask_for_twice_the_engines() -> None:
    """Both sides are equally fast: of nine GPUs, six sample and three train, instead of five and four."""
    dropping = dataclasses.replace(PLAN, kept=0.5)
    given = timing(decode=1000, train=1000)
    found = predict(dropping, given, LENGTHS, splits=ONE.splits(9), bounds=[8])
    assert recommended(found).split == Split(3, 6)
    assert Split(3, 6) in likely(ONE.splits(9), dropping, given, LENGTHS)


TIMING = Timing(
    seconds_per_token=1.0,
    seconds_per_sequence=0.25,
    capacity=2,
    load_seconds=3.0,
    train_tokens_per_second=100.0,
    train_seconds=5.0,
)


def test_a_decode_step_takes_longer_the_more_sequences_run() -> None:
    alone, together = Decoding(TIMING), Decoding(TIMING)
    alone.add(0, 4)
    together.add(0, 4)
    together.add(1, 8)
    assert alone.next_finish() == 4 * (1 + 0.25)
    assert together.next_finish() == 4 * (1 + 0.5)


def test_remaining_sequences_speed_up_when_one_ends() -> None:
    decoding = Decoding(TIMING)
    decoding.add(0, 4)
    decoding.add(1, 8)
    # Both run for 4 steps of 1.5 s, then one runs alone for 4 steps of 1.25 s.
    assert [ended.number for ended in decoding.advance(10.999)] == [0]
    assert [ended.number for ended in decoding.advance(11.0)] == [1]
    assert decoding.advance(20.0) == []
    assert decoding.busy_seconds == 11.0


def test_waiting_sequence_starts_when_a_slot_is_free() -> None:
    decoding = Decoding(TIMING)
    for number in range(3):
        decoding.add(number, 4)
    assert (decoding.running, decoding.queued) == (2, 1)
    ended = decoding.advance(100.0)
    # Two run for 4 steps of 1.5 s; the third enters at step 4 and needs another 4 x 1.25 s.
    assert [(e.number, e.entered) for e in ended] == [(0, 0.0), (1, 0.0), (2, 4.0)]
    assert decoding.busy_seconds == 6.0 + 5.0


def test_steps_become_longer_as_contexts_grow_and_shorter_when_a_sequence_ends() -> None:
    timing = dataclasses.replace(TIMING, seconds_per_context=0.01)
    decoding = Decoding(timing, prompt_tokens=10)
    decoding.add(0, 4)
    decoding.add(1, 8)
    # Contexts of 20 + 2 x steps tokens: 4 steps of 1.5 + .2 s and .02 more each; then 14 + steps, and .01 more each.
    first, second = 4 * (1.7 + 4 * 0.02 / 2), 4 * (1.39 + 4 * 0.01 / 2)
    assert decoding.next_finish() == pytest.approx(first)
    assert decoding.advance(first / 3) == decoding.advance(first / 2) == []
    assert decoding.next_finish() == pytest.approx(first)
    assert [ended.number for ended in decoding.advance(first + 1e-9)] == [0]
    assert decoding.next_finish() == pytest.approx(first + second)


def test_splits_are_likely_by_the_contexts_that_their_engines_will_have() -> None:
    """Reading 1,000 tokens takes as long as all else, so twice the engines are needed."""
    lengths, prompted = [[2000] * 4], dataclasses.replace(PLAN, prompt_tokens=0)
    short = dataclasses.replace(timing(decode=1000, train=4000), capacity=8)
    long = dataclasses.replace(short, seconds_per_context=short.seconds_per_sequence / 1000)
    splits = ONE.splits(33)
    assert Split(33 // 5, 33 - 33 // 5) in likely(splits, prompted, short, lengths)
    assert Split(33 // 9, 33 - 33 // 9) in likely(splits, prompted, long, lengths)


def test_decoding_stops_while_weights_load() -> None:
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


@pytest.mark.parametrize("load_seconds", [0.0, 3.0])
def test_the_ideal_synchronous_run_is_the_formula(load_seconds: float) -> None:
    simulated = plan(mode="sync", workers=2, learner_machines=4, max_staleness=0, warmup=2, steps=5)
    timing = Timing(
        seconds_per_token=1.0,
        seconds_per_sequence=0.25,
        capacity=8,
        load_seconds=load_seconds,
        train_tokens_per_second=100.0,
        train_seconds=5.0,
    )
    lengths = drawn([[10]], group_size=1, seed=0)
    # Each of the 2 workers decodes 2 answers of 10 tokens: 10 x (1 + 2 x 0.25) = 15 s. The step trains 4 x (10 + 16
    # prompt) tokens on 4 machines: 104 / 400 + 5 = 5.26 s.
    step_seconds = load_seconds + 15 + 5.26
    assert Ideal(simulated, timing, lengths).tokens_per_second() == pytest.approx(40 / step_seconds)


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_an_ideal_run_cannot_train_faster_than_its_learner(mode: Mode) -> None:
    bound = 1 if mode == "one_step_off" else 4
    simulated = plan(mode=mode, workers=7, group_size=2, max_staleness=bound, warmup=10, steps=30)
    slow_learner = Timing(
        seconds_per_token=0.01,
        seconds_per_sequence=0.0,
        capacity=8,
        load_seconds=0.0,
        train_tokens_per_second=10.0,
        train_seconds=0.0,
    )
    lengths = drawn([[10]], group_size=2, seed=0)
    # 8 x 10 response tokens are 8 x 26 tokens with their prompts: 20.8 s per step. Generation never delays it.
    reached = Ideal(simulated, slow_learner, lengths).run()
    assert reached.tokens_per_second == pytest.approx(80 / 20.8)
    assert reached.learner_busy == pytest.approx(1.0)


def with_late_groups(**changes: Any) -> Ideal:
    """One answer in eight is so long that it spans more versions than the bound allows."""
    timing = Timing(
        seconds_per_token=0.1,
        seconds_per_sequence=0.0,
        capacity=64,
        load_seconds=0.0,
        train_tokens_per_second=1e6,
        train_seconds=1.0,
    )
    simulated = dataclasses.replace(plan(warmup=6, steps=30, seed=1), **changes)
    return Ideal(simulated, timing, drawn([[10]] * 7 + [[120]], group_size=1, seed=1))


def test_a_run_that_waits_for_late_groups_loses_none_where_one_that_drops_does() -> None:
    waits, drops = (with_late_groups(eviction=way) for way in ("wait", "drop"))
    waits.run(), drops.run()
    assert (waits.lost, drops.lost > 0) == (0, True)


def test_a_run_that_leaves_out_old_tokens_neither_waits_nor_loses_a_group() -> None:
    """With the same long answers, their trained tokens count, and the learner waits for none of them."""
    waits, tokens = with_late_groups(eviction="wait"), with_late_groups(discard="tokens")
    waited, left_out = waits.run(), tokens.run()
    assert tokens.lost == 0
    assert left_out.learner_busy > waited.learner_busy
    assert left_out.tokens_per_second > waited.tokens_per_second


def test_prompt_waiting_in_an_engine_does_not_age() -> None:
    """One engine with two slots serves a window of twelve groups. If age counted from the prompt, every group would be
    late, and the learner would hold each step for groups that no worker has begun."""
    timing = Timing(
        seconds_per_token=0.1,
        seconds_per_sequence=0.0,
        capacity=2,
        load_seconds=0.0,
        train_tokens_per_second=1e6,
        train_seconds=0.1,
    )
    lengths = drawn([[10]] * 7 + [[20]], group_size=1, seed=1)
    ideal = Ideal(plan(warmup=6, steps=30, seed=1, eviction="wait"), timing, lengths)
    reached = ideal.run()
    assert ideal.lost == 0
    assert reached.engines_busy == pytest.approx(1.0)
    assert len(ideal.buffer) < ideal.plan.groups_per_batch


SECONDS = st.floats(1e-6, 0.1)


def reading(running: float, *, step: float, sequence: float, token: float = 0.0, length: float = 0.0) -> DecodeReading:
    """A hundred decode steps with sequences of ``length`` tokens."""
    context = running * length
    seconds = 100 * (step + sequence * running + token * context)
    return DecodeReading(running=running, tokens=100 * running, seconds=seconds, context=context)


@given(step=SECONDS, sequence=SECONDS, levels=st.sets(st.integers(1, 512), min_size=2, max_size=12))
def test_fits_an_engine_that_follows_the_formula_exactly(step: float, sequence: float, levels: set[int]) -> None:
    found = fit_decode(reading(running, step=step, sequence=sequence) for running in levels)
    assert found == pytest.approx((step, sequence, 0.0), rel=1e-3, abs=1e-12)


def test_few_long_answers_and_many_short_ones_tell_reading_their_tokens_from_running_them() -> None:
    """As an H200 at 0.6B: an engine that fills up, then drains."""
    filling = [(1, 100), (200, 110), (760, 150), (760, 400), (760, 640)]
    draining = [(300, 900), (60, 1500), (8, 3000)]
    given = {"step": 2.7e-3, "sequence": 1.0e-5, "token": 3.1e-8}
    readings = [reading(running, length=length, **given) for running, length in filling + draining]
    assert fit_decode(readings) == pytest.approx(tuple(given.values()), rel=1e-6)


@given(
    st.lists(
        st.builds(
            DecodeReading,
            running=st.just(0.0) | st.floats(0.5, 512),
            tokens=st.just(0.0) | st.floats(1, 1e6),
            seconds=st.floats(1e-3, 60),
        ),
        max_size=12,
    )
)
def test_fitted_times_are_never_negative_and_sum_to_the_measured_time(
    readings: list[DecodeReading],
) -> None:
    counted = [one for one in readings if one.running > 0]
    steps = [one.tokens / one.running for one in counted]
    if not sum(steps) > 0:
        with pytest.raises(ValueError, match="sampled no token"):
            fit_decode(readings)
        return
    step, sequence, _ = fit_decode(readings)
    assert step >= 0 and sequence >= 0
    took = sum(count * (step + sequence * one.running) for count, one in zip(steps, counted, strict=True))
    assert took == pytest.approx(sum(one.seconds for one in counted), rel=1e-6)


def test_readings_of_one_size_give_its_speed() -> None:
    step, sequence, _ = fit_decode([reading(8, step=0.01, sequence=0.001)])
    assert step + 8 * sequence == pytest.approx(0.018)
    rate, constant = fit_training([TrainReading(tokens=1000, seconds=2.0)] * 3)
    assert 1000 / rate + constant == pytest.approx(2.0)


def test_fits_a_learner_that_follows_the_formula_exactly() -> None:
    readings = [TrainReading(tokens=tokens, seconds=0.5 + tokens / 20_000) for tokens in (1000, 4000, 1000, 4000)]
    assert fit_training(readings) == pytest.approx((20_000, 0.5))
