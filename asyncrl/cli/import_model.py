"""`asyncrl import-model SOURCE FOLDER`: a Hugging Face model folder from a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.data.import_model import import_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="a .gguf file, or package:NAME for one inside an installed Python package"
    )
    parser.add_argument("destination", type=Path, metavar="FOLDER", help="the folder to make")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(default: float32)")


def run(options: argparse.Namespace) -> int:
    import_model(options.source, options.destination, dtype=options.dtype)
    return 0
