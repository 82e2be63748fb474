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
from asyncrl.messages.roles import LEARNER, LEARNER_RANK, WORKER
from tests.conftest import explores
from tests.harness.forked import ForkServer
from tests.harness.forking_ray import FORKING_RAY, NAMES_THE_SERVER
from tests.harness.ray import CPUS, SECONDS, RayRun, TwoNodes, kill

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

WORKERS_ON_B = 'launcher.options.rollout_worker.labels={site="b"}'
LEARNER_ON_A = 'launcher.options.learner.labels={site="a"}'


@pytest.fixture
def cluster(two_nodes: TwoNodes) -> TwoNodes:
    two_nodes.mend()
    return two_nodes


def assert_nothing_is_left(cluster: TwoNodes, run: RayRun) -> None:
    """Wait until no process, placement group or actor is left: Ray needs a moment to reclaim a killed run's
    resources."""
    deadline = time.monotonic() + SECONDS
    while run.processes() or cluster.left_behind():
        assert time.monotonic() < deadline, (run.processes(), cluster.left_behind())
        time.sleep(0.05)


@pytest.fixture(scope="class")
def up(tmp_path_factory: pytest.TempPathFactory, two_nodes: TwoNodes, forks: ForkServer) -> Iterator[RayRun]:
    two_nodes.mend()
    gpus = ("launcher.options.learner.gpus=1", "launcher.options.rollout_worker.gpus=0.5")
    where = (LEARNER_ON_A, WORKERS_ON_B, "launcher.options.wait_for_nodes=true", *gpus)
    settings = (*where, "rollout.workers=2", "run.restarts=6", NAMES_THE_SERVER)
    launcher = "ray" if explores else FORKING_RAY
    run = RayRun(tmp_path_factory.mktemp("up"), two_nodes, forks, *settings, launcher=launcher)
    run.start()
    run.until_trained()
    yield run
    run.end()


class TestARunThatIsUp:
    """All tests share one run, because its start is most of their cost.

    Its learner and workers are forked, as their imports were half of that; tests/contracts/test_launcher.py starts a
    program as a user does, and ASYNCRL_EXPLORE=1 this run.
    """

    def test_processes_go_where_they_are_told_and_the_token_nowhere(self, cluster: TwoNodes, up: RayRun) -> None:
        assert cluster.places() == {"learner": cluster.a, "w0": cluster.b, "w1": cluster.b}
        assert len(up.processes()) == 5
        assert up.visible_gpus("learner") in ("0", "1")
        assert up.visible_gpus("w0") == up.visible_gpus("w1"), "two workers share one GPU"
        lines = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "nats-server" in lines and token(up) not in lines

    def test_a_killed_worker_comes_back_and_so_does_one_whose_actor_is_killed(
        self, cluster: TwoNodes, up: RayRun
    ) -> None:
        where = cluster.places()
        first, _ = up.processes()["w0"]
        kill(first)
        up.until(lambda: "w0 ended with signal SIGKILL" in up.said and "restart 1 of 6" in up.said, "its end")
        up.until(lambda: up.processes().get("w0", (first, 0))[0] != first, "another life")
        second, actor = up.processes()["w0"]
        kill(actor)
        up.until(lambda: "restart 2 of 6" in up.said, "its actor's end")
        up.until(lambda: up.processes().get("w0", (second, 0))[0] != second, "a third life")
        up.until_trained()
        assert cluster.places() == where

    def test_a_fleet_grows_and_shrinks_during_training_and_gives_room_back(self, cluster: TwoNodes, up: RayRun) -> None:
        assert up.scale(3) == 0
        up.until(lambda: up.has_loaded("w2"), "the third at work")
        assert set(cluster.places()) == {"learner", "w0", "w1", "w2"}
        assert up.scale(1) == 0
        up.until(lambda: set(cluster.places()) == {"learner", "w0"}, "their room")
        assert "w1 has left" in up.said and "w2 has left" in up.said
        assert set(up.processes()) == {"run", "nats-server", "learner", "w0"}
        up.until_trained()

    def test_a_name_is_taken_once(self, up: RayRun, tmp_path: Path) -> None:
        code, said = up.call("run", "--launcher", "ray", "--set", f"run.directory={tmp_path}")
        assert code == 2
        assert 'run.name: a run "storm" is up on this Ray cluster' in said

    def test_a_killed_nodes_work_is_redelivered_and_its_worker_waits_aloud_for_another_one(
        self, cluster: TwoNodes, up: RayRun
    ) -> None:
        before, _ = up.processes()["w0"]
        cluster.kill_b()
        up.until(lambda: "w0 waits for room: 1 CPU" in up.said, "that it waits")
        cluster.mend()
        up.until(lambda: up.processes().get("w0", (before, 0))[0] != before, "another life")
        up.until_trained()
        assert cluster.places() == {"learner": cluster.a, "w0": cluster.b}

    def test_a_killed_run_leaves_nothing_and_goes_on_with_resume(self, cluster: TwoNodes, up: RayRun) -> None:
        up.signal(signal.SIGKILL)
        assert up.wait() == -signal.SIGKILL
        assert_nothing_is_left(cluster, up)
        up.start("--resume", "--set", "rollout.workers=1")
        up.until_trained()

    def test_a_full_node_is_waited_for_aloud_and_ctrl_c_ends_the_wait_with_nothing_left(
        self, cluster: TwoNodes, up: RayRun
    ) -> None:
        other = ray.util.placement_group([{"CPU": CPUS - 1}], bundle_label_selector=[{"site": "b"}], name="other")
        assert other.wait(SECONDS)
        up.scale(2, "--timeout", "1")
        up.until(lambda: "w1 waits for room" in up.said, "that it waits")
        secret = token(up)
        up.signal(signal.SIGINT)
        assert up.wait() == 130
        ray.util.remove_placement_group(other)
        assert_nothing_is_left(cluster, up)
        logs = [up.said, *(path.read_text(errors="replace") for path in cluster.logs.rglob("*") if path.is_file())]
        assert not any(secret in text for text in logs)
        found = up.audit()
        assert (found["code"], found["lost"], found["duplicated"]) == (0, 0, 0), found


