"""`asyncrl import-eval FILE`: converts the evaluation YAML of slime or Miles to [evaluation] of a run file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.config import slime_evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="slime's or Miles's evaluation file (--eval-config)")


def run(options: argparse.Namespace) -> int:
    print(slime_evaluation.read(options.file, say=lambda line: print(line, file=sys.stderr)), end="")
    return 0
