"""Arguments that several verbs take, and the environment variables that stand in for keys of the run file."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from pathlib import Path
from typing import Final

from asyncrl import config
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.run.keys.signing_keys import LEARNER_KEY_VARIABLE

MOST_STEPS: Final = 2**53


def add_run_file(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """RUN.toml, and --set to override its keys."""
    parser.add_argument("run_file", metavar="RUN.toml", type=Path, nargs=nargs, help="the run file")
    add_overrides(parser, "override one key of the run file; repeatable")


def add_existing_run(parser: argparse.ArgumentParser) -> None:
    """RUN, and --set: a run that has been started, wherever it is."""
    parser.add_argument("where", metavar="RUN", type=Path, nargs="?", help="the run's folder or its run file")
    add_overrides(parser, "override one key of the run, such as bus.url; repeatable")


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR, and --json: a run that is read from its files."""
    parser.add_argument("run_directory", metavar="RUN_DIR", type=Path, help="the run's folder")
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_overrides(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help=meaning
    )


def step_range(text: str, *, flag: str) -> tuple[int, int]:
    """(first, last) of "3:9", "3:", ":9", "7" or nothing, which is all. Raises ConfigError naming ``flag``."""
    found = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if found is None or text == ":":
        raise ConfigError(f"{flag} {text}: must be A:B, A:, :B or one step")
    first, colon, last = found.groups()
    if text and not colon:
        return int(first), int(first)
    numbers = (int(first or 0), int(last or MOST_STEPS))
    if numbers[0] > numbers[1]:
        raise ConfigError(f"{flag} {text}: the first is behind the last")
    return numbers


def load(options: argparse.Namespace) -> RunConfig:
    """The run file with the --set overrides. Raises ConfigError."""
    return config.load(options.run_file, options.overrides)


def bus_token(run_config: RunConfig | None = None) -> str:
    """Token of the bus: ASYNCRL_BUS_TOKEN, so that it need not be in a file, else the run file's."""
    return os.environ.get("ASYNCRL_BUS_TOKEN", run_config.bus.token if run_config is not None else "")


def with_bus_address(run_config: RunConfig) -> RunConfig:
    """The run file with what `asyncrl run` says to its processes: the address of the nats-server that it started, if
    any, and the learner's public key."""
    bus = run_config.bus
    address = os.environ.get("ASYNCRL_BUS_URL", bus.address)
    learner_key = os.environ.get(LEARNER_KEY_VARIABLE, bus.learner_key)
    return dataclasses.replace(run_config, bus=dataclasses.replace(bus, address=address, learner_key=learner_key))
