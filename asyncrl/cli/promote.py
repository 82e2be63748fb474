"""`asyncrl promote RUN_DIR NAME`: a shadow learner becomes the learner of its run; the engines go on.

As `asyncrl swap`, with the shadow's settings: the present learner ends its step and leaves, the shadow trains up to
that step, and the new learner goes on with the shadow's weights and optimizer, and with the run's groups and prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.audit.run_folder import RecordedRun
from asyncrl.cli import swap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN_DIR", type=Path, help="the folder of a run that is up")
    parser.add_argument("shadow", metavar="NAME", help="name of a shadow of it that is up")
    swap.add_timeout(parser)


def run(options: argparse.Namespace) -> int:
    from asyncrl.audit.shadow import folder_of, require_up  # imports torch

    folder = folder_of(RecordedRun(options.where), options.shadow)
    return swap.swap(options.where, require_up(folder), seconds=options.timeout, shadow=folder)
