"""Which actors of a run are present: ages of heartbeats on the listener's own clock; actors that left, died, or
start."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from asyncrl.actors.presence import WATCHER, Launched, PresenceTracker, process_state
from asyncrl.messages import Heartbeat
from asyncrl.policies.health.faults import WORKER


def beat(name: str, number: int, *, pid: int = 7, host: str = "here", role: str = WORKER) -> Heartbeat:
    return Heartbeat(actor=name, role=role, beat=number, host=host, pid=pid)


def tracker() -> PresenceTracker:
    return PresenceTracker(host="here", process=lambda pid: "stopped")


def test_who_does_not_beat_any_more_gets_older_only_while_we_listen() -> None:
    heard = tracker()
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    assert heard.present()["w0"].seconds == 0
    for _ in range(7):
        heard.hear({"w0": beat("w0", 2)}, seconds=1)
    assert (heard.present()["w0"].seconds, heard.present()["w0"].process) == (7, "stopped")
    heard.hear({"w0": beat("w0", 3)}, seconds=1)
    assert heard.present()["w0"].seconds == 0


@pytest.mark.parametrize("looks", [({"w0": 1}, {"w0": 2}), ({}, {"w0": 1})])
def test_who_takes_its_entry_away_left_in_order(looks: tuple[dict[str, int], ...]) -> None:
    heard = tracker()
    for look in looks:
        heard.hear({name: beat(name, number) for name, number in look.items()}, seconds=1)
    heard.hear({}, seconds=1)
    assert heard.present() == {}


@pytest.mark.parametrize("numbers", [(1,), (1, 2, 2, 2, 2, 2, 2, 2, 2)])
def test_whose_entry_expired_is_missed_for_a_minute(numbers: tuple[int, ...]) -> None:
    heard = tracker()
    for number in numbers:  # a single heartbeat may have been old when it was heard
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    heard.hear({}, seconds=1)
    assert heard.present()["w0"].seconds >= 15
    for _ in range(60):
        heard.hear({}, seconds=1)
    assert heard.present() == {}


def test_who_is_silent_while_others_beat_gets_older_by_their_beats_where_looks_are_far_apart() -> None:
    """A busy machine: the monitor looks every five seconds and may count two on its own clock. w1 keeps beating."""
    heard = tracker()
    for number in (1, 2):
        beats = {"w0": beat("w0", number), "w0.weights": beat("w0.weights", number), "w1": beat("w1", number, pid=8)}
        heard.hear(beats, seconds=2, elapsed=5)
    heard.hear(beats | {"w1": beat("w1", 4, pid=8)}, seconds=2, elapsed=5)
    assert [heard.present()[name].seconds for name in ("w0", "w0.weights", "w1")] == [4, 4, 0]
    heard.hear(beats | {"w1": beat("w1", 9, pid=8)}, seconds=2, elapsed=5)
    assert [heard.present()[name].seconds for name in ("w0", "w0.weights", "w1")] == [9, 9, 0]
    heard.hear(beats | {"w1": beat("w1", 9, pid=8)}, seconds=2, elapsed=60)  # all processes were frozen
    assert [heard.present()[name].seconds for name in ("w0", "w1")] == [11, 2]


def test_an_entry_that_expired_between_looks_that_are_far_apart_is_missed() -> None:
    heard = tracker()
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    for _ in range(2):
        heard.hear({"w0": beat("w0", 2)}, seconds=2, elapsed=7)
    heard.hear({}, seconds=2, elapsed=7)
    assert heard.present()["w0"].seconds >= 6


def test_an_entry_that_expired_while_the_bus_was_away_is_as_old_as_the_bus_is_back() -> None:
    heard = tracker()
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1)
    heard.excuse()
    for second in range(1, 9):
        heard.hear({}, seconds=1)
        assert heard.present()["w0"].seconds == second


def test_a_process_started_again_is_not_blamed_for_the_one_before() -> None:
    heard = tracker()
    beats = {"w0": beat("w0", 5, pid=7), "w0.weights": beat("w0.weights", 5, pid=7)}
    one = Launched(name="w0", role=WORKER, pid=7, seconds=9)
    heard.hear(beats, seconds=1, launched=[one])
    heard.hear(beats, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=8, seconds=2)])
    for seconds in (20, 40):
        heard.hear(beats, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=8, seconds=seconds)])
        (seen,) = heard.present().values()
        assert (seen.beat.pid, seen.beat.phase, seen.beat.waits[0].seconds) == (8, "starting", seconds)
        beats = {}
    beats["w0"] = beat("w0", 1, pid=8)
    heard.hear(beats, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=8, seconds=3)])
    assert [seen.beat.phase for seen in heard.present().values()] == ["running"]


@pytest.mark.parametrize("is_leaving", [True, False])
def test_who_takes_its_entry_away_and_is_still_a_process_is_not_starting(is_leaving: bool) -> None:
    """Otherwise its whole life would count as its start, and it would be killed during an orderly end."""
    heard = tracker()
    one = Launched(name="w0", role=WORKER, pid=7, seconds=700)
    for number in (1, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1, launched=[one])
    heard.hear({}, seconds=1, launched=[replace(one, is_leaving=is_leaving)])
    assert heard.present() == {}


@pytest.mark.parametrize(("host", "is_named"), [("here", False), ("elsewhere", True)])
def test_what_a_killed_life_of_the_run_left_on_this_machine_is_not_accused(host: str, is_named: bool) -> None:
    heard = PresenceTracker(host="here", process=lambda pid: "gone" if pid == 3 else "running")
    own = Launched(name="learner", role="learner", pid=8, seconds=1)
    for _ in range(20):
        left = {"prompts": beat("prompts", 5, pid=3, host=host)}
        heard.hear(left | {"learner": beat("learner", 1, pid=8)}, seconds=1, launched=[own])
    assert ("prompts" in heard.present()) == is_named


def test_who_beats_on_is_heard_though_this_machine_knows_no_such_process() -> None:
    heard = PresenceTracker(
        host="here", process=lambda pid: "gone" if pid == 3 else "running"
    )  # a process of another container, for example
    own = Launched(name="learner", role="learner", pid=8, seconds=1)
    for number in range(20):
        beats = {"w9": beat("w9", min(number, 10), pid=3), "learner": beat("learner", number + 1, pid=8)}
        heard.hear(beats, seconds=1, launched=[own])
    assert heard.present()["w9"].seconds == 9


def test_who_leaves_before_it_was_heard_is_not_starting() -> None:
    heard = tracker()
    heard.hear({}, seconds=1, launched=[Launched(name="w0", role=WORKER, pid=7, seconds=700, is_leaving=True)])
    assert heard.present() == {}


def test_an_own_process_that_fell_silent_is_missed_for_as_long_as_it_is_there() -> None:
    heard = tracker()
    one = Launched(name="w0", role=WORKER, pid=7, seconds=700)
    for number in (1, 2, 2, 2, 2, 2, 2, 2, 2, 2):
        heard.hear({"w0": beat("w0", number)}, seconds=1, launched=[one])
    for _ in range(400):  # run.stall_seconds may be long
        heard.hear({}, seconds=1, launched=[one])
    assert heard.present()["w0"].seconds > 400


@pytest.mark.parametrize(
    ("name", "role", "pid"),
    [("evil", WORKER, 7), ("evil", WORKER, 8), ("learner.evil", "actor", 8), ("evil", "learner", 9), ("w0", WORKER, 8)],
)
def test_who_says_that_it_is_a_process_of_ours_is_not_heard(name: str, role: str, pid: int) -> None:
    """Otherwise the real process could be killed because of the impostor's heartbeats."""
    heard = tracker()
    own = [
        Launched(name="w0", role=WORKER, pid=7, seconds=9),
        Launched(name="learner", role="learner", pid=8, seconds=9),
    ]
    true = {"learner": beat("learner", 1, pid=8, role="learner"), "prompts": beat("prompts", 1, pid=8, role="actor")}
    heard.hear({"w0": beat("w0", 1), **true, name: beat(name, 2, pid=pid, role=role)}, seconds=1, launched=own)
    assert {(one.beat.actor, one.beat.pid) for one in heard.present().values()} == {
        ("w0", 7),
        ("learner", 8),
        ("prompts", 8),
    }


