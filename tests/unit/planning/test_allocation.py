"""Which split of N GPUs trains the most, and under which staleness bound."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.layout import Layout
from asyncrl.planning.allocation import Predicted, Split, Units, drawn, likely, predict, recommended
from asyncrl.planning.simulation import Reached, Timing
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
