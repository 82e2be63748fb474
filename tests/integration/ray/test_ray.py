"""`asyncrl run --launcher ray` on a Ray cluster of two nodes: placement, recovery and scaling; nothing is left behind.

Real raylets, actors, processes and nats-servers; the model is the tiny net of the staleness benchmark.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from asyncrl import config
from asyncrl.errors import ConfigError, NoRoom
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.launchers.ray import Options, RayLauncher, Role
from asyncrl.launch.port import ProcessSpec
from asyncrl.messages.roles import WORKER
from tests.harness.ray import CPUS, SECONDS, RayRun, TwoNodes, kill

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1200)]

Make = Callable[..., RayRun]
WORKERS_ON_B = 'launcher.options.rollout_worker.labels={site="b"}'
LEARNER_ON_A = 'launcher.options.learner.labels={site="a"}'


@pytest.fixture
def cluster(two_nodes: TwoNodes) -> TwoNodes:
    two_nodes.mend()
    return two_nodes


@pytest.fixture
def make(tmp_path: Path, cluster: TwoNodes) -> Iterator[Make]:
    made: list[RayRun] = []

    def one(*overrides: str, name: str = "storm") -> RayRun:
        made.append(RayRun(tmp_path, cluster, *overrides, name=name))
        return made[-1]

    yield one
    for run in made:
        run.end()


def assert_nothing_is_left(cluster: TwoNodes, run: RayRun) -> None:
    """Wait until no process, placement group or actor is left: Ray needs a moment to reclaim a killed run's
    resources."""
    deadline = time.monotonic() + SECONDS
    while run.processes() or cluster.left_behind():
        assert time.monotonic() < deadline, (run.processes(), cluster.left_behind())
        time.sleep(0.05)


def assert_is_clean(found: dict[str, Any]) -> None:
    assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0), found


def test_processes_go_where_they_are_told_and_the_token_nowhere(cluster: TwoNodes, make: Make) -> None:
    run = make(LEARNER_ON_A, WORKERS_ON_B, "rollout.workers=2")
    run.start(steps=60)
    run.until(lambda: len(cluster.places()) == 3, "three places")
    assert cluster.places() == {"learner": cluster.a, "w0": cluster.b, "w1": cluster.b}
    run.until(lambda: len(run.processes()) == 5, "all processes")
    token = json.loads((run.directory / "bus.json").read_text())["token"]
    lines = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "nats-server" in lines and token not in lines
    assert run.wait() == 0
    assert "learner: done: 60 steps" in run.said
    assert_nothing_is_left(cluster, run)
    logs = [run.said, *(path.read_text(errors="replace") for path in cluster.logs.rglob("*") if path.is_file())]
    assert not any(token in text for text in logs)
    assert_is_clean(run.audit())


def test_one_machine_for_all_and_each_process_sees_its_gpus_alone(cluster: TwoNodes, make: Make) -> None:
    gpus = ["launcher.options.learner.gpus=1", "launcher.options.rollout_worker.gpus=0.5"]
    run = make('launcher.options.strategy="STRICT_PACK"', *gpus, "rollout.workers=2")
    run.start()
    names = ("learner", "w0", "w1")
    run.until(lambda: set(names) <= set(run.processes()), "all processes")
    learner, *workers = (run.visible_gpus(name) for name in names)
    assert len(set(cluster.places().values())) == 1
    assert sorted([learner, *set(workers)]) == ["0", "1"], "a GPU for the learner, and one that two workers share"
    run.until_trained()
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert_nothing_is_left(cluster, run)
    assert_is_clean(run.audit())


@pytest.fixture(scope="class")
def up(tmp_path_factory: pytest.TempPathFactory, two_nodes: TwoNodes) -> Iterator[RayRun]:
    two_nodes.mend()
    run = RayRun(tmp_path_factory.mktemp("up"), two_nodes, name="one")
    run.start()
    run.until_trained()
    yield run
    run.end()


class TestARunThatIsUp:
    """All tests share one run, because its start is most of their cost."""

    def test_a_killed_worker_comes_back_and_so_does_one_whose_actor_is_killed(
        self, cluster: TwoNodes, up: RayRun
    ) -> None:
        where = cluster.places()
        first, _ = up.processes()["w0"]
        kill(first)
        up.until(lambda: "w0 ended with signal SIGKILL" in up.said and "restart 1 of 3" in up.said, "its end")
        up.until(lambda: up.processes().get("w0", (first, 0))[0] != first, "another life")
        up.until_trained()
        assert cluster.places() == where

        second, actor = up.processes()["w0"]
        kill(actor)
        up.until(lambda: "restart 2 of 3" in up.said, "its actor's end")
        up.until(lambda: up.processes().get("w0", (second, 0))[0] != second, "a third life")
        up.until_trained()
        assert cluster.places() == where

    def test_a_fleet_grows_and_shrinks_during_training_and_gives_room_back(self, cluster: TwoNodes, up: RayRun) -> None:
        up.scale(3)
        up.until(lambda: up.has_loaded("w1") and up.has_loaded("w2"), "all three at work")
        assert set(cluster.places()) == {"learner", "w0", "w1", "w2"}
        up.scale(1)
        up.until(lambda: set(cluster.places()) == {"learner", "w0"}, "their room")
        assert "w1 has left" in up.said and "w2 has left" in up.said
        assert set(up.processes()) == {"run", "nats-server", "learner", "w0"}
        up.until_trained()

    def test_two_runs_share_a_cluster_and_a_name_is_taken_once(
        self, cluster: TwoNodes, up: RayRun, make: Make, tmp_path: Path
    ) -> None:
        other = make(name="two")
        other.start()
        other.until_trained()
        second = RayRun(tmp_path, cluster, f"run.directory={tmp_path / 'elsewhere'}", name="one")
        second.start()
        assert second.wait() == 2
        assert 'run.name: a run "one" is up on this Ray cluster' in second.said
        assert len(cluster.left_behind()) == 8  # a placement group and an actor for each of four processes
        other.signal(signal.SIGINT)
        assert other.wait() == 130
        assert len(cluster.places()) == 2
        up.until_trained()
        assert_is_clean(other.audit())

    def test_ctrl_c_ends_a_run_with_nothing_left_of_it(self, cluster: TwoNodes, up: RayRun) -> None:
        up.signal(signal.SIGINT)
        assert up.wait() == 130
        assert_nothing_is_left(cluster, up)
        assert_is_clean(up.audit())


def test_a_killed_nodes_work_is_redelivered_and_its_worker_comes_back_on_the_other(
    cluster: TwoNodes, make: Make
) -> None:
    run = make(LEARNER_ON_A, 'launcher.options.strategy="SPREAD"')
    run.start()
    run.until_trained()
    assert cluster.places() == {"learner": cluster.a, "w0": cluster.b}
    before, _ = run.processes()["w0"]
    cluster.kill_b()
    run.until(lambda: "w0 ended with signal SIGKILL" in run.said, "word of its end")
    run.until(lambda: run.processes().get("w0", (before, 0))[0] != before, "another life")
    run.until_trained()
    assert cluster.places() == {"learner": cluster.a, "w0": cluster.a}
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert_nothing_is_left(cluster, run)
    assert_is_clean(run.audit())


def test_a_killed_run_leaves_nothing_and_goes_on_with_resume(cluster: TwoNodes, make: Make) -> None:
    run = make(LEARNER_ON_A, WORKERS_ON_B)
    run.start()
    run.until_trained()
    run.signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert_nothing_is_left(cluster, run)
    run.start("--resume", steps=run.step + 3)
    assert run.wait() == 0
    assert_nothing_is_left(cluster, run)
    assert_is_clean(run.audit())


def test_a_full_node_is_waited_for_aloud_and_ctrl_c_ends_the_wait(cluster: TwoNodes, make: Make) -> None:
    other = ray.util.placement_group([{"CPU": CPUS}], bundle_label_selector=[{"site": "b"}], name="other")
    assert other.wait(SECONDS)
    run = make(LEARNER_ON_A, WORKERS_ON_B)
    run.start()
    run.until(lambda: "w0 waits for room: 1 CPU on one machine" in run.said, "that it waits")
    ray.util.remove_placement_group(other)
    run.until_trained()
    assert cluster.places() == {"learner": cluster.a, "w0": cluster.b}
    other = ray.util.placement_group([{"CPU": CPUS - 1}], bundle_label_selector=[{"site": "b"}], name="other")
    assert other.wait(SECONDS)
    run.scale_and_forget(2)
    run.until(lambda: "w1 waits for room" in run.said, "that it waits")
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    ray.util.remove_placement_group(other)
    assert_nothing_is_left(cluster, run)
    assert_is_clean(run.audit())


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.workers=9", "10 processes (learner ... w8) need 10 CPU; the cluster has 8 CPU on 2 machines"),
        ("launcher.options.address=127.0.0.1:9", "no Ray cluster answers"),
    ],
)
def test_what_can_never_run_is_refused_in_a_line_and_at_once(
    cluster: TwoNodes, make: Make, override: str, reason: str
) -> None:
    run = make(override)
    run.start()
    assert run.wait() == 2
    complaint = [line for line in run.said.splitlines() if line.startswith("asyncrl")]
    assert len(complaint) == 1 and reason in complaint[0]
    assert "Traceback" not in run.said
    assert_nothing_is_left(cluster, run)


@pytest.fixture
async def launch(tmp_path: Path, cluster: TwoNodes) -> AsyncIterator[Callable[..., RayLauncher]]:
    """``launch(strategy=...)``: a launcher in this process."""
    cluster.leave()
    made: list[RayLauncher] = []

    def one(**options: Any) -> RayLauncher:
        given = Options(**({"address": cluster.address} | options))
        made.append(RayLauncher(run_name="here", log_directory=tmp_path / "logs", options=given))
        made[-1].connect()
        return made[-1]

    yield one
    for launcher in made:
        await launcher.close()
    cluster.watch()
    assert cluster.left_behind() == []


def spec(number: int = 0, **more: Any) -> ProcessSpec:
    """Return the spec of a worker that ends at once."""
    return ProcessSpec(name=f"w{number}", role=WORKER, arguments=("--version",), **more)


async def test_machines_are_shared_as_the_strategy_says(launch: Callable[..., RayLauncher]) -> None:
    launcher = launch(strategy="STRICT_SPREAD")
    await asyncio.gather(launcher.start(spec(0)), launcher.start(spec(1)))
    assert len({place.machine for place in launcher._places.values()}) == 2
    with pytest.raises(NoRoom, match="STRICT_SPREAD: 3 processes .* need 3 machines; the cluster has 2"):
        await launcher.start(spec(2))
    await launcher.release("w1")
    await launcher.start(spec(2))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rollout_worker": Role(gpus=3.0)}, "w0 needs 1 CPU, 3 GPU on one machine; there is"),
        ({"rollout_worker": Role(labels={"site": "c"})}, "w0 needs 1 CPU, site = c on one machine; there is"),
        ({"strategy": "STRICT_PACK", "rollout_worker": Role(cpus=2.0)}, "3 processes .* need 6 CPU on one machine"),
    ],
)
def test_room_is_counted_before_anything_is_started(
    launch: Callable[..., RayLauncher], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NoRoom, match=reason):
        launch(**options).check_room([spec(number) for number in range(3)])


def test_an_address_of_another_kind_is_refused() -> None:
    launcher = RayLauncher(run_name="x", log_directory=Path(), options=Options(address="ray://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="must be on a node of the cluster"):
        launcher.connect()


@pytest.mark.parametrize("section", ["learner", "rollout"])
def test_numbers_of_gpus_are_for_one_machine(make: Make, section: str) -> None:
    run = make()
    made = config.load(run.folder / "run.toml", ["launcher.kind=ray", f"{section}.gpus=[0]"])
    with pytest.raises(ConfigError, match=f"{section}.gpus: numbers are of one machine"):
        check(made)


def test_without_ray_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        RayLauncher(run_name="x", log_directory=Path(), options=Options()).connect()
    assert str(caught.value) == 'launcher.kind: "ray" needs ray; pip install asyncrl[ray]'
