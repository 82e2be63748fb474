"""`asyncrl import-eval FILE`: the [evaluation] of a run file from the evaluation YAML of slime or Miles."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncrl.config import slime_evaluation
from asyncrl.errors import ConfigError
from asyncrl.run import yaml_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="their evaluation file (--eval-config)")


def run(options: argparse.Namespace) -> int:
    document = yaml_file.read(options.file)
    try:
        text = slime_evaluation.toml(document, say=lambda line: print(f"{options.file}: {line}", file=sys.stderr))
    except ConfigError as error:
        raise ConfigError(f"{options.file}: {error}") from None
    print(text, end="")
    return 0
