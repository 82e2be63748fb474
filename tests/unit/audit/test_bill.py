"""Whose GPU-seconds are whose."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from asyncrl.actors.learner.metrics_reporter import Gpus, cost_metrics
from asyncrl.audit.bill import Bill, Interval, engine_items, gains_of, learner_items, server_items
from asyncrl.cli.bill import _prices
from asyncrl.errors import ConfigError


def interval(began: float, ended: float, **more: Any) -> Interval:
    return Interval(worker="w0", began=began, ended=ended, **({"fate": "trained"} | more))


def test_groups_in_progress_at_the_same_time_share_the_gpus() -> None:
    items = engine_items(
        [interval(0, 10, task="a"), interval(5, 15, task="b"), interval(20, 21, fate="stale", task="c")], gpus=2
    )
    # A alone for 5 s, A and B for 5 s, B alone for 5 s, nothing for 5 s, C for 1 s; two GPUs each
    assert Bill(items=items).by("task") == {"a": 15.0, "b": 15.0, "": 10.0, "c": 2.0}
    assert Bill(items=items).by("fate") == {"trained": 30.0, "idle": 10.0, "stale": 2.0}
    assert Bill(items=items).gpu_seconds == 2 * 21


def test_workers_of_a_group_cost_the_gpus_of_their_own_engines() -> None:
    items = engine_items(
        [interval(0, 10), dataclasses.replace(interval(0, 10), worker="long-0")], gpus=1, own={"long-0": 4}
    )
    assert {one.actor: one.gpu_seconds for one in items if one.fate == "trained"} == {"w0": 10.0, "long-0": 40.0}
    gpus = Gpus(of_worker=1, of_learner=2, of_pools={"long-0": 4}, of_servers=3)
    row = {"learner/elapsed_seconds": 10.0, "length/trained_tokens": 50.0}
    made = cost_metrics(row, gpus=gpus, workers=["w0", "w1", "long-0"])
    assert made == {"cost/gpu_seconds": 10.0 * (2 + 2 + 4 + 3), "cost/gpu_seconds_per_token": 2.2}
    turns = cost_metrics(row, gpus=dataclasses.replace(gpus, are_shared=True), workers=["w0", "w1", "long-0"])
    assert turns["cost/gpu_seconds"] == 10.0 * (2 + 4 + 3)  # learner and w0, w1 take turns on two


def test_a_step_is_shared_by_its_tokens_and_one_that_was_rolled_back_is_named() -> None:
    rows = {
        (0, 1): {"learner/step_seconds": 6.0, "learner/elapsed_seconds": 10.0},
        (0, 2): {"learner/step_seconds": 6.0, "learner/elapsed_seconds": 7.0},
        (1, 2): {"learner/step_seconds": 6.0, "learner/elapsed_seconds": 8.0},
    }
    trained = [
        interval(0, 1, step=1, tokens=10, task="a"),
        interval(0, 1, step=1, tokens=20, task="b"),
        interval(0, 1, step=2, tokens=5, task="a"),
    ]
    bill = Bill(items=learner_items(rows, trained, present_steps={1: 0, 2: 1}, gpus=1))
    assert bill.by("fate") == {"trained": 12.0, "rolled back": 7.0, "waiting": 6.0}
    assert bill.by("task")["a"] == pytest.approx(2.0 + 6.0)
    assert math.isclose(bill.cost({"learner": 36.0}), 36.0 * 25 / 3600)


def test_a_server_costs_its_gpus_while_the_learner_is_up() -> None:
    rows = {(0, 1): {"learner/elapsed_seconds": 10.0}, (1, 1): {"learner/elapsed_seconds": 8.0}, (1, 2): {}}
    bill = Bill(items=server_items(rows, gpus={"judge": 4, "tools": 0}))
    assert bill.by("actor") == {"judge": 72.0, "tools": 18.0}
    assert (bill.by("fate"), bill.trained_tokens) == ({"serving": 90.0}, 0)
    assert math.isclose(bill.cost({"": 1.0, "server": 2.0, "tools": 3.0}), (72 * 2 + 18 * 3) / 3600)


def test_a_price_is_that_of_the_worker_or_else_of_its_role_or_else_of_all() -> None:
    bill = Bill(items=engine_items([interval(0, 3600)], gpus=1))
    assert [bill.cost(_prices(items)) for items in (["3"], ["3", "rollout=2"], ["3", "rollout=2", "w0=1"], [])] == [
        3.0,
        2.0,
        1.0,
        0.0,
    ]
    for wrong in ("x", "w0=", "w0=-1", "w0=nan"):
        with pytest.raises(ConfigError, match="must be a price of a GPU-hour"):
            _prices([wrong])
    with pytest.raises(ConfigError, match="--price rolout=2: not on this bill; learner, rollout, server, w0 are"):
        bill.cost(_prices(["rolout=2"]))


def test_a_gain_is_from_the_first_evaluation_to_the_last() -> None:
    name = "evaluation/held_out/mean@4"
    rows = [{"step": 0, name: 0.1, f"{name}/low": 0.0}, {"step": 4, name: 0.3, f"{name}/low": 0.2}]
    assert gains_of([*rows, {"evaluation/other/mean@1": 1.0}]) == {name: (0.1, 0.3)}
