"""`asyncrl check RUN.toml`: prints the resolved settings of a run file, or the first one that cannot work."""

from __future__ import annotations

import argparse
import sys

from asyncrl.cli import arguments
from asyncrl.launch.summary import summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)


def run(options: argparse.Namespace) -> int:
    print(summarize(arguments.load(options), report=_report_on_terminal))
    return 0


def _report_on_terminal(what: str) -> None:
    """Report progress on a terminal only, so that an error is a single line in a log."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
