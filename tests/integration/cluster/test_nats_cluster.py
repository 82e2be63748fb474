"""A cluster of three nats-servers: its configuration, tolerated losses, and the separation of runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.jetstream.kv import Lease
from asyncrl.bus.nats_server import config as nats_config
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config.addresses import servers
from asyncrl.errors import BusError, ConfigError
from asyncrl.messages.topics import ALL, PROGRESS, PROMPTS, TRAJECTORIES, WEIGHTS
from tests.chaos.run_files import CALM
from tests.chaos.storm import Storm
from tests.conftest import BUS_SIZES
from tests.harness.buses import group, progress, publish_groups, publish_prompts, taken
from tests.harness.fakes import Engine, Loop, run_worker, worker
from tests.harness.forked import ForkServer
from tests.harness.nats_cluster import SIZE, Cluster, info, leader, server_of
from tests.harness.run_process import within

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("nats-cluster")]

Connect = Callable[..., Awaitable[JetStreamBus]]
SOON = {"ack_seconds": 5.0}
"""A message sent to a worker that has just left is redelivered after this time, instead of half a minute."""
own_servers = pytest.mark.xdist_group("nats-clusters-of-their-own")
"""The test has its own cluster, so it may run at the same time as tests that share one."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Tests share it under different run names; none of them kills a server."""
    runs = ("one", "left", "right", "roles", "fresh", "few")
    with Cluster(tmp_path_factory.mktemp("nats") / "cluster", runs=runs) as made:
        yield made


# -- configuration -----------------------------------------------------------------------------------------------------


async def test_every_stream_has_as_many_copies_as_bus_replicas_says(cluster: Cluster) -> None:
    async with cluster.bus("one") as bus:
        await cluster.until_whole(bus)
        assert len(bus._streams.known) >= len({bus._layout.stream(topic) for topic in (*ALL, Lease.TOPIC)})
        for stream in bus._streams.known:
            assert (await info(bus, stream))["config"]["num_replicas"] == SIZE
        async with bus.consume(PROMPTS):
            workers = await bus._connection.api(f"CONSUMER.INFO.{bus._layout.stream(PROMPTS)}.workers")
            assert len(workers["cluster"]["replicas"]) == SIZE - 1


async def test_a_run_may_get_its_copies_later(cluster: Cluster) -> None:
    async with cluster.bus("few", replicas=1) as bus:
        await publish_groups(bus, 1)
    async with cluster.bus("few") as bus:
        await cluster.until_whole(bus)
        assert await bus.keys(TRAJECTORIES) == {"1"}


async def test_more_replicas_than_servers_is_one_line(
    cluster: Cluster, nats_server: EmbeddedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.bus.jetstream.streams._PEERS_SECONDS", 1.0)
    with pytest.raises(ConfigError, match=r"bus.replicas 3 needs as many servers .* lower bus.replicas") as alone:
        await connect(nats_server, run="alone", replicas=3)
    with pytest.raises(ConfigError, match=r"bus.replicas 5 needs as many servers .* lower bus.replicas") as three:
        async with cluster.bus("fresh", replicas=5):
            pass
    assert "\n" not in str(alone.value) + str(three.value)


@own_servers
async def test_a_cluster_that_is_just_starting_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(tmp_path / "cluster", runs=("one",), first=2) as cluster:
        entering = cluster.bus("one", at=0)
        coming = asyncio.create_task(entering.__aenter__())
        lines: list[str] = []
        async with within("that it waits for the third server"):
            while not lines:
                assert not coming.done(), coming.result()
                await asyncio.sleep(0.05)
                lines = [line for line in caplog.messages if "retrying for" not in line]  # while the two elect a leader
        (line,) = lines
        assert line.endswith("fewer servers are up than bus.replicas = 3; waiting for the others for 30 s")
        cluster.start(2)
        bus = await coming
        await bus.put(PROGRESS, progress(1))
        await entering.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("bus", "problem"),
    [
        ({"replicas": 3}, "replicas are for a cluster of servers at url"),
        ({"replicas": 2, "url": "nats://a:1"}, "replicas must be 1, 3 or 5"),
    ],
)
def test_replicas_that_cannot_be_are_a_config_error(bus: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config.BusSection(**bus)


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("nats://a:1", ["nats://a:1"]),
        ("nats://a:1,nats://b:2, nats://c:3", ["nats://a:1", "nats://b:2", "nats://c:3"]),
        ("nats://u:p,w@a:1,tls://b:2", ["nats://u:p,w@a:1", "tls://b:2"]),
    ],
)
def test_an_address_may_be_several(url: str, addresses: list[str]) -> None:
    assert servers(url) == addresses


