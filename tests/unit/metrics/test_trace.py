"""A timeline as Perfetto and Chrome show it: slices in lanes, and arrows that follow each group."""

from __future__ import annotations

from typing import Any

from asyncrl.metrics.trace import trace

SECONDS = {"wait": 1.0, "train": 2.0, "export": 0.25, "publish": 0.5, "checkpoint": 0.0}


def row(step: int, *, time: float, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "incarnation": 0,
        "time": time,
        "seconds": SECONDS,
        "groups": [],
        "loads": [],
        "waits": [],
    } | fields


def slices(made: dict[str, Any], name: str) -> list[tuple[str, float, float]]:
    """Return (lane, begin, length in seconds) of each slice named ``name``."""
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in made["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    return [
        (lanes[event["pid"], event["tid"]], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in made["traceEvents"]
        if event["ph"] == "X" and event["name"] == name
    ]


def test_a_step_stands_behind_its_wait_and_before_its_weights() -> None:
    made = trace([row(7, time=103.0)])
    assert slices(made, "wait for trajectories") == [("steps", 0.0, 1.0)]
    assert slices(made, "step 7") == [("steps", 1.0, 2.0)]
    assert slices(made, "export version 7") == [("weights", 3.0, 0.25)]
    assert slices(made, "publish version 7") == [("weights", 3.25, 0.5)]


def test_an_arrow_leads_a_group_from_its_prompt_to_the_step_that_trains_it() -> None:
    group = [12, "w0", 100.0, 100.5, 1.0, 0.25, 101.5]
    made = trace([row(7, time=105.0, groups=[group])])
    assert slices(made, "group 12") == [
        ("prompts published", 0.0, 0.0001),
        ("groups 1", 0.5, 1.0),
        ("groups arrived", 1.5, 0.0001),
    ]
    assert slices(made, "reward") == [("groups 1", 1.25, 0.25)]
    arrow = [event for event in made["traceEvents"] if event["ph"] in "stf"]
    assert [event["ph"] for event in arrow] == ["s", "t", "t", "f"]
    assert [event["ts"] for event in arrow] == [0, 500_000, 1_500_000, 3_000_000]
    assert {event["id"] for event in arrow} == {"0/12"}
    assert arrow[0]["pid"] != arrow[1]["pid"]


def test_groups_of_one_worker_that_overlap_have_lanes_of_their_own() -> None:
    groups = [
        [1, "w0", 0, 100.0, 2.0, 0, 102.0],
        [2, "w0", 0, 101.0, 2.0, 0, 103.0],
        [3, "w0", 0, 102.5, 1.0, 0, 104.0],
    ]
    made = trace([row(1, time=106.0, groups=groups)])
    assert [slices(made, f"group {number}")[0][0] for number in (1, 2, 3)] == ["groups 1", "groups 2", "groups 1"]


def test_a_clock_that_is_wrong_puts_a_group_where_it_arrived() -> None:
    for began in (0.0, 5.0, 1e12):
        made = trace([row(1, time=1e6 + 3, groups=[[1, "w0", 1e6 - 2, began, 1.0, 0.0, 1e6]])])
        assert slices(made, "group 1")[1][1:] == (1.0, 1.0)


def test_a_load_ends_when_the_worker_says() -> None:
    made = trace([row(1, time=110.0, loads=[["w0", 4, 108.0, 0.5, 0.1]])])
    origin = 107.0
    assert slices(made, "load version 4") == [("engine", round(107.5 - origin, 6), 0.5)]
    assert slices(made, "paused") == [("engine", round(107.9 - origin, 6), 0.1)]


EVALUATION = {"step": 6, "evaluation/complete": 1.0, "evaluation/seconds": 4.0, "evaluation/lag_steps": 1.0}


def test_an_evaluation_has_a_lane_from_its_begin_to_its_end() -> None:
    made = trace([row(6, time=103.0), row(7, time=107.0)], [EVALUATION | {"evaluation/time": 107.5}])
    assert slices(made, "evaluation of version 6") == [("evaluations", 3.5, 4.0)]  # the trace begins at 100
    (event,) = [event for event in made["traceEvents"] if event["name"] == "evaluation of version 6"]
    told = {"version": 6, "incarnation": 0, "complete": 1.0, "seconds": 4.0, "lag_steps": 1.0}
    assert event["args"] == told


def test_each_rank_of_the_learner_has_a_lane_with_what_it_trained() -> None:
    made = trace([row(7, time=103.0, ranks=[500, 300])])
    assert slices(made, "step 7") == [("rank 1", 1.0, 2.0), ("steps", 1.0, 2.0)]
    told = [event["args"]["tokens"] for event in made["traceEvents"] if event["name"] == "step 7"]
    assert told == [300, 500]
