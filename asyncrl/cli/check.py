"""`asyncrl check RUN.toml`: prints what a run file means, or the first thing in it that cannot work."""

from __future__ import annotations

import argparse
import sys

from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.run.summary import summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)


def run(options: argparse.Namespace) -> int:
    run_config = arguments.load(options)
    if sys.stderr.isatty():
        print(f"reading {run_config.model.path} and {run_config.data.where} ...", file=sys.stderr, flush=True)
    print(describe(run_config))
    return 0


def describe(run_config: RunConfig) -> str:
    """The resolved run file and what follows from it, for a person. Raises ConfigError for what cannot work."""
    return str(summarize(run_config))
