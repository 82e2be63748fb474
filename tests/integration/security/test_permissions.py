"""A real nats-server with the configuration that bin/nats-config writes: each role does its work and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.kv import Lease
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.bus.jetstream.streams import remove_message
from asyncrl.bus.nats_server.accounts import account_name, permissions
from asyncrl.errors import ConfigError, Forbidden
from asyncrl.launch.checks import single_instance
from asyncrl.messages import Event, GroupSegment, Quarantine, StepMetrics, WeightVersion, replace
from asyncrl.messages.control import Claim, FleetSize, FleetStatus, ServerAddress
from asyncrl.messages.topics import (
    ACTORS,
    ALL,
    ALL_SERVICES,
    EVENTS,
    FLEET,
    FLEET_STATUS,
    LAUNCHER,
    METRICS,
    PROGRESS,
    PROMPTS,
    QUARANTINE,
    ROLES,
    SEGMENTS,
    SERVERS,
    TRAJECTORIES,
    TRANSFERS,
    WEIGHTS,
    worker_named,
)
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.policies.health.diagnosis import diagnose
from tests.harness.buses import group, heartbeat, progress, prompt
from tests.harness.fakes import Engine, Loop, run_worker, worker
from tests.harness.roles import RUNS, Server, connected


@pytest.fixture(scope="module")
def empty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("nats") / "server")
    yield made
    made.close()


@pytest.fixture
async def server(empty_server: Server) -> Server:
    """A server on which the learner has made the streams of "mine", so that the other roles need not wait."""
    async with connected(empty_server, "learner"):
        return empty_server


@pytest.fixture
async def buses(server: Server) -> AsyncIterator[dict[str, Any]]:
    """One connection per role."""
    async with contextlib.AsyncExitStack() as stack:
        yield {role: await stack.enter_async_context(connected(server, role)) for role in ROLES}


async def assert_forbidden(call: Any) -> None:
    with pytest.raises(Forbidden, match="the role or run of bus.credentials or bus.token may not"):
        await asyncio.wait_for(call, 60)


def test_every_topic_has_a_publisher_and_names_are_unique() -> None:
    assert all(topic.publishers for topic in ALL)
    assert all(service.asked_by and service.served_by for service in ALL_SERVICES)
    assert len({topic.name for topic in ALL}) == len(ALL)


def test_what_a_worker_or_operator_may_publish_is_what_the_topics_say() -> None:
    """The table row of a topic is the only source: a role that is not among its publishers may not publish it."""
    for role in ROLES:
        if (allowed := permissions(role, run="mine")) is not None:
            subjects = allowed["publish"]["allow"]
            layout = Layout(run="mine", max_prompts=1, max_log_bytes=1, ack_seconds=1.0, storage="file")
            may = {topic for topic in ALL if any(one.startswith(layout.prefix(topic)) for one in subjects)}
            assert may == {topic for topic in ALL if role in topic.publishers}, role


def test_what_is_written_is_for_its_owner_alone_and_shown_nowhere(server: Server) -> None:
    for run in RUNS:
        for name in ("learner", "operator", "observer", "workers/w0", "workers/w15", "workers/e0", "servers/w0"):
            file = server.directory / run / name
            user, _, password = file.read_text().strip().partition(":")
            assert user == f"{run}-{name}"
            assert len(password) >= 32
            assert password not in server.said
            assert file.stat().st_mode & 0o777 == 0o600
    assert (server.directory / "nats-server.conf").stat().st_mode & 0o777 == 0o600


def test_passwords_that_are_there_are_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.bus.nats_server.config", "--directory", str(tmp_path)]
    subprocess.run([*command, "a"], check=True, capture_output=True)
    before = (tmp_path / "a" / "learner").read_text()
    subprocess.run([*command, "a", "b"], check=True, capture_output=True)
    assert (tmp_path / "a" / "learner").read_text() == before
    accounts = set(json.loads((tmp_path / "nats-server.conf").read_text())["accounts"])
    assert accounts == {account_name(run, role) for run in ("a", "b") for role in ROLES}


async def test_a_whole_run_works_with_each_process_in_its_role(server: Server, tmp_path: Path) -> None:
    async with (
        connected(server, "learner", run="whole") as ours,
        connected(server, "rollout-worker", run="whole") as its,
    ):
        loop = Loop(ours, tmp_path, steps=4, checkpoint_every=2, validator=Validator(ours))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_worker(worker(its, Engine())))
            tasks.create_task(loop.run_learner())
        assert loop.backend.steps == 4
        assert loop.recorder.rows[-1]["rollout/workers"] == 1


async def test_a_worker_does_all_its_work(buses: dict[str, Any]) -> None:
    learner, rollout = buses["learner"], buses["rollout-worker"]
    await learner.publish(PROMPTS, prompt(0), key="0")
    await learner.publish(PROMPTS, prompt(1), key="1")
    async with rollout.consume(PROMPTS) as deliveries:
        first, second = await anext(deliveries), await anext(deliveries)
        await first.keep()
        await rollout.publish(TRAJECTORIES, replace(group(0), worker="w0"), key="w0/0")
        await first.ack()
        await second.retry()
        again = await anext(deliveries)
        assert again.attempt == 2
        # as an ack does when the server forgot the delivery
        await remove_message(rollout._connection, again._stream, again._item.sequence)
    assert await learner.depth(PROMPTS) == 0
    await rollout.put(ACTORS, heartbeat("w0"), key="w0")
    await rollout.forget(ACTORS, key="w0")
    for topic, message, key in (
        (WEIGHTS, WeightVersion(incarnation=0, policy_version=1), ""),
        (PROGRESS, progress(1), ""),
        (QUARANTINE, Quarantine(worker="w0", incarnation=0, reason="why"), "w0"),
    ):
        await learner.put(topic, message, key=key)
        async with rollout.watch(topic, key=key) as states:
            assert await anext(states) == message
        assert (await rollout.states(topic))[key] == message
    async with rollout.lease("load-0", holder="w0"):
        pass


async def test_workers_take_turns_on_a_lease(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    told, tries = asyncio.Event(), list[bool]()
    heard, tried = Lease._on_message, Lease._try_to_acquire

    async def hear(self: Lease, message: Any) -> None:
        told.set()
        await heard(self, message)

    async def note(self: Lease) -> bool:
        tries.append(await tried(self))
        return tries[-1]

    monkeypatch.setattr(Lease, "_on_message", hear)
    monkeypatch.setattr(Lease, "_try_to_acquire", note)
    async with connected(server, "rollout-worker") as one, connected(server, "rollout-worker", worker="w1") as two:
        async with one.lease("load-1", holder="a"):
            waiting = asyncio.create_task(two.lease("load-1", holder="b").__aenter__())
            while tries != [True, False, False]:  # the last attempt happens when it already listens
                await asyncio.sleep(0.01)
        await asyncio.wait_for(waiting, 60)
    assert told.is_set()  # it did not wait until the lease would have expired


async def test_two_workers_of_a_name_find_each_other(server: Server) -> None:
    async with connected(server, "rollout-worker") as one, connected(server, "rollout-worker") as two:
        async with single_instance.worker(one, "w0", run="mine"):
            with pytest.raises(ConfigError, match="a rollout worker 'w0' is up in run 'mine': process"):
                async with single_instance.worker(two, "w0", run="mine"):
                    pass
        with pytest.raises(Forbidden):
            await one.ask(LAUNCHER, Claim(host="here", pid=1), seconds=60)


async def test_a_worker_asks_the_learner_for_weights(buses: dict[str, Any]) -> None:
    learner, rollout = buses["learner"], buses["rollout-worker"]
    async with learner.serve(TRANSFERS) as questions:
        asking = asyncio.create_task(
            rollout.ask(TRANSFERS, TransferRequest(engine="w0", group="g", num_ranks=1), seconds=60)
        )
        asked = await anext(questions)
        await asked.answer(TransferOffer(problem="none yet"))
        assert (await asking).problem == "none yet"


async def test_objects_are_written_by_the_learner_and_read_by_workers(buses: dict[str, Any]) -> None:
    learner, rollout, observer = (buses[role].objects() for role in ("learner", "rollout-worker", "observer"))
    data = bytes(range(256)) * 2048
    await asyncio.to_thread(learner.put, "0-1.full", [data], metadata={"chain": "[]"})
    info = await asyncio.to_thread(rollout.info, "0-1.full")
    assert info is not None
    assert b"".join(await asyncio.to_thread(lambda: list(rollout.read("0-1.full")))) == data
    assert await asyncio.to_thread(rollout.info, "0-9.full") is None  # answered by the leader
    for reader in (rollout, observer):
        await assert_forbidden(asyncio.to_thread(reader.put, "0-2.full", [b"mine"], metadata={}))
        await assert_forbidden(asyncio.to_thread(reader.remove, "0-1.full"))
        await assert_forbidden(asyncio.to_thread(reader.names))
        for subject in (reader._metadata_subject("0-1.full"), f"$O.{reader._bucket}.C.x"):
            await assert_forbidden(asyncio.to_thread(reader._call, reader._store(subject, b"{}", {})))
    assert await asyncio.to_thread(learner.names) == {"0-1.full"}


async def test_a_server_of_a_frozen_model_does_its_work(buses: dict[str, Any]) -> None:
    learner, served, rollout = (buses[role] for role in ("learner", "model-server", "rollout-worker"))
    address = ServerAddress(name="w0", url="http://127.0.0.1:1")
    await served.put(SERVERS, address, key="w0")
    await served.put(ACTORS, heartbeat("w0"), key="w0")
    assert (await learner.states(ACTORS))["w0"].actor == "w0"
    async with rollout.watch(SERVERS, key="w0") as addresses:
        assert await anext(addresses) == address
    await served.forget(SERVERS, key="w0")
    assert not await learner.states(SERVERS)
    await learner.put(PROGRESS, progress(3))
    async with served.watch(PROGRESS) as states:
        assert (await anext(states)).step == 3


async def _first(bus: Any, topic: Any) -> None:
    async with bus.read(topic) as records:
        await anext(records)


FORBIDDEN: dict[str, dict[str, Callable[[Any], Any]]] = {
    "rollout-worker": {
        "ends the run": lambda bus: bus.put(PROGRESS, replace(progress(9), finished=True)),
        "names other weights": lambda bus: bus.put(
            WEIGHTS, WeightVersion(incarnation=9, policy_version=9, uri="/evil")
        ),
        "accuses another": lambda bus: bus.put(
            QUARANTINE, Quarantine(worker="w1", incarnation=0, reason="x"), key="w1"
        ),
        "ends its quarantine": lambda bus: bus.forget(QUARANTINE, key="w0"),
        "asks for a group": lambda bus: bus.publish(PROMPTS, prompt(7), key="7"),
        "invents metrics": lambda bus: bus.put(METRICS, StepMetrics(step=1)),
        "trims the log": lambda bus: bus.trim(TRAJECTORIES, through=1),
        "sizes the fleet": lambda bus: bus.put(FLEET, FleetSize(rollout_workers=0)),
        "reports a fleet": lambda bus: bus.put(FLEET_STATUS, FleetStatus()),
        "answers as another": lambda bus: bus.publish(TRAJECTORIES, replace(group(5), worker="w1"), key="w1/5"),
        "answers as nobody": lambda bus: bus.publish(TRAJECTORIES, group(5), key="5"),
        "beats as another": lambda bus: bus.put(ACTORS, heartbeat("w1"), key="w1"),
        "beats as the learner": lambda bus: bus.put(ACTORS, heartbeat("learner"), key="learner"),
        "ends another's heartbeat": lambda bus: bus.forget(ACTORS, key="w1"),
        "speaks for another": lambda bus: bus.publish(EVENTS, Event(kind="x", actor="w1", time=1.0), key="w1/x"),
        "saves for another": lambda bus: bus.put(
            SEGMENTS, GroupSegment(group_id=5, worker="w1", calls=()), key="w1/5/1/0"
        ),
        "removes what another saved": lambda bus: bus.forget(SEGMENTS, key="w1/5/1/0"),
        "is asked for another": lambda bus: bus.ask(worker_named("w1"), Claim(host="here", pid=1), seconds=60),
    },
    "model-server": {
        "serves as another": lambda bus: bus.put(SERVERS, ServerAddress(name="w1", url="http://evil"), key="w1"),
        "ends another's service": lambda bus: bus.forget(SERVERS, key="w1"),
        "beats as the learner": lambda bus: bus.put(ACTORS, heartbeat("learner"), key="learner"),
        "ends the run": lambda bus: bus.put(PROGRESS, replace(progress(9), finished=True)),
        "asks for a group": lambda bus: bus.publish(PROMPTS, prompt(7), key="7"),
        "answers": lambda bus: bus.publish(TRAJECTORIES, group(31), key="w0/31"),
        "reports an event": lambda bus: bus.publish(EVENTS, Event(kind="x", actor="w0", time=1.0), key="w0/x"),
        "reads the log": lambda bus: _first(bus, TRAJECTORIES),
        "is told weights": lambda bus: bus.ask(
            TRANSFERS, TransferRequest(engine="w0", group="x", num_ranks=1), seconds=60
        ),
    },
    "operator": {
        "reports a fleet": lambda bus: bus.put(FLEET_STATUS, FleetStatus()),
        "ends the run": lambda bus: bus.put(PROGRESS, progress(9)),
        "beats as a worker": lambda bus: bus.put(ACTORS, heartbeat("w0"), key="w0"),
        "answers": lambda bus: bus.publish(TRAJECTORIES, group(31), key="w0/31"),
    },
    "observer": {
        "sizes the fleet": lambda bus: bus.put(FLEET, FleetSize(rollout_workers=0)),
        "reports a fleet": lambda bus: bus.put(FLEET_STATUS, FleetStatus()),
        "answers": lambda bus: bus.publish(TRAJECTORIES, group(31), key="w0/31"),
        "beats as a worker": lambda bus: bus.put(ACTORS, heartbeat("w0"), key="w0"),
    },
}


@pytest.mark.parametrize(("role", "what"), [(role, what) for role, rows in FORBIDDEN.items() for what in rows])
async def test_the_server_refuses_what_a_role_may_not_do(buses: dict[str, Any], role: str, what: str) -> None:
    await buses["learner"].put(SEGMENTS, GroupSegment(group_id=5, worker="w1", calls=()), key="w1/5/1/0")
    await buses["learner"].publish(TRAJECTORIES, replace(group(77), worker="w1"), key="w1/77")  # to read and to trim
    await assert_forbidden(FORBIDDEN[role][what](buses[role]))


async def test_a_worker_has_no_say_about_streams(buses: dict[str, Any]) -> None:
    rollout = buses["rollout-worker"]
    for verb in (
        "STREAM.DELETE.asyncrl-mine-trajectories",
        "STREAM.UPDATE.asyncrl-mine-trajectories",
        "STREAM.CREATE.asyncrl-mine-trajectories",
        "STREAM.PURGE.KV_asyncrl-mine-state",
        "CONSUMER.DELETE.asyncrl-mine-prompts.workers",
        "CONSUMER.CREATE.asyncrl-mine-prompts.another",
        "STREAM.LIST",
    ):
        await assert_forbidden(rollout._connection.api(verb, {"name": "x"}))


async def test_a_worker_cannot_read_what_others_made(buses: dict[str, Any]) -> None:
    rollout = buses["rollout-worker"]
    await rollout.publish(TRAJECTORIES, replace(group(40), worker="w0"), key="w0/40")
    await rollout.publish(EVENTS, Event(kind="x", actor="w0", time=1.0), key="w0/40")

    await assert_forbidden(_first(rollout, TRAJECTORIES))
    await assert_forbidden(_first(rollout, EVENTS))
    await assert_forbidden(
        rollout._connection.request("$JS.API.DIRECT.GET.asyncrl-mine-trajectories.asyncrl.mine.trajectories.w0.0")
    )


async def test_nobody_hears_what_is_sent_to_another_role(server: Server) -> None:
    async with connected(server, "rollout-worker") as rollout:
        heard: list[Any] = []

        async def listen(message: Any) -> None:
            heard.append(message)

        for subject in (
            ">",
            "_INBOX.>",
            "_INBOX.mine.learner.>",
            "_INBOX.mine.rollout-worker.w1.>",
            "asyncrl.mine.trajectories.>",
            "asyncrl-ask.mine.*",
        ):
            await rollout._connection.subscribe(subject, listen)
        async with connected(server, "learner") as learner:
            await learner.put(PROGRESS, progress(3))
            await learner.states(PROGRESS)
            await rollout.states(PROGRESS)
        assert heard == []


@pytest.mark.parametrize("role", ROLES)
async def test_no_role_sees_another_run(server: Server, role: str) -> None:
    """Streams of that name do not exist in this account. A learner creates its own, which the other run never sees."""
    async with connected(server, "learner", run="other") as other:
        await other.put(PROGRESS, progress(5))
        if role == "learner":
            async with connected(server, role, as_run="other") as stranger:
                assert await stranger.states(PROGRESS) == {}
                await stranger.put(PROGRESS, progress(99))
        else:
            with pytest.raises(ConfigError, match="the role or run of bus.credentials or bus.token may not"):
                async with asyncio.timeout(60), connected(server, role, as_run="other"):
                    pass
        assert (await other.states(PROGRESS))[""].step == 5


async def test_an_operator_sizes_the_fleet(buses: dict[str, Any]) -> None:
    learner, operator = buses["learner"], buses["operator"]
    size = FleetSize(rollout_workers=3, request="a")
    await operator.put(FLEET, size)
    assert (await learner.states(FLEET))[""] == size
    await learner.put(FLEET_STATUS, FleetStatus(request="a", rollout_workers=3))
    assert (await operator.states(FLEET_STATUS))[""].request == "a"
    await learner.put(ACTORS, heartbeat("w0"), key="w0")
    assert "w0" in await operator.states(ACTORS)


async def test_an_observer_reads_and_takes_nothing(buses: dict[str, Any]) -> None:
    learner, observer = buses["learner"], buses["observer"]
    await learner.publish(TRAJECTORIES, group(30), key="30")
    await learner.put(PROGRESS, progress(2))
    async with observer.read(TRAJECTORIES, after=await learner.last_sequence(TRAJECTORIES) - 1) as records:
        assert (await anext(records)).key == "30"
    assert (await observer.states(PROGRESS))[""].step == 2
    assert "30" in await observer.keys(TRAJECTORIES)
    await observer.depth(PROMPTS)

    async def take() -> None:
        async with observer.consume(PROMPTS) as deliveries:
            await anext(deliveries)

    await assert_forbidden(take())


async def test_a_worker_that_comes_first_waits_for_the_learner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "server")
    try:
        entering = connected(server, "rollout-worker")
        coming = asyncio.create_task(entering.__aenter__())
        while not caplog.messages:
            await asyncio.sleep(0.05)
        assert not coming.done()
        (line,) = caplog.messages
        assert line.endswith("no run 'mine' there yet; waiting for its learner")  # a worker may not list runs
        async with connected(server, "learner"):
            bus = await asyncio.wait_for(coming, 60)
            assert await bus.states(PROGRESS) == {}
            await entering.__aexit__(None, None, None)
    finally:
        server.close()


async def test_a_watcher_that_may_not_write_does_not_take_the_bus_for_full(server: Server) -> None:
    async with connected(server, "learner"):

        async def connect() -> JetStreamBus:
            return await stack.enter_async_context(connected(server, "observer"))

        async with contextlib.AsyncExitStack() as stack:
            watcher = HealthMonitor(connect)
            seen = [await watcher.poll() for _ in range(2)]
            assert watcher.error is None
            assert not [finding for finding in diagnose(seen[-1]) if finding.fault == "bus storage"]
