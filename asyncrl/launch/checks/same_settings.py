"""Ensures that a worker that joins by itself has the settings without which it could not work for the run's learner.

A worker with a run file of its own may have other sizes, devices and paths than the learner, but not another weight
channel: it would take prompts and never load the weights to answer them. Other settings that all processes should share
are named in one line; what comes of them may be wrong, or rejected by the learner.
"""

from __future__ import annotations

from typing import Any, Final

from asyncrl.actors.base import Actor
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config.record import worker_table
from asyncrl.errors import ConfigError
from asyncrl.messages.fleet import RunSettings
from asyncrl.messages.topics import SETTINGS

_SHARED: Final = {
    "run": ("mode",),
    "model": ("dtype",),
    "reward": ("kind", "rows", "parts"),
    "rollout": ("function", "options", "min_group", "extra_samples", "group_seconds", "max_parts", "max_attempts"),
    "staleness": ("max_staleness", "eviction", "stragglers", "parts", "min_group"),
    "bus": ("ack_seconds",),
    "evaluation": ("place", "datasets"),
}
"""Settings of a worker that belong to the run, not to the machine. Options of rewards may be the machine's own, such as
addresses. What may hold secrets is compared only if it is on the bus, and no values are printed."""


class SettingsWatch(Actor):
    """Ends its worker once a learner starts whose settings the worker cannot follow: the worker may have started first,
    or the run may have been resumed with other settings. Logs which other settings differ.

    consumes: settings    waits for: other settings    woken by: the learner
    """

    role = "settings-watch"

    def __init__(self, name: str, bus: Bus, *, run: RunConfig) -> None:
        super().__init__(name, bus)
        self._run = run

    async def run(self) -> None:
        """Runs until cancelled. Raises ConfigError."""
        async with self.bus.watch(SETTINGS) as published:
            async for settings in published:
                _refuse(self._run, settings)
                if others := different(self._run, settings):
                    self.log.warning(
                        "%s: not as in the settings of the run's learner; if that is not meant, restart this worker "
                        "with the learner's run file, or with --join",
                        ", ".join(others),
                    )


async def refuse_others(bus: Bus, run: RunConfig) -> None:
    """Raise ConfigError if the learner that started last has another weights.channel.

    Workers that `asyncrl run` starts must not call this: a resumed run may have settings that its learner, which starts
    at the same time, has not published yet.
    """
    if (settings := (await bus.states(SETTINGS)).get("")) is not None:
        _refuse(run, settings)


def different(run: RunConfig, settings: RunSettings) -> list[str]:
    """Return the keys of ``_SHARED`` in which the worker differs from the learner that published ``settings``."""
    ours, withheld = worker_table(run)
    found = []
    for name, keys in _SHARED.items():
        section: Any = settings.sections.get(name)
        if isinstance(section, dict) and section and ours[name]:  # empty: it holds a secret
            found += [f"{name}.{key}" for key in keys if section.get(key) != ours[name].get(key)]
    return [key for key in found if key not in withheld and key not in settings.withheld]


def _refuse(run: RunConfig, settings: RunSettings) -> None:
    section = settings.sections.get("weights")
    theirs = section.get("channel") if isinstance(section, dict) else None
    if theirs not in (None, run.weights.channel):
        raise ConfigError(
            f'weights.channel: this worker has "{run.weights.channel}" and the run\'s learner "{str(theirs)[:100]}", '
            "so the worker could load no weights; set the same for all processes of the run"
        )