def token(run: RayRun) -> str:
    return str(json.loads((run.directory / "bus.json").read_text())["token"])


def test_what_can_never_run_is_refused_in_a_line_and_at_once(
    cluster: TwoNodes, tmp_path: Path, forks: ForkServer
) -> None:
    code, said = RayRun(tmp_path, cluster, forks, "rollout.workers=9").call("run", "--launcher", "ray")
    assert code == 2
    (complaint,) = [line for line in said.splitlines() if line.startswith("asyncrl")]
    assert "10 processes (learner ... w8) need 10 CPU; the cluster has 8 CPU on 2 machines" in complaint
    assert "Traceback" not in said
    assert cluster.left_behind() == []


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


@pytest.fixture
def runtime_env(tmp_path: Path) -> dict[str, Any]:
    """A working directory with a run.toml, and a module on PYTHONPATH that writes down what is there at a start."""
    code, work = tmp_path / "code", tmp_path / "work"
    for folder in (code, work):
        folder.mkdir()
    (work / "run.toml").touch()
    (code / "sitecustomize.py").write_text("import os; open(os.environ['SEEN'], 'w').write(str(os.listdir()))")
    return {"working_dir": str(work), "env_vars": {"PYTHONPATH": str(code), "SEEN": str(tmp_path / "seen")}}


@pytest.mark.parametrize("given", ["in the run file, over ray://", "by a job"])
async def test_processes_start_in_ray_s_runtime_environment(
    launch: Callable[..., RayLauncher],
    cluster: TwoNodes,
    runtime_env: dict[str, Any],
    tmp_path: Path,
    given: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if given == "by a job":  # what `ray job submit` sets for its command
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": runtime_env, "metadata": {}}))
        launcher = launch()
    else:
        launcher = launch(address=cluster.client, runtime_env=runtime_env)
    process = await launcher.start(spec())
    assert await process.wait() == 0
    assert (tmp_path / "seen").read_text() == "['run.toml']"


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


@pytest.mark.parametrize(
    ("address", "reason"),
    [("ray://127.0.0.1:9", "no Ray cluster answers"), ("127.0.0.1:9", "no Ray cluster answers")],
)
def test_an_address_without_a_cluster_is_refused(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RayLauncher(run_name="x", log_directory=Path(), options=Options(address=address)).connect()


@pytest.mark.parametrize("section", ["learner", "rollout", "evaluation"])
def test_numbers_of_gpus_are_for_one_machine(
    cluster: TwoNodes, tmp_path: Path, section: str, forks: ForkServer
) -> None:
    run = RayRun(tmp_path, cluster, forks)
    made = config.load(run.folder / "run.toml", ["launcher.kind=ray", f"{section}.gpus=[0]"])
    with pytest.raises(ConfigError, match=f"{section}.gpus: numbers are of one machine"):
        check(made)


def test_without_ray_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        RayLauncher(run_name="x", log_directory=Path(), options=Options()).connect()
    assert str(caught.value) == 'launcher.kind: "ray" needs ray; pip install asyncrl[ray]'
