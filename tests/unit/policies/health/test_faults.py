"""How long an actor may be silent or wait before it counts as a fault."""

from __future__ import annotations

from asyncrl.policies.health import faults


def test_a_limit_is_four_times_the_median_and_never_under_six_seconds() -> None:
    assert faults.limit(0.5, first=25) == 6
    assert faults.limit(5, first=25) == 20
    assert faults.limit(0, first=25) == 25
