"""Which actors of a run are present: ages of heartbeats on the listener's own clock; who left, died or starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.actors.presence import OwnProcess, PresenceTracker
from asyncrl.messages import Heartbeat
from asyncrl.messages.roles import FOLLOWER, LEARNER, WORKER


def beat(name: str, number: int, *, pid: int = 7, host: str = "here", role: str = WORKER) -> Heartbeat:
    return Heartbeat(actor=name, role=role, beat=number, host=host, pid=pid)


def learner_beat(number: int = 1, *, pid: int = 8) -> dict[str, Heartbeat]:
    return {LEARNER: beat(LEARNER, number, pid=pid, role=LEARNER)}


W0 = OwnProcess(name="w0", role=WORKER, pid=7, seconds=700)
OWN_LEARNER = OwnProcess(name=LEARNER, role=LEARNER, pid=8, seconds=9)


@pytest.fixture
def presence() -> PresenceTracker:
    return PresenceTracker(host="here", process=lambda pid: "stopped")


def hear(presence: PresenceTracker, *numbers: int, own: tuple[OwnProcess, ...] = ()) -> None:
    """One poll a second; w0 has sent this many heartbeats by then."""
    for number in numbers:
        presence.update({"w0": beat("w0", number)}, seconds=1, own=own)


def test_silent_actor_gets_older_only_while_we_listen(presence: PresenceTracker) -> None:
    hear(presence, 1, 2)
    assert presence.statuses()["w0"].seconds == 0
    hear(presence, *[2] * 7)
    status = presence.statuses()["w0"]
    assert (status.seconds, status.process, status.is_silent) == (7, "stopped", True)
    hear(presence, 3)
    assert presence.statuses()["w0"].seconds == 0


def test_actor_that_removes_its_entry_has_left(presence: PresenceTracker) -> None:
    hear(presence, 1, 2)
    presence.update({}, seconds=1)
    assert presence.statuses() == {}


@pytest.mark.parametrize("numbers", [(1,), (1, *[2] * 8)])
def test_actor_whose_entry_expires_is_reported_for_a_minute(
    presence: PresenceTracker, numbers: tuple[int, ...]
) -> None:
    hear(presence, *numbers)  # a single heartbeat may have been old when it was heard
    for _ in range(10):
        presence.update({}, seconds=1)
    assert presence.statuses()["w0"].is_silent
    for _ in range(60):
        presence.update({}, seconds=1)
    assert presence.statuses() == {}


def test_silence_counts_from_the_return_of_the_bus(presence: PresenceTracker) -> None:
    hear(presence, 1, 2, 2, 2)
    presence.restart_silences()
    for second in range(1, 9):
        presence.update({}, seconds=1)
        assert presence.statuses()["w0"].seconds == second


def test_restarted_process_is_not_blamed_for_the_one_before(presence: PresenceTracker) -> None:
    beats = {"w0": beat("w0", 5), "w0.weights": beat("w0.weights", 5, role=FOLLOWER)}
    presence.update(beats, seconds=1, own=[W0])
    for seconds in (2, 20, 40):
        presence.update(beats, seconds=1, own=[replace(W0, pid=9, seconds=seconds)])
        (status,) = presence.statuses().values()
        assert (status.beat.pid, status.beat.phase, status.beat.waits[0].seconds) == (9, "starting", seconds)
    presence.update({"w0": beat("w0", 1, pid=9)}, seconds=1, own=[replace(W0, pid=9)])
    assert [status.beat.phase for status in presence.statuses().values()] == ["running"]


@pytest.mark.parametrize("has_worked", [True, False])
def test_leaving_process_is_not_starting(presence: PresenceTracker, has_worked: bool) -> None:
    """Otherwise its whole life would count as its start, and it would be killed during an orderly end."""
    if has_worked:
        hear(presence, 1, 2, own=(W0,))
    presence.update({}, seconds=1, own=[replace(W0, is_leaving=not has_worked)])
    assert presence.statuses() == {}


def test_silent_own_process_is_reported_while_it_exists(presence: PresenceTracker) -> None:
    hear(presence, 1, *[2] * 9, own=(W0,))
    for _ in range(400):  # run.stall_seconds may be long
        presence.update({}, seconds=1, own=[W0])
    assert presence.statuses()["w0"].seconds > 400


@pytest.mark.parametrize(
    ("key", "lie"),
    [
        ("evil", beat("evil", 2, pid=8, role=LEARNER)),
        ("learner", beat("evil", 2, pid=8, role=LEARNER)),
        ("w0", beat("w0", 2, pid=8)),
        ("w0", beat("w0", 2, host="elsewhere")),
        ("w0.weights", beat("w0.weights", 2, pid=99, role=FOLLOWER)),
    ],
)
def test_heartbeat_of_a_process_that_claims_to_be_another_is_ignored(
    presence: PresenceTracker, key: str, lie: Heartbeat
) -> None:
    """Otherwise the real process could be killed because of the impostor's waits."""
    true = {"w0": beat("w0", 1), **learner_beat()}
    presence.update(true, seconds=1, own=[W0, OWN_LEARNER])
    presence.update(true | {key: lie}, seconds=1, own=[W0, OWN_LEARNER])
    assert lie not in [status.beat for status in presence.statuses().values()]