async def test_any_server_that_is_up_will_do(cluster: Cluster) -> None:
    url = f"nats://127.0.0.1:1,{cluster.urls[1]}"
    access = {"role": "learner", "credentials": cluster.credentials("one")}
    bus = await JetStreamBus.connect(
        url, run="one", access=Credentials(**access), storage="file", replicas=SIZE, **BUS_SIZES
    )
    assert server_of(bus) == 1
    await bus.close()


async def test_a_list_that_is_none_is_one_line_without_its_password(cluster: Cluster) -> None:
    for url in (
        "nats://u:hunter2@127.0.0.1:1,127.0.0.1:2",
        "nats://u:hunter2@127.0.0.1:1,nats://u:hunter2@127.0.0.1:2",
    ):
        with pytest.raises(ConfigError, match="bus.url") as error:
            await JetStreamBus.connect(url, run="one", storage="file", connect_seconds=1.0, **BUS_SIZES)
        assert "hunter2" not in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["a b", "a:x", "nats://a:1", "", "user:password@a"])
def test_a_host_that_is_none_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nats_config.main(["r", "--directory", str(tmp_path), "--cluster", "a", "b", text])
    said = capsys.readouterr().err
    assert "HOST[:PORT[:ROUTE_PORT]]" in said
    assert len(said.splitlines()) == 1


def test_what_is_written_for_a_cluster_is_for_its_owner_alone(cluster: Cluster) -> None:
    for index in range(SIZE):
        file = cluster.directory / nats_config.server_name(index) / nats_config.CONFIG_FILE
        assert file.stat().st_mode & 0o777 == 0o600


@own_servers
async def test_a_cluster_speaks_tls_with_clients_and_among_its_servers(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = map(str, certificate)
    files = ["--tls-certificate", cert, "--tls-key", key, "--tls-cluster-ca", cert]
    with Cluster(tmp_path / "cluster", runs=("one",), extra=files) as secret:
        async with secret.bus("one", tls_ca=cert) as bus:
            await secret.until_whole(bus)
            await bus.put(PROGRESS, progress(1))
        with pytest.raises(ConfigError, match="bus.url tls://127.0.0.1"):
            async with asyncio.timeout(60), secret.bus("one", connect_seconds=3.0):
                pass


# -- traffic -----------------------------------------------------------------------------------------------------------


async def test_a_whole_run_works_with_each_process_at_a_server_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        cluster.bus("roles", at=0) as ours,
        cluster.bus("roles", role="rollout-worker", at=1) as its,
        cluster.bus("roles", role="observer", at=2) as eyes,
    ):
        loop = Loop(ours, tmp_path, steps=4, checkpoint_every=2, validator=Validator(ours))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_worker(worker(its, Engine())))
            tasks.create_task(loop.run_learner())
        assert loop.backend.steps == 4
        assert (await eyes.states(PROGRESS))[""].finished


async def test_a_server_that_is_behind_shows_no_older_value(cluster: Cluster) -> None:
    """A run starts by reading what the last one left: its epoch, and whether it was finished."""
    async with cluster.bus("one", at=0) as one, cluster.bus("one", at=1) as two, cluster.bus("one", at=2) as three:
        for step in range(30):
            await one.put(PROGRESS, progress(step))
            found = await asyncio.gather(*(bus.states(PROGRESS) for bus in (one, two, three)))
            assert [states[""].step for states in found] == [step] * SIZE
            if step % 10 == 0:
                async with two.watch(PROGRESS) as its, three.watch(PROGRESS) as others:
                    assert ((await anext(its)).step, (await anext(others)).step) == (step, step)


async def test_two_runs_share_a_cluster_and_see_nothing_of_each_other(cluster: Cluster, tmp_path: Path) -> None:
    """Both at once, with the same subjects wherever their accounts allow it."""
    async with (
        cluster.bus("left", **SOON) as one,
        cluster.bus("right") as other,
        cluster.bus("left", role="rollout-worker", **SOON) as ones,
        cluster.bus("right", role="rollout-worker") as others,
    ):
        loops = [Loop(bus, tmp_path / name, steps=steps) for bus, name, steps in ((one, "a", 3), (other, "b", 5))]
        async with asyncio.TaskGroup() as tasks:
            for loop, bus in zip(loops, (ones, others), strict=True):
                tasks.create_task(run_worker(worker(bus, Engine())))
                tasks.create_task(loop.run_learner())
        assert [loop.backend.steps for loop in loops] == [3, 5]
        assert [(await bus.states(WEIGHTS))[""].policy_version for bus in (one, other)] == [3, 5]
        await publish_prompts(one, 1000)
        assert "1000" not in await other.keys(PROMPTS)
        async with taken(one, 1) as (delivery,):
            await delivery.ack()


