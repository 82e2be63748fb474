"""`asyncrl greet NAME`: a custom verb, as a file of asyncrl/cli/ would define it."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="who is greeted")


def run(options: argparse.Namespace) -> int:
    print(f"hello {options.name}")
    return 0
