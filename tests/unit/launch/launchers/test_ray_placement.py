"""Placement on Ray: machines of processes, and of the ranks of a learner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.launchers import ray_placement
from asyncrl.launch.launchers.process_agent import OutputChunk, StartResult
from asyncrl.launch.launchers.ray import Options, RayLauncher, RayProcess, Role
from asyncrl.launch.launchers.ray_placement import Choice, Machine, Need, Strategy
from asyncrl.launch.port import ProcessSpec
from asyncrl.messages.roles import ENGINE_NODE, LEARNER, LEARNER_RANK, MODEL_SERVER, WORKER

A = Machine(id="a", address="10.0.0.1", capacity={"CPU": 4.0, "GPU": 2.0}, labels={"kind": "H100"})
B = Machine(id="b", address="10.0.0.2", capacity={"CPU": 4.0})
CPU = Need(name="w0", resources={"CPU": 1.0})
GPU = Need(name="w0", resources={"CPU": 1.0, "GPU": 1.0})


def choose(strategy: Strategy, *ours: str, need: Need = CPU, planned: int = 3, apart: str = "") -> Choice:
    return ray_placement.choose(
        need, strategy=strategy, machines=[A, B], ours=ours, planned=[need] * planned, apart=apart
    )


def test_pack_prefers_the_machine_of_the_others_and_spread_avoids_it() -> None:
    assert choose("PACK", "b", "b", "a") == Choice(near="b")
    assert choose("SPREAD", "b", "b", "a") == Choice(near="a")
    assert choose("PACK") == choose("SPREAD") == Choice()
    assert choose("SPREAD", "a", need=GPU) == Choice(near="a")  # b has no GPU


def test_strict_pack_chooses_one_machine_with_room_for_all() -> None:
    assert choose("STRICT_PACK", "b") == Choice(within=frozenset("b"))
    assert choose("STRICT_PACK") == Choice(within=frozenset("ab"))
    assert choose("STRICT_PACK", need=GPU, planned=2) == Choice(within=frozenset("a"))


def test_strict_spread_shares_no_machine() -> None:
    assert choose("STRICT_SPREAD", "a") == Choice(without=frozenset("a"))
    assert choose("STRICT_SPREAD", "a", "b").may_come_true([A, B]) is False


@pytest.mark.parametrize(
    ("need", "fits"),
    [
        ({}, True),
        ({"kind": "H100"}, True),
        ({"kind": "A100"}, False),
        ({"other": "x"}, False),
        ({"kind": "in(H100,A100)"}, True),  # Ray evaluates its own operators
        ({"kind": "!H100"}, True),
    ],
)
def test_compares_labels_and_leaves_operators_to_ray(need: dict[str, str], fits: bool) -> None:
    assert Need(name="w0", resources={"CPU": 1.0}, labels=need).fits(A) is fits


def refusal(needs: list[Need], strategy: Strategy = "PACK") -> str:
    return ray_placement.refusal(needs, strategy=strategy, machines=[A, B])


def test_refusal_says_what_is_needed_and_what_there_is() -> None:
    big = Need(name="learner", resources={"CPU": 1.0, "GPU": 4.0}, labels={"kind": "H100"})
    assert refusal([big]) == (
        "learner needs 1 CPU, 4 GPU, kind = H100 on one machine; there is 10.0.0.1 4 CPU, 2 GPU; 10.0.0.2 4 CPU, 0 GPU"
    )
    assert refusal([GPU] * 3) == "3 processes (w0 ... w0) need 3 CPU, 3 GPU; the cluster has 8 CPU, 2 GPU on 2 machines"
    assert refusal([CPU] * 5, "STRICT_PACK") == (
        "STRICT_PACK: 5 processes (w0 ... w0) need 5 CPU on one machine; there is 10.0.0.1 4 CPU; 10.0.0.2 4 CPU"
    )
    assert refusal([CPU] * 3, "STRICT_SPREAD") == (
        "STRICT_SPREAD: 3 processes (w0 ... w0) need 3 machines; the cluster has 2"
    )


def test_beside_and_apart_win_over_the_strategy() -> None:
    strategies: tuple[Strategy, ...] = ("PACK", "SPREAD", "STRICT_SPREAD")
    for strategy in strategies:
        found = ray_placement.choose(CPU, strategy=strategy, machines=[A, B], ours="b", planned=[CPU], beside="b")
        assert found == Choice(within=frozenset("b"))
    apart = ray_placement.choose(CPU, strategy="PACK", machines=[A, B], ours="a", planned=[CPU], apart="a")
    assert apart.without == frozenset("a") and apart.near != "a"


def machines_of_a_learner(count: int, *, each: int, resources: dict[str, float]) -> list[Need]:
    return [
        Need(
            name=f"learner-{machine}.{rank}",
            resources=resources,
            beside=f"learner-{machine}.0" if rank else "",
            apart=tuple(f"learner-{other}.0" for other in range(count) if other != machine and not rank),
        )
        for machine in range(count)
        for rank in range(each)
    ]


def test_each_machine_of_a_learner_has_room_for_all_its_ranks() -> None:
    two_of_two = machines_of_a_learner(2, each=2, resources={"CPU": 1.0})
    assert refusal(two_of_two) == refusal(two_of_two, "STRICT_SPREAD") == ""
    assert refusal(machines_of_a_learner(2, each=2, resources={"CPU": 1.0, "GPU": 0.5})) == (
        "learner.machines = 2 need as many machines with 2 CPU, 1 GPU; the cluster has 1"
    )
    assert refusal(machines_of_a_learner(3, each=1, resources={"CPU": 1.0})) == (
        "learner.machines = 3 need as many machines with 1 CPU; the cluster has 2"
    )
    assert refusal(two_of_two, "STRICT_PACK") == "STRICT_PACK: learner.machines = 2 are to be as many machines"


def test_engines_of_several_machines_may_share_theirs_with_each_other() -> None:
    """Machines A and B have 2 CPUs each."""
    parts = [
        Need(name=name, resources={"CPU": 1.0}, apart=(other,))
        for worker in ("w0", "w1")
        for name, other in ((worker, f"{worker}-node1"), (f"{worker}-node1", worker))
    ]
    assert refusal(parts) == ""
    three = [Need(name="w0", resources={"CPU": 1.0}, apart=("w0-node1", "w0-node2"))]
    assert refusal(three) == "engine.options.machines = 3 need as many machines with 1 CPU; the cluster has 2"
    assert refusal(parts, "STRICT_PACK") == "STRICT_PACK: engine.options.machines = 2 are to be as many machines"


class Ended:
    """Stands in for the actor of a process that has ended."""

    @property
    def news(self) -> Any:
        async def remote(_: int) -> OutputChunk:
            return OutputChunk(lines=(), last=0, code=1)

        return SimpleNamespace(remote=remote)


async def test_rank_waits_for_the_place_of_the_restarted_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one's machine may be gone, and with it the address."""
    launcher = RayLauncher(run_name="test", log_directory=tmp_path, options=Options())
    monkeypatch.setattr(launcher, "kill", lambda actor: None)
    spec = ProcessSpec(name="learner-1", role=LEARNER_RANK, arguments=(), meets=LEARNER)
    await launcher._wait_for_those_before(spec)
    assert await RayProcess(Ended(), launcher, name=LEARNER, started=StartResult()).wait() == 1
    waiting = asyncio.ensure_future(launcher._wait_for_those_before(spec))
    await asyncio.wait({waiting}, timeout=0.05)
    assert not waiting.done()
    async with launcher._placed:  # as when the next one has a machine
        launcher._unplaced.discard(LEARNER)
        launcher._placed.notify_all()
    await waiting


