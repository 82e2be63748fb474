"""HTTP endpoint for producers outside of a run with harness "outside": its address and its key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from asyncrl.config import RunConfig, tables
from asyncrl.environments.agent.entry import Entry
from asyncrl.environments.agent.function import Options as AgentOptions
from asyncrl.environments.agent.harnesses.outside import Options
from asyncrl.environments.load import load_options
from asyncrl.errors import ConfigError
from asyncrl.launch import secret_files

_HARNESS: Final = "outside"


def serve(run: RunConfig, *, host: str = "") -> None:
    """Serve until interrupted.

    host: address to listen on; "" uses the host of the run file's url. Raises ConfigError.
    """
    options = harness_options(run)
    address = urlsplit(options.url)
    where = f"port {address.port} of --host {host}" if host else options.url
    entry = Entry(host=host or address.hostname or "", port=address.port or 0, key=read_key(Path(options.key_file)))

    async def forever() -> None:
        try:
            async with entry.serving():
                print(
                    f"asyncrl serve: {entry.url}   (key: {options.key_file}; POST /sessions; Ctrl-C ends it)",
                    flush=True,
                )
                await asyncio.Event().wait()
        except OSError as error:
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error

    asyncio.run(forever())


def harness_options(run: RunConfig) -> Options:
    """Return the harness options. Raises ConfigError unless the run's samples are played outside."""
    agent = load_options(run.rollout)
    if not isinstance(agent, AgentOptions) or agent.harness != _HARNESS:
        raise ConfigError(
            'rollout.options.harness: `asyncrl serve` is for a run with rollout.function = "agent" and '
            f'harness = "{_HARNESS}"'
        )
    made: Options = tables.build(Options, agent.harness_options, "rollout.options.harness_options")
    return made


def read_key(file: Path) -> str:
    """Read the key from the file, or create one. Raises ConfigError."""
    key = secret_files.read_or_create(file)
    if not key or not key.isascii():
        raise ConfigError(f"{file}: has no key; remove it, and another one is made")
    return key
