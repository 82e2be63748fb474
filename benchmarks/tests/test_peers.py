"""Peers on one scripted engine: what the engine samples, what an abort keeps, and that both kinds of arm give rows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.staleness import Discard
from benchmarks.peers.bring_up import run_peer
from benchmarks.peers.engine import ScriptedEngine, lengths_of
from benchmarks.peers.learner import prompt_of
from benchmarks.peers.ours import run_ours
from benchmarks.peers.scene import SCENES, Row, Scene, index_and_version

QUICK = Scene(
    name="quick",
    groups_per_batch=2,
    group_size=2,
    max_staleness=2,
    length_kind="constant",
    length_mean=10,
    length_max=10,
    capacity=8,
    seconds_per_token=1e-3,
    seconds_per_sequence=0.0,
    load_seconds=0.0,
    train_tokens_per_second=1e6,
    train_seconds=0.02,
    warmup=1,
    steps=3,
)


def is_whole(row: Row) -> bool:
    return (
        row["steps"] == 3
        and row["length_mean"] == 10
        and row["samples_per_second"] > 0
        and 0 <= row["staleness_mean"] <= row["staleness_max"]
        and row["thrown_away_share"] == 0
    )


@pytest.mark.parametrize(("discard", "bound"), [("groups", None), ("tokens", 3)])
def test_asyncrl_gives_a_row_within_its_bound(discard: Discard, bound: int | None) -> None:
    row = run_ours(QUICK, mode="async", discard=discard, max_staleness=bound)
    assert is_whole(row)
    assert row["staleness_max"] <= row["max_staleness"] == (bound or QUICK.max_staleness)


def test_a_peer_in_a_process_of_its_own_gives_one_for_each_scene(tmp_path: Path) -> None:
    rows = run_peer("toy", [QUICK, replace(QUICK, name="again")], folder=tmp_path, limit=60)
    assert len(rows) == 2
    assert all(map(is_whole, rows))


def test_a_peer_that_fails_says_so(tmp_path: Path) -> None:
    assert run_peer("toy", [replace(QUICK, group_size=0)], folder=tmp_path, limit=60) == [
        {"failed": "CalledProcessError"}
    ]


async def test_an_aborted_answer_goes_on_where_it_stopped_and_its_tokens_say_which_weights_sampled_them() -> None:
    engine = ScriptedEngine(replace(QUICK, seconds_per_token=1e-2, length_mean=50, length_max=50))
    asking = asyncio.create_task(engine.generate(prompt_of(7)))
    while engine.stats()["sampled_tokens"] < 3:
        await asyncio.sleep(0.01)
    engine.pause(aborts=True)
    first, reason = await asking
    assert reason == "abort"
    assert 3 <= len(first) < 50
    await engine.load(1)
    engine.resume()
    rest, reason = await engine.generate([*prompt_of(7), *first])
    assert reason == "stop"
    assert len(first) + len(rest) == 50
    assert {index_and_version(token, group_size=2) for token in first} == {(0, 0)}
    assert {index_and_version(token, group_size=2) for token in rest} == {(0, 1)}


async def test_an_answer_that_was_aborted_before_its_first_token_is_drawn_again() -> None:
    engine = ScriptedEngine(replace(QUICK, load_seconds=3600.0))
    loading = asyncio.create_task(engine.load(1))  # no token is sampled meanwhile, however long this test takes
    await asyncio.sleep(0)
    asking = asyncio.create_task(engine.generate(prompt_of(0)))
    await asyncio.sleep(0)
    engine.pause(aborts=True)
    nothing, _ = await asking
    loading.cancel()
    engine.resume()
    again, _ = await engine.generate(prompt_of(0))
    assert not nothing
    assert index_and_version(again[0], group_size=2) == (0, 0)


@pytest.mark.parametrize("scene", SCENES.values(), ids=lambda scene: scene.name)
def test_no_machine_of_a_scene_waits_for_the_other_in_the_ideal(scene: Scene) -> None:
    mean = lengths_of(scene).mean
    engine = replace(scene, train_tokens_per_second=1e12, train_seconds=0.0).ideal_tokens_per_second(mean)
    learner = replace(scene, seconds_per_token=0.0, seconds_per_sequence=0.0, load_seconds=0.0)
    assert scene.ideal_tokens_per_second(mean) == min(engine, learner.ideal_tokens_per_second(mean))
