"""A rollout worker ends in one line if it could not follow the run's learner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncrl import config
from asyncrl.actors.base import Actor
from asyncrl.bus.port import Bus
from asyncrl.cli import rollout_worker, worker_process
from asyncrl.config.record import worker_table
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import same_settings
from asyncrl.launch.keys.worker_keys import Identity
from asyncrl.messages.fleet import RunSettings
from asyncrl.messages.topics import SETTINGS
from tests import ROOT
from tests.harness.joining import joins_by

FILES, OBJECTS = config.only_overrides([]), config.only_overrides(["weights.channel=objects"])
LOG = "asyncrl.far.settings"
DIFFERENT = same_settings.different
REFUSAL = (
    'weights.channel: this worker has "objects" and the run\'s learner "files", so the worker could load no weights; '
    "set the same for all processes of the run"
)


async def publish(bus: Bus, run: config.RunConfig) -> None:
    """What a learner does at its start."""
    sections, withheld = worker_table(run)
    await bus.put(SETTINGS, RunSettings(sections=sections, withheld=withheld))


@pytest.fixture
def starts(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[list[Actor]]]:
    """Start a worker whose channel is "objects" on ``bus``, without an engine, and return the actors of its process."""
    actors: list[Actor] = []

    @contextlib.asynccontextmanager
    async def bus_of_worker(*_: Any, **__: Any) -> AsyncIterator[Bus]:
        yield bus

    async def build_worker(run: config.RunConfig, *, bus: Bus, name: str, **_: Any) -> tuple[Actor, Actor]:
        return same_settings.SettingsWatch(name, bus, run=run), same_settings.SettingsWatch(name, bus, run=run)

    async def supervised(*given: Actor) -> None:
        actors.extend(given)

    async def start(*, has_own_key: bool) -> list[Actor]:
        own = Identity(name="far", key=None, has_own_key=has_own_key)
        await rollout_worker._sample(OBJECTS, own, token="", has_joined=False, is_dedicated=False)
        return actors

    monkeypatch.setattr(worker_process, "bus_of_worker", bus_of_worker)
    monkeypatch.setattr("asyncrl.launch.assembly.build_worker.build_worker", build_worker)
    monkeypatch.setattr(rollout_worker, "supervised", supervised)
    return start


async def test_a_worker_that_joins_with_another_weight_channel_than_the_learner_ends_at_its_start(
    bus: Bus, starts: Callable[..., Awaitable[list[Actor]]]
) -> None:
    await publish(bus, FILES)
    with pytest.raises(ConfigError) as refused:
        await starts(has_own_key=True)
    assert str(refused.value) == REFUSAL


async def test_a_worker_that_joins_watches_for_another_learner_and_one_of_the_runs_launcher_does_not(
    bus: Bus, starts: Callable[..., Awaitable[list[Actor]]]
) -> None:
    """The launcher's workers have the learner's run file, and may start before a resumed learner publishes it."""
    await publish(bus, FILES)
    assert "far.settings" not in [actor.name for actor in await starts(has_own_key=False)]
    await publish(bus, OBJECTS)
    assert "far.settings" in [actor.name for actor in await starts(has_own_key=True)]


@pytest.mark.parametrize("run", [FILES, None])
async def test_settings_that_fit_are_accepted_and_a_worker_may_start_before_any_learner(
    bus: Bus, run: config.RunConfig | None
) -> None:
    if run is not None:
        await publish(bus, run)
    await same_settings.refuse_others(bus, FILES)
    with pytest.raises(ConfigError, match="could load no weights"):
        await publish(bus, OBJECTS)
        await same_settings.refuse_others(bus, FILES)


async def test_a_worker_ends_once_a_learner_starts_with_another_weight_channel(bus: Bus) -> None:
    watch = asyncio.create_task(same_settings.SettingsWatch("far.settings", bus, run=OBJECTS).run())
    await publish(bus, OBJECTS)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not watch.done()
    await publish(bus, FILES)
    with pytest.raises(ConfigError, match="could load no weights"):
        await asyncio.wait_for(watch, 60)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["rollout.max_running=3", "rollout.workers=0", "engine.device=cpu", "run.directory=/mine"], []),
        (
            ["staleness.max_staleness=7", "staleness.stragglers=partial"],
            ["staleness.max_staleness", "staleness.stragglers"],
        ),
        (["reward.kind=regex", 'reward.options={pattern="a"}'], ["reward.kind"]),
        (["bus.ack_seconds=300"], ["bus.ack_seconds"]),
    ],
)
async def test_other_settings_of_the_run_than_the_learners_are_named_in_one_line(
    overrides: list[str],
    names: list[str],
    bus: Bus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, compared = config.only_overrides(overrides), asyncio.Event()

    def different(*of: Any) -> list[str]:
        compared.set()
        return DIFFERENT(*of)

    monkeypatch.setattr(same_settings, "different", different)
    watch = asyncio.create_task(same_settings.SettingsWatch("far.settings", bus, run=run).run())
    await publish(bus, FILES)
    await asyncio.wait_for(compared.wait(), 60)  # a watch sees only the newest of two settings
    await publish(bus, OBJECTS)
    with pytest.raises(ConfigError):
        await asyncio.wait_for(watch, 60)
    found = {record.getMessage().partition(": not as in")[0] for record in caplog.records if record.name == LOG}
    assert found == ({", ".join(names)} if names else set())


def test_options_of_a_reward_are_not_compared_because_machines_have_their_own_addresses() -> None:
    secret = 'reward.options={headers={Authorization="hidden"}}'
    sections, withheld = worker_table(config.only_overrides(["reward.kind=remote", secret]))
    settings = RunSettings(sections=sections, withheld=withheld)
    assert same_settings.different(config.only_overrides(["reward.kind=remote"]), settings) == []


def test_a_worker_that_joins_by_the_bus_has_the_learners_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = '{name = "sums", path = "a.jsonl", reward = {kind = "regex", options = {pattern = "a"}}}'
    run = config.load(
        ROOT / "examples" / "demo.toml", [f"evaluation.datasets=[{dataset}]", "staleness.max_staleness=3"]
    )
    sections, withheld = worker_table(run)
    joined = joins_by(monkeypatch)(sections, withheld=withheld, allow=("examples",))
    assert same_settings.different(joined, RunSettings(sections=sections, withheld=withheld)) == []
