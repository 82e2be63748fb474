"""`asyncrl check RUN.toml`: prints what a run file changes and what follows from it, or what cannot work."""

from __future__ import annotations

import argparse
import sys

from asyncrl.cli import arguments
from asyncrl.launch.summary import summarize
from asyncrl.logs import print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument("--all", action="store_true", help="print every key, also those that have their defaults")


def run(options: argparse.Namespace) -> int:
    summary = summarize(arguments.load(options), report=_report_on_terminal)
    for line in summary.text(every_key=options.all).split("\n"):
        if not print_line(line):
            break
    return 0


def _report_on_terminal(what: str) -> None:
    """Report progress on a terminal only, so that an error is a single line in a log."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
