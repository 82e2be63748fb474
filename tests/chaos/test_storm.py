"""A run's guarantees when any of its processes may be killed at any instant."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages import replace
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import TRAJECTORIES, answer_key
from tests.chaos.kill import Kill
from tests.chaos.report import SUMMED, table, total
from tests.chaos.run_files import evaluating
from tests.chaos.seen import Seen
from tests.chaos.storm import Storm
from tests.chaos.victims import FAULTS, KILLS, deal
from tests.conftest import BUS_SIZES
from tests.harness import groups
from tests.harness.fakes import until
from tests.harness.forked import ForkServer


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a kill with its recovery takes seconds, on a busy machine twenty
def test_kills_at_every_moment_lose_no_group_train_none_twice_and_leave_no_wrong_evaluation(
    tmp_path: Path, forks: ForkServer
) -> None:
    """Each kind of kill once; bin/chaos kills thousands of times.

    The audit recomputes the newest result of the evaluation from its answers; all other results are complete or say
    that they are not.
    """
    storm = Storm(tmp_path, seed=3, forks=forks, overrides=evaluating(tmp_path, "shared"))
    audit = asyncio.run(storm.blow(len(KILLS)))
    assert {kill.kind for kill in storm.kills} == set(KILLS)
    assert (audit["lost"], audit["duplicated"], audit["staleness_violations"]) == (0, 0, 0), audit
    assert (audit["exit_code"], audit["evaluation_problems"]) == (0, 0), audit
    assert audit["trained"] > 0
    assert audit["evaluations"] > 0
    assert audit["evaluation_answers"] >= 24
    rows = [json.loads(line) for line in (storm.run_directory / "metrics.jsonl").read_text().splitlines()]
    results = [row for row in rows if "evaluation/complete" in row]
    assert all(row["evaluation/complete"] == (row["evaluation/prompts/missing"] == 0) for row in results)
    assert all(row["evaluation/prompts/prompts"] == 24 for row in results)
    assert results[-1]["evaluation/complete"] == 1.0


async def test_a_group_is_an_honest_workers_only_if_nobody_had_answered_it_before() -> None:
    """A liar gets the prompts of a worker that was stopped for too long. Both answer, and the log is trimmed in
    between."""
    bus = MemoryBus(**(BUS_SIZES | {"max_message_bytes": 2**20}))
    keys, evil = (
        [answer_key(group_id, worker=worker, ticket="0" * 32) for group_id in range(3)] for worker in ("w0", "evil")
    )
    seen = Seen()
    reading = asyncio.create_task(seen.read_groups(bus))
    for key, data in (
        (evil[0], b"does not decode"),
        (evil[1], encode(replace(groups.group(7), worker="evil"))),
        (answer_key(2, worker="evil", ticket="1" * 32), b"of somebody who was not lent it"),
    ):
        assert bus._log(TRAJECTORIES).add(key, data)
    await until(lambda: seen.sequence == 3)
    await bus.trim(TRAJECTORIES, through=3)
    for group_id, key in enumerate(keys):
        await bus.publish(TRAJECTORIES, replace(groups.group(group_id), worker="w0"), key=key)
    await until(lambda: seen.sequence == 6)
    reading.cancel()
    assert seen.groups == {0, 1, 2}
    assert seen.honest == {2}


def test_every_kind_of_kill_is_equally_frequent_and_a_seed_gives_the_same_storm() -> None:
    for kinds in FAULTS.values():
        dealt = list(itertools.islice(deal(7, kinds), 5 * len(kinds)))
        assert all(dealt.count(kind) == 5 for kind in kinds)
        assert dealt == list(itertools.islice(deal(7, kinds), 5 * len(kinds)))
        assert dealt != list(itertools.islice(deal(8, kinds), 5 * len(kinds)))
    assert len(set(map(str, FAULTS["all"]))) == len(FAULTS["all"])  # each has its own row


def test_the_table_has_a_row_for_each_kind_with_its_recovery_times() -> None:
    kills = [Kill(kind=KILLS[0], victims=("learner",), seconds=float(i), step=i) for i in range(1, 21)]
    (row,) = table([kill.as_json() for kill in kills])
    assert (row["kills"], row["p50"], row["p95"], row["worst"]) == (20, 10.0, 19.0, 20.0)


def test_concurrent_storms_are_clean_only_if_each_of_them_is() -> None:
    counts = dict.fromkeys(SUMMED, 0) | {"prompts": 10, "max_staleness": 2}
    clean = {"problem": "", "tokens": {"generated": 100, "lost": 1}, "audit": counts | {"exit_code": 0}}
    dirty = clean | {"audit": counts | {"lost": 1, "exit_code": 1}}
    assert total([clean, clean], asked=2, storms=2)["clean"]
    assert total([clean, clean], asked=2, storms=2)["audit"]["prompts"] == 20
    assert total([clean, clean], asked=2, storms=2)["tokens_lost_share"] == 0.01
    assert not total([clean, dirty], asked=2, storms=2)["clean"]
    assert not total([clean, clean | {"problem": "not back"}], asked=2, storms=2)["clean"]
    assert not total([clean], asked=2, storms=2)["clean"]  # one storm did not finish
