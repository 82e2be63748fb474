"""How busy an engine is, as heartbeats and scrapes of Prometheus read it."""

from __future__ import annotations

from asyncrl.actors.rollout.shared_engine import Activity


def test_two_readings_share_one_window() -> None:
    now = 0.0
    activity = Activity(window_seconds=1.0, now=lambda: now)
    with activity.running():
        now = 1.0
        activity.tokens += 1000
    now = 2.0
    assert activity.rates() == (500.0, 0.5)
    activity.tokens += 10
    now = 2.01
    assert activity.rates() == (500.0, 0.5)
    now = 4.0
    assert activity.rates() == (5.0, 1.0)
