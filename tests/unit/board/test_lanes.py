"""Lanes: what each actor did when, from heartbeats while a run is up and from its records afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.board.lanes import (
    WINDOW_SECONDS,
    Activity,
    Lanes,
    activity_of,
    change,
    number_of,
)
from asyncrl.board.recorded_lanes import recorded_lanes
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
        (worker("w", DECODES, running=3.0), Activity("generating")),
        (worker("w", LOADS, running=3.0), Activity("loading", "its engine to load weights")),
        (worker("w", PROMPTS), Activity("waiting", "prompts, from prompt-source")),
        (worker("w", REWARD), Activity("rewarding")),
        (worker("w", phase="quarantined"), Activity("quarantined")),
        (worker("w", STARTS, phase="starting"), Activity("starting", "its engine to start, from start")),
        (learner(STEP), Activity("training", "a training step")),
        (learner(TRAJECTORIES), Activity("waiting", "trajectories, from rollout-worker")),
        (learner(), Activity("working")),
    ],
)
def test_heartbeat_sets_the_state_of_a_lane(beat: Heartbeat, expected: Activity) -> None:
    assert activity_of(beat) == expected
    assert activity_of(beat, silent_seconds=7.0) == Activity("silent")


def heard(lanes: Lanes, now: float, **doings: str) -> tuple[list[str], list[str], list[str]]:
    actors = {name: (worker(name), Activity(state)) for name, state in doings.items()}
    new, changed, restarted = lanes.update(actors, now=now)
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
        assert lanes.update({"w0": (worker(life=life), Activity("waiting"))}, now=1.0)[2] == expected


def test_departed_actor_is_dropped_after_the_window() -> None:
    lanes = Lanes()
    heard(lanes, 0.0, a="generating", b="generating")
    heard(lanes, 2.0, a="generating")
    heard(lanes, 2.0 + WINDOW_SECONDS, a="generating")
    assert list(lanes.lanes) == ["a"]


WAITING, GENERATING, LOADING = (number_of(state) for state in ("waiting", "generating", "loading"))


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"step": number, "time": 100.0 + 10 * number, "seconds": {"wait": 4.0, "train": 6.0}} | more


def group(worker: str, began: float, seconds: float, *, arrived: float | None = None) -> list[Any]:
    return [0, worker, 0.0, began, seconds, 0.1, began + seconds if arrived is None else arrived]


def test_a_worker_generates_while_a_group_is_in_progress_and_loads_when_it_says_so() -> None:
    groups = [group("w0", 101.0, 3.0), group("w0", 103.0, 2.0)]
    row = step(1, groups=groups, loads=[["w0", 7, 104.0, 1.0, 0.5]], waits=[["w0", "prompts", "learner", 106.0]])
    found = recorded_lanes([row])
    assert (found["begin"], found["end"], found["source"]) == (100.0, 110.0, "timeline")
    learner, w0 = found["lanes"]
    assert [state for _, state, *_ in learner["segments"]] == [WAITING, number_of("training"), -1]
    assert w0["version"] == 7
    assert w0["segments"] == [
        *([0.0, WAITING], [1.0, GENERATING], [3.0, LOADING, "version 7"], [4.0, GENERATING], [5.0, WAITING]),
        *([6.0, WAITING, "prompts, from learner"], [10.0, -1]),
    ]


def test_wrong_worker_clock_is_corrected_by_group_arrival() -> None:
    (_, w0) = recorded_lanes([step(1, groups=[group("w0", 1e12, 2.0, arrived=105.0)])])["lanes"]
    assert w0["segments"][:2] == [[0.0, WAITING], [3.0, GENERATING]]


def test_each_rank_of_the_learner_has_a_lane_that_says_what_it_trained() -> None:
    found = recorded_lanes([step(1, ranks=[1500, 900]), step(2, ranks=[1000, 1100], groups=[group("w0", 121.0, 3.0)])])
    learner, rank, w0 = found["lanes"]
    assert [lane["id"] for lane in found["lanes"]] == [0, 1, 2]
    assert (learner["name"], rank["name"], rank["role"], w0["name"]) == ("learner", "learner rank 1", "learner", "w0")
    texts = [[text for *_, text in lane["segments"] if str(text).startswith("step")] for lane in (learner, rank)]
    assert texts == [
        ["step 1: 1,500 tokens", "step 2: 1,000 tokens"],
        [f"step {step}: {tokens} tokens, in rank 0's time" for step, tokens in ((1, "900"), (2, "1,100"))],
    ]
