"""How a worker joins a run that it knows only by bus and name: the learner publishes the run's settings on the bus.

Keys that may hold a secret are not published (config/record.py), nor are the model's files: a worker on another machine
says where its copy is with ``--set model.path=...``. foreign_settings.py decides what this machine accepts of settings
that another machine wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl import config
from asyncrl.adapters.registry import connect
from asyncrl.cli import arguments, foreign_settings
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.config.addresses import without_secrets
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError
from asyncrl.launch.keys import signing_keys
from asyncrl.messages.fleet import RunSettings
from asyncrl.messages.signing import Signatures
from asyncrl.messages.topics import SETTINGS

log = logging.getLogger("asyncrl.cli.joining")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a rollout worker."""
    arguments.add_run_file(parser, nargs="?")
    parser.add_argument(
        "--name",
        default="",
        help="prefix of the worker's name; 16 digits of its key follow (default: host and process id)",
    )
    parser.add_argument(
        "--join", default="", metavar="nats://HOST:PORT", help="the run's bus, to join without a run file; needs --run"
    )
    parser.add_argument(
        "--run", default="", metavar="NAME", help="with --join: the run's name; its settings come from the bus"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="with --join: a package or module that the run's settings may import here, or a server that they may "
        "contact (http://HOST:PORT); repeatable",
    )


def settings(options: argparse.Namespace) -> RunConfig:
    """Return the run file, or the settings that the run's learner published on the bus. Raises ConfigError."""
    if options.run_file is not None and not (options.join or options.run):
        if options.allow:
            raise ConfigError("--allow: a run file of this machine may name any code; it is for --join")
        return arguments.load(options)
    if options.run_file is not None or not (options.join and options.run):
        raise ConfigError(f"{options.verb}: name a run file, or a bus and a run: --join nats://HOST:PORT --run NAME")
    return joined(options.join, options.run, options.overrides, token=arguments.bus_token(), allow=options.allow)


def default_label() -> str:
    """Return a name that is unique among the machines and processes of a run, and valid in a subject of the bus."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"


def joined(url: str, name: str, overrides: Sequence[str], *, token: str, allow: Sequence[str] = ()) -> RunConfig:
    """Return the settings of run ``name`` from the bus at ``url``, with overrides applied.

    Waits until the learner publishes them.

    Raises ConfigError if the bus does not answer, if secret keys are withheld and not overridden, or if the settings
    need something that ``allow`` does not name.
    """
    allowed = foreign_settings.Allowed.of(allow)
    where = [f"bus.url={toml_text(url)}", f"run.name={toml_text(name)}"]
    for flag, item in zip(("--join", "--run"), where, strict=True):
        config.only_overrides([item], where=flag)  # an error names the flag that the user wrote
    bare = config.only_overrides([*overrides, *where])
    signatures = signing_keys.signatures(bare, role="rollout-worker", has_joined=True)
    found = asyncio.run(_read(bare, token=token or bare.bus.token, signatures=signatures))
    if signatures.learner and not bare.bus.learner_key:
        where.append(f"bus.learner_key={signatures.learner}")
    for key in found.withheld:
        if not any(item.startswith((f"{key}=", f"{key}.")) for item in overrides):
            raise ConfigError(
                f"run {name}: its {key} may hold secrets, so they are not on the bus; set them with "
                f"--set {key}.KEY=VALUE, or --set '{key}={{}}' for none"
            )
    foreign = foreign_settings.taken(found.sections, overrides=overrides)
    foreign_settings.check_code(foreign, allowed)
    made = _made(foreign, [*overrides, *where], name, url)
    foreign_settings.check_options(foreign, made)
    if not foreign_settings.is_shared_folder(made):
        foreign.get("weights", {}).pop("directory", None)
        made = _made(foreign, [*overrides, *where], name, url)
    return made


def _made(foreign: Mapping[str, Any], overrides: Sequence[str], name: str, url: str) -> RunConfig:
    table = copy.deepcopy(dict(foreign))
    table["data"] = {"path": ""} | table.get("data", {})
    for item in overrides:
        config.override(table, item)
    return config_record.from_table(table, where=f"settings of run {name} on {without_secrets(url)}")


async def _read(run: RunConfig, *, token: str, signatures: Signatures) -> RunSettings:
    is_known = bool(signatures.learner)
    bus = await connect(run, token=token, role="rollout-worker", signatures=signatures)
    try:
        if not await bus.states(SETTINGS):
            log.warning("run %s: waiting for its learner", run.run.name)
        async with bus.watch(SETTINGS) as settings:
            found = await anext(settings)
        if signatures.learner and not is_known:
            log.warning(
                "run %s: trusting the first learner heard; to be sure, --set bus.learner_key=%s",
                run.run.name,
                signatures.learner,
            )
        return found
    finally:
        await bus.close()