# -- tolerated losses --------------------------------------------------------------------------------------------------


@own_servers
async def test_calls_wait_while_too_few_servers_are_up_and_are_answered_when_there_are_enough(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", runs=("one",)) as cluster:
        async with cluster.bus("one") as bus:
            await cluster.until_whole(bus)
            await publish_prompts(bus, 1)
            async with taken(bus, 1) as (delivery,):
                for index in (0, 1):
                    cluster.kill(index)
                calls = [
                    asyncio.ensure_future(call)
                    for call in (
                        bus.publish(TRAJECTORIES, group(1), key="1"),
                        bus.put(PROGRESS, progress(5)),
                        bus.last_sequence(TRAJECTORIES),
                        delivery.ack(),
                    )
                ]
                await asyncio.wait(calls, timeout=1.0)
                assert not calls[0].done()
                for index in (0, 1):
                    cluster.start(index)
                await asyncio.gather(*calls)
            assert calls[0].result() is True
            assert (await bus.states(PROGRESS))[""].step == 5
            assert await bus.keys(TRAJECTORIES) == {"1"}
            async with within("the prompt leaves the stream, shortly after its ack"):
                while await bus.keys(PROMPTS):
                    await asyncio.sleep(0.01)


@own_servers
async def test_too_few_servers_are_an_error_that_is_tried_again_and_no_mistake_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The launcher restarts a process that ended with exit code 1, but not one that ended with 2."""
    with Cluster(tmp_path / "cluster", runs=("one",)) as cluster:
        async with cluster.bus("one", at=2) as bus:
            await cluster.until_whole(bus)
            for index in (0, 1):
                cluster.kill(index)
            monkeypatch.setattr("asyncrl.bus.jetstream.connection._PATIENCE_SECONDS", 5.0)
            bus._streams.known.clear()
            for _ in range(2):  # at first, the server may not know yet and may not answer at all
                caplog.clear()
                makings = [bus._stream(topic) for topic in (TRAJECTORIES, PROMPTS, WEIGHTS)]
                for made in await asyncio.gather(*makings, return_exceptions=True):
                    _assert_no_quorum(made)
        assert sum("retrying for" in line for line in caplog.messages) == 1
        for role in ("learner", "rollout-worker"):
            with pytest.raises(BusError) as opened:
                async with cluster.bus("one", role=role, at=2):
                    pass
            _assert_no_quorum(opened.value)


def _assert_no_quorum(error: Any) -> None:
    assert isinstance(error, BusError)
    assert error.exit_code == 1
    assert "no quorum: start the other servers of the cluster" in str(error)
    assert "\n" not in str(error)


@pytest.mark.xdist_group("nats-cluster-under-a-run")
async def test_a_run_outlives_each_server_of_its_cluster(tmp_path: Path, forks: ForkServer) -> None:
    """Real processes: the leaders of the trajectory log, of the prompts and of the states are lost one after another.
    Each is also the server of some process."""
    folder = tmp_path / "storm"
    folder.mkdir()
    with Cluster(tmp_path / "cluster", runs=("storm",)) as cluster:
        where = [f'bus.url="{cluster.url}"', f'bus.credentials="{cluster.credentials("storm")}"']
        overrides = [*where, f"bus.replicas={SIZE}", "bus.ack_seconds=15.0", CALM]
        storm = Storm(folder, seed=0, overrides=overrides, forks=forks, say=lambda text: None)
        async with storm.up() as seen:
            for topic in (TRAJECTORIES, PROMPTS, WEIGHTS):
                async with cluster.bus("storm", role="observer") as bus:
                    await cluster.until_whole(bus)
                    victim = await leader(bus, bus._layout.stream(topic))
                step, published = seen.step, dict(seen.published)
                cluster.kill(victim)
                await storm.until(
                    lambda step=step, published=published: (
                        seen.step >= (step[0], step[1] + 5)
                        and all(seen.published.get(name, 0) > published.get(name, 0) for name in ("w0", "w1", "w2"))
                    ),
                    f"server {victim} killed",
                )
                cluster.start(victim)
        audit = storm.audit()
    assert (audit["lost"], audit["duplicated"], audit["staleness_violations"], audit["exit_code"]) == (0, 0, 0, 0)
    assert audit["trained"] > 0
    assert audit["failed"] == 0
    assert storm.runs == 2  # only the drain at the end stopped it
