"""Lanes show what actors do, and stay small in segments, actors and time."""

from __future__ import annotations

import pytest

from asyncrl.board.lanes import (
    WINDOW_SECONDS,
    Doing,
    Lanes,
    change,
    doing,
    number_of,
)
from asyncrl.board.step_lanes import StepLanes
from asyncrl.messages import Heartbeat, Wait


def worker(name: str = "w0", *waits: Wait, running: float = 0.0, phase: str = "running", life: str = "a") -> Heartbeat:
    numbers = {"rollout/running": running}
    return Heartbeat(actor=name, role="rollout-worker", waits=waits, numbers=numbers, phase=phase, life=life)


def learner(*waits: Wait) -> Heartbeat:
    return Heartbeat(actor="learner", role="learner", waits=waits)


STARTS = Wait(what="its engine to start", on="start")
DECODES = Wait(what="the next token of 3 answers", on="engine")
LOADS = Wait(what="its engine to load weights", on="load")
PROMPTS = Wait(what="prompts", on="prompt-source")
REWARD = Wait(what="its reward function", on="reward")
STEP = Wait(what="a training step", on="step")
TRAJECTORIES = Wait(what="trajectories", on="rollout-worker")


@pytest.mark.parametrize(
    ("beat", "expected"),
    [
        (worker("w", DECODES, running=3.0), Doing("generating")),
        (worker("w", LOADS, running=3.0), Doing("loading", "its engine to load weights")),
        (worker("w", PROMPTS), Doing("waiting", "prompts, from prompt-source")),
        (worker("w", REWARD), Doing("rewarding")),
        (worker("w", phase="quarantined"), Doing("quarantined")),
        (worker("w", STARTS, phase="starting"), Doing("starting", "its engine to start, from start")),
        (learner(STEP), Doing("training", "a training step")),
        (learner(TRAJECTORIES), Doing("waiting", "trajectories, from rollout-worker")),
        (learner(), Doing("working")),
    ],
)
def test_heartbeat_sets_the_state_of_a_lane(beat: Heartbeat, expected: Doing) -> None:
    assert doing(beat) == expected
    assert doing(beat, silent_seconds=7.0) == Doing("silent")


def heard(lanes: Lanes, now: float, **doings: str) -> tuple[list[str], list[str], list[str]]:
    actors = {name: (worker(name), Doing(state)) for name, state in doings.items()}
    new, changed, restarted = lanes.hear(actors, now=now)
    return [lane.name for lane in new], [lane.name for lane in changed], restarted


def test_a_lane_has_a_segment_for_each_change_and_only_changes_are_told() -> None:
    lanes = Lanes()
    assert heard(lanes, 10.0, a="generating", b="waiting") == (["a", "b"], ["a", "b"], [])
    assert heard(lanes, 12.0, a="generating", b="generating") == ([], ["b"], [])
    assert heard(lanes, 14.0, a="generating") == ([], ["b"], [])
    assert change(lanes.lanes["b"]) == [1, -1, "", 0]
    assert lanes.totals() == {"generating": 1}
    segments = lanes.as_json()["lanes"][1]["segments"]
    assert [state for _, state, *_ in segments] == [number_of("waiting"), number_of("generating"), -1]
    assert [since for since, *_ in segments] == [WINDOW_SECONDS - 4, WINDOW_SECONDS - 2, WINDOW_SECONDS]


def test_new_incarnation_of_an_actor_is_a_restart() -> None:
    lanes = Lanes()
    for life, expected in (("a", []), ("a", []), ("b", ["w0"])):
        assert lanes.hear({"w0": (worker(life=life), Doing("waiting"))}, now=1.0)[2] == expected


def test_departed_actor_is_dropped_after_the_window() -> None:
    lanes = Lanes()
    heard(lanes, 0.0, a="generating", b="generating")
    heard(lanes, 2.0, a="generating")
    heard(lanes, 2.0 + WINDOW_SECONDS, a="generating")
    assert list(lanes.lanes) == ["a"]


def row(step: int, **more: float) -> dict[str, float]:
    timed = {"time": 10.0 * step, "learner/wait_seconds": 4.0, "learner/step_seconds": 6.0}
    return {"step": step, **timed, "rollout/w0/idle_ratio": 0.1, "rollout/w1/idle_ratio": 0.9, **more}


def test_lanes_of_a_run_that_is_over_come_from_its_metrics() -> None:
    lanes = StepLanes()
    for step in (1, 2, 3, 2):  # a learner was resumed
        lanes.add(row(step))
    found = lanes.as_json()
    assert (found["begin"], found["end"], found["source"]) == (0.0, 20.0, "metrics")
    learner, w0, w1 = found["lanes"]
    waiting, training = number_of("waiting"), number_of("training")
    assert [(since, state) for since, state, *_ in learner["segments"]] == [
        *((0.0, waiting), (4.0, training), (10.0, waiting), (14.0, training), (20.0, -1))
    ]
    assert w0["segments"] == [[0.0, number_of("generating")], [20.0, -1]]
    assert w1["segments"] == [[0.0, waiting], [20.0, -1]]
