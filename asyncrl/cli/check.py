"""`asyncrl check RUN.toml`: prints what a run file changes and what follows from it, or what cannot work."""

from __future__ import annotations

import argparse
import os
import sys

from asyncrl.cli import arguments
from asyncrl.errors import ConfigError
from asyncrl.launch.summary import summarize
from asyncrl.logs import print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument("--all", action="store_true", help="print every key, also those that have their defaults")
    parser.add_argument(
        "--gpu-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="memory of each of the learner's GPUs, such as 79.6 of an H100 or 139.8 of an H200, to check a run here "
        "that will be on another machine; says, too, whether an engine finds room beside the learner on one of them",
    )


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.gpu_gib < 2**20:
        raise ConfigError(f"--gpu-gib {options.gpu_gib:g}: must be the memory of a GPU in GiB, such as 79.6")
    gpu_bytes = int(options.gpu_gib * 2**30)
    if gpu_bytes:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is judged by the GPUs of this machine
    summary = summarize(arguments.load(options), report=_report_on_terminal, gpu_bytes=gpu_bytes)
    for line in summary.text(every_key=options.all).split("\n"):
        if not print_line(line):
            break
    return 0


def _report_on_terminal(what: str) -> None:
    """Report progress on a terminal only, so that an error is a single line in a log."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