def test_what_stands_under_the_name_of_another_is_not_heard() -> None:
    """The heartbeat of "evil" is stored under the learner's key and claims the learner's pid. If it counted, the
    learner could be killed for another process's heartbeats."""
    heard = tracker()
    own = [Launched(name="learner", role="learner", pid=8, seconds=9)]
    heard.hear({"learner": beat("learner", 1, pid=8, role="learner")}, seconds=1, launched=own)
    heard.hear({"learner": beat("evil", 2, pid=8, role="learner")}, seconds=1, launched=own)
    assert not any(one.beat.actor == "evil" for one in heard.present().values())


def test_own_processes_that_have_worked_are_known_to_be_up_whoever_hides_their_heartbeats() -> None:
    heard = tracker()
    own = [
        Launched(name="w0", role=WORKER, pid=7, seconds=9),
        Launched(name="learner", role="learner", pid=8, seconds=9),
    ]
    heard.hear({"w0": beat("w0", 1)}, seconds=1, launched=own)
    assert heard.own_roles == {WORKER}  # it is unknown whether the learner has finished its start
    for number in range(30):
        heard.hear({"learner": beat("learner", number, pid=8, role="learner")}, seconds=1, launched=own)
    assert heard.own_roles == {WORKER, "learner"}
    heard.hear({}, seconds=1, launched=[replace(own[0], pid=0), replace(own[1], is_leaving=True)])
    assert not heard.own_roles


def test_other_watchers_are_no_part_of_the_run() -> None:
    heard = tracker()
    heard.hear({"watcher-9": beat("watcher-9", 1, role=WATCHER)}, seconds=1)
    assert heard.present() == {}


def test_the_state_of_a_process_is_what_its_machine_says() -> None:
    assert process_state(os.getpid()) == "running"
    assert process_state(0) == ""
    assert process_state(2**22 + 1) == "gone"
