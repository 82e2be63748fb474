"""`asyncrl check RUN.toml`: prints what a run file means, or the first thing in it that cannot work."""

from __future__ import annotations

import argparse
import sys

from asyncrl.cli import arguments
from asyncrl.run.summary import summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)


def run(options: argparse.Namespace) -> int:
    print(summarize(arguments.load(options), tells=_told))
    return 0


def _told(what: str) -> None:
    """For a person who waits; in a log a mistake stays one line."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
