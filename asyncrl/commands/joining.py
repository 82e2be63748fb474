"""How a worker joins a run it knows the bus and the name of: the learner left the settings there.

What may hold a secret is not on the bus (config/record.py), and neither are the model's files: who joins from
another machine says where those are, ``--set model.path=...``.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Sequence

from asyncrl import config
from asyncrl.app import connect
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.config.addresses import without_secrets
from asyncrl.errors import ConfigError
from asyncrl.fleet_messages import RunSettings
from asyncrl.topics import SETTINGS

log = logging.getLogger("asyncrl.commands.joining")


def joined(url: str, name: str, overrides: Sequence[str], *, token: str) -> RunConfig:
    """The settings of run ``name`` on the bus at ``url``, with overrides; waits for the learner to leave them there.

    Raises ConfigError when the bus does not answer, or withholds what no override says.
    """
    where = [f"bus.url={json.dumps(url)}", f"run.name={json.dumps(name)}"]
    for flag, item in zip(("--join", "--run"), where, strict=True):
        config.only_overrides([item], where=flag)  # a mistake in it is named as the user wrote it
    bare = config.only_overrides([*overrides, *where])
    found = asyncio.run(_read(bare, token=token or bare.bus.token))
    for key in found.withheld:
        if not any(item.startswith((f"{key}=", f"{key}.")) for item in overrides):
            raise ConfigError(
                f"run {name}: its {key} may hold secrets, so they are not on the bus; say them with "
                f"--set {key}.KEY=VALUE, or --set '{key}={{}}' for none"
            )
    table = copy.deepcopy(found.sections)
    for item in (*overrides, *where):
        config.override(table, item)
    return config_record.from_table(table, where=f"settings of run {name} on {without_secrets(url)}")


async def _read(run: RunConfig, *, token: str) -> RunSettings:
    bus = await connect(run, token=token, role="rollout-worker")
    try:
        if not await bus.states(SETTINGS):
            log.warning("run %s: waiting for its learner", run.run.name)
        async with bus.watch(SETTINGS) as settings:
            return await anext(settings)
    finally:
        await bus.close()
