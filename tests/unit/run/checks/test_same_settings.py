"""A rollout worker ends in one line if it could not follow the run's learner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl import config
from asyncrl.cli import rollout_worker, worker_process
from asyncrl.config.record import worker_table
from asyncrl.errors import ConfigError
from asyncrl.messages.fleet import RunSettings
from asyncrl.messages.topics import SETTINGS
from asyncrl.protocols import Bus
from asyncrl.run.checks import same_settings
from asyncrl.run.keys.worker_keys import Identity

FILES, OBJECTS = config.only_overrides([]), config.only_overrides(["weights.channel=objects"])
REFUSAL = (
    'weights.channel: this worker has "objects" and the run\'s learner "files", so the worker could load no weights; '
    "set the same for all processes of the run"
)


async def publish(bus: Bus, run: config.RunConfig) -> None:
    """What a learner does at its start."""
    sections, withheld = worker_table(run)
    await bus.put(SETTINGS, RunSettings(sections=sections, withheld=withheld))


async def test_a_worker_with_another_weight_channel_than_the_learner_ends_before_it_starts_an_engine(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.asynccontextmanager
    async def bus_of_worker(*_: Any, **__: Any) -> AsyncIterator[Bus]:
        yield bus

    monkeypatch.setattr(worker_process, "bus_of_worker", bus_of_worker)
    await publish(bus, FILES)
    with pytest.raises(ConfigError) as refused:
        own = Identity(name="far", key=None, has_own_key=True)
        await rollout_worker._sample(OBJECTS, own, token="", has_joined=False, is_dedicated=False)
    assert str(refused.value) == REFUSAL


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