def test_a_server_takes_the_gpus_of_its_own_model_and_the_resources_of_its_role(tmp_path: Path) -> None:
    options = Options(rollout_worker=Role(gpus=4), model_server=Role(cpus=2, labels={"pool": "judges"}))
    launcher = RayLauncher(run_name="test", log_directory=tmp_path, options=options)
    machine = Machine(id="a", address="a", capacity={"CPU": 8.0, "GPU": 8.0})
    spec = ProcessSpec(name="judge", role=MODEL_SERVER, arguments=(), num_gpus=2)
    need = launcher._need(spec, [machine])
    assert (dict(need.resources), dict(need.labels)) == ({"CPU": 2, "GPU": 2.0}, {"pool": "judges"})


async def test_another_machine_of_an_engine_waits_for_the_place_of_its_worker(tmp_path: Path) -> None:
    """Other workers do not wait for it."""
    launcher = RayLauncher(run_name="test", log_directory=tmp_path, options=Options())
    launcher._met = launcher._unplaced = {"w0"}
    await launcher._wait_for_those_before(ProcessSpec(name="w1", role=WORKER, arguments=()))
    await launcher._wait_for_those_before(ProcessSpec(name="w0", role=WORKER, arguments=(), meets="w0"))
    node = ProcessSpec(name="w0-node1", role=ENGINE_NODE, arguments=(), meets="w0")
    waiting = asyncio.ensure_future(launcher._wait_for_those_before(node))
    await asyncio.sleep(0)
    assert not waiting.done()
    async with launcher._placed:
        launcher._unplaced.discard("w0")
        launcher._placed.notify_all()
    await waiting


@pytest.mark.parametrize("address", ["ray://head", "ray://10001", "head", "ray://head:"])
def test_an_address_without_a_port_is_refused_before_ray_waits_for_it(address: str) -> None:
    with pytest.raises(ConfigError, match="^address must be "):
        Options(address=address)


@pytest.mark.parametrize("address", ["", "auto", "head:6379", "ray://head:10001", "[::1]:6379", "anyscale://project"])
def test_whatever_ray_can_reach_is_an_address(address: str) -> None:
    assert Options(address=address).address == address
