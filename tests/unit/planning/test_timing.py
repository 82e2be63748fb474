"""From measurements to the duration of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.planning.simulation import DecodeReading, TrainReading, fit_decode, fit_training

SECONDS = st.floats(1e-6, 0.1)


def reading(running: float, *, step: float, sequence: float, steps: float = 100) -> DecodeReading:
    return DecodeReading(running=running, tokens=running * steps, seconds=steps * (step + sequence * running))


@given(step=SECONDS, sequence=SECONDS, levels=st.sets(st.integers(1, 512), min_size=2, max_size=12))
def test_fits_an_engine_that_follows_the_formula_exactly(step: float, sequence: float, levels: set[int]) -> None:
    found = fit_decode(reading(running, step=step, sequence=sequence) for running in levels)
    assert found == pytest.approx((step, sequence), rel=1e-3)


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
    step, sequence = fit_decode(readings)
    assert step >= 0 and sequence >= 0
    took = sum(count * (step + sequence * one.running) for count, one in zip(steps, counted, strict=True))
    assert took == pytest.approx(sum(one.seconds for one in counted), rel=1e-6)


def test_readings_of_one_size_give_its_speed() -> None:
    step, sequence = fit_decode([reading(8, step=0.01, sequence=0.001)])
    assert step + 8 * sequence == pytest.approx(0.018)
    rate, constant = fit_training([TrainReading(tokens=1000, seconds=2.0)] * 3)
    assert 1000 / rate + constant == pytest.approx(2.0)


def test_fits_a_learner_that_follows_the_formula_exactly() -> None:
    readings = [TrainReading(tokens=tokens, seconds=0.5 + tokens / 20_000) for tokens in (1000, 4000, 1000, 4000)]
    assert fit_training(readings) == pytest.approx((20_000, 0.5))
