"""What a run promises when anything it is made of may be killed at any instant."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.chaos.report import SUMMED, table, total
from tests.chaos.storm import Kill, Storm
from tests.chaos.victims import KINDS, deal

KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(2400)  # a kill and what follows take about six seconds, on a busy machine twenty
def test_twenty_kills_lose_no_group_and_train_none_twice(tmp_path: Path) -> None:
    storm = Storm(tmp_path, seed=1)
    audit = asyncio.run(storm.blow(KILLS))
    assert {kill.kind for kill in storm.kills} == set(KINDS)
    assert (audit["lost"], audit["duplicated"], audit["staleness_violations"]) == (0, 0, 0), audit
    assert audit["exit_code"] == 0
    assert audit["trained"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_storm_of_forked_processes_kills_and_audits_the_same(tmp_path: Path) -> None:
    storm = Storm(tmp_path, seed=2, is_forked=True)
    audit = asyncio.run(storm.blow(len(KINDS)))
    assert {kill.kind for kill in storm.kills} == set(KINDS)
    assert audit["exit_code"] == 0, audit


def test_every_kind_of_kill_comes_equally_often_and_a_seed_gives_the_same_storm() -> None:
    dealt = list(itertools.islice(deal(7), 5 * len(KINDS)))
    assert all(dealt.count(kind) == 5 for kind in KINDS)
    assert dealt == list(itertools.islice(deal(7), 5 * len(KINDS)))
    assert dealt != list(itertools.islice(deal(8), 5 * len(KINDS)))


def test_the_table_has_a_row_for_each_kind_with_the_times_until_all_was_as_before() -> None:
    kills = [Kill(kind=KINDS[0], victims=("learner",), seconds=float(i), step=i) for i in range(1, 21)]
    (row,) = table([kill.as_json() for kill in kills])
    assert (row["kills"], row["p50"], row["p95"], row["worst"]) == (20, 10.0, 19.0, 20.0)


def test_storms_side_by_side_are_clean_only_when_every_one_of_them_is() -> None:
    counts = dict.fromkeys(SUMMED, 0) | {"prompts": 10, "max_staleness": 2}
    clean = {"problem": "", "tokens": {"generated": 100, "lost": 1}, "audit": counts | {"exit_code": 0}}
    dirty = clean | {"audit": counts | {"lost": 1, "exit_code": 1}}
    assert total([clean, clean], asked=2, storms=2)["clean"]
    assert total([clean, clean], asked=2, storms=2)["audit"]["prompts"] == 20
    assert total([clean, clean], asked=2, storms=2)["tokens_lost_share"] == 0.01
    assert not total([clean, dirty], asked=2, storms=2)["clean"]
    assert not total([clean, clean | {"problem": "not back"}], asked=2, storms=2)["clean"]
    assert not total([clean], asked=2, storms=2)["clean"]  # one never came to its end
