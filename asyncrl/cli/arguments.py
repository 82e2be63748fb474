"""Arguments that several verbs share, and environment variables that replace keys of the run file."""

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

MOST_STEPS: Final = 2**53


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """Add RUN.toml, and --set to override its keys."""
    parser.add_argument("run_file", metavar="RUN.toml", type=Path, help="the run file")
    add_overrides(parser, "override one key of the run file; repeatable")


def add_existing_run(parser: argparse.ArgumentParser) -> None:
    """Add RUN (a started run, by its folder or run file) and --set."""
    parser.add_argument("where", metavar="RUN", type=Path, nargs="?", help="the run's folder or its run file")
    add_overrides(parser, "override one key of the run, such as bus.url; repeatable")


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """Add RUN_DIR (a run that is read from its files) and --json."""
    parser.add_argument("run_directory", metavar="RUN_DIR", type=Path, help="the run's folder")
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_overrides(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help=meaning
    )


def step_range(text: str, *, flag: str) -> tuple[int, int]:
    """Parse "3:9", "3:", ":9" or "7" to (first, last); an empty text means all steps.

    Raises ConfigError naming ``flag``.
    """
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
    """Load the run file with the --set overrides. Raises ConfigError."""
    return config.load(options.run_file, options.overrides)


def bus_token(run_config: RunConfig | None = None) -> str:
    """Return the token of the bus: ASYNCRL_BUS_TOKEN, or bus.token of the run file."""
    return os.environ.get("ASYNCRL_BUS_TOKEN", run_config.bus.token if run_config is not None else "")


def with_bus_address(run_config: RunConfig) -> RunConfig:
    """Add the nats-server's address and token, if `asyncrl run` passed them to this process."""
    bus = run_config.bus
    if address := os.environ.get("ASYNCRL_BUS_URL", ""):
        bus = dataclasses.replace(bus, address=address, token=bus_token(run_config))
    return dataclasses.replace(run_config, bus=bus)
