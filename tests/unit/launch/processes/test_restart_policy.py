"""How long a process waits before each restart, and when no restart is left."""

from __future__ import annotations

import pytest

from asyncrl.launch.processes.child_process import HEALTHY_SECONDS, RestartPolicy


@pytest.mark.parametrize(
    ("restarts", "uptimes", "delays"),
    [
        (2, [1.0] * 3, [0.0, 1.0, None]),
        (100, [1.0] * 8, [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (2, [20.0] * 3, [0.0, 0.0, None]),
        (9, [*[1.0] * 3, 20.0, 1.0], [0.0, 1.0, 2.0, 0.0, 0.0]),
        # it was up for long and has all its restarts again
        (1, [20.0, HEALTHY_SECONDS, 20.0], [0.0, 0.0, None]),
    ],
    ids=["budget", "back-off", "works and dies", "starts again", "healthy"],
)
def test_delays_of_restarts(restarts: int, uptimes: list[float], delays: list[float | None]) -> None:
    policy = RestartPolicy(restarts)
    assert [policy.next_delay(uptime) for uptime in uptimes] == delays


def test_free_restarts_back_off_and_are_not_counted() -> None:
    policy = RestartPolicy(1)
    assert [policy.next_delay(1.0, is_free=True) for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]
    assert [policy.next_delay(1.0) for _ in range(2)] == [8.0, None]
