"""Lanes from what a learner recorded with each step."""

from __future__ import annotations

from typing import Any

from asyncrl.board.lanes import number_of
from asyncrl.board.recorded_lanes import recorded_lanes

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
