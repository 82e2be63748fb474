"""A learner on several machines of a Ray cluster: each part has its own machine, and a machine may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from asyncrl.launch.launchers.ray import Options, RayLauncher, Role
from asyncrl.launch.port import ProcessSpec
from asyncrl.messages.roles import LEARNER, LEARNER_RANK
from tests.harness.ray import RayRun, TwoNodes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1200)]


@pytest.fixture
def cluster(two_nodes: TwoNodes) -> TwoNodes:
    two_nodes.mend()
    return two_nodes


@pytest.fixture
def run(tmp_path: Path, cluster: TwoNodes) -> Iterator[RayRun]:
    made = RayRun(tmp_path, cluster, 'launcher.options.learner.labels={site="in(a,b)"}', answers="ranks")
    yield made
    made.end()


def test_a_learner_whose_second_machine_is_lost_goes_on_once_there_is_another(cluster: TwoNodes, run: RayRun) -> None:
    run.start(steps=10)
    run.until(lambda: run.step >= 4, "four steps")
    places = cluster.places()
    assert {places["learner"], places["learner-1"]} == {cluster.a, cluster.b}
    other = "learner-1" if places["learner"] == cluster.a else "learner"
    cluster.kill_b()
    run.until(lambda: f"{other} ended with signal SIGKILL" in run.said, "word of its end")
    cluster.mend()
    assert run.wait() == 0, run.said
    assert run.step == 10 and "resumed at step" in run.said
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0), found


async def test_the_parts_of_a_learner_are_on_machines_of_their_own_and_each_ones_ranks_beside_each_other(
    cluster: TwoNodes, tmp_path: Path
) -> None:
    def rank(number: int, *, beside: str = "", apart: tuple[str, ...] = ()) -> ProcessSpec:
        return ProcessSpec(
            name=f"learner-{number}" if number else LEARNER,
            role=LEARNER_RANK if number else LEARNER,
            arguments=("check", "--help"),
            beside=beside,
            apart=apart,
            meets=LEARNER,
        )

    specs = [
        rank(3, beside="learner-2"),
        rank(2, apart=(LEARNER,)),
        rank(1, beside=LEARNER),
        rank(0, apart=("learner-2",)),
    ]
    cluster.leave()
    launcher = RayLauncher(
        run_name="parts", log_directory=tmp_path, options=Options(address=cluster.address, learner=Role(cpus=0.5))
    )
    launcher.connect()
    try:
        launcher.check_room(specs)
        for process in await asyncio.gather(*map(launcher.start, specs)):
            assert await process.wait() == 0
        machines = {name: place.machine for name, place in launcher._places.items()}
        assert machines[LEARNER] == machines["learner-1"] != machines["learner-2"] == machines["learner-3"]
        assert launcher._launch_request(specs[0]).environment["MASTER_ADDR"]
    finally:
        await launcher.close()
        cluster.watch()
