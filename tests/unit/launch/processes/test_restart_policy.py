"""How long a process waits before each restart, and when no restart is left."""

from __future__ import annotations

import pytest

from asyncrl.launch.processes.child_process import HEALTHY_SECONDS, RestartPolicy

WORKED, FAILED, FREE = {"has_worked": True}, {"has_worked": False}, {"has_worked": False, "is_free": True}


@pytest.mark.parametrize(
    ("restarts", "exits", "delays"),
    [
        (2, [(1.0, FAILED)] * 3, [0.0, 1.0, None]),
        (100, [(1.0, FAILED)] * 8, [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (2, [(20.0, WORKED)] * 3, [0.0, 0.0, None]),
        # it died before the back-off that its failed starts have earned
        (9, [*[(1.0, FAILED)] * 3, (3.0, WORKED), (20.0, WORKED)], [0.0, 1.0, 2.0, 4.0, 0.0]),
        # it was up for long and has all its restarts again
        (1, [(1.0, WORKED), (HEALTHY_SECONDS, WORKED), (1.0, WORKED)], [0.0, 0.0, None]),
        # a start that is killed because it takes too long is not repeated forever
        (1, [(2 * HEALTHY_SECONDS, FAILED)] * 2, [0.0, None]),
        # the bus was away
        (1, [*[(1.0, FREE)] * 4, (1.0, FAILED), (1.0, FAILED)], [0.0, 1.0, 2.0, 4.0, 8.0, None]),
    ],
    ids=["budget", "back-off", "works and dies", "dies early", "healthy", "slow starts", "free"],
)
def test_delays_of_restarts(
    restarts: int, exits: list[tuple[float, dict[str, bool]]], delays: list[float | None]
) -> None:
    policy = RestartPolicy(restarts)
    assert [policy.next_delay(uptime, **how) for uptime, how in exits] == delays
