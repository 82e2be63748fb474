"""`asyncrl ARGUMENTS` whose measurements (planning/plan.py) are forks of it, which have imported what they need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from asyncrl.cli import main as cli


def main(arguments: Sequence[str]) -> int:
    fork = multiprocessing.get_context("fork")  # this process has one thread, and no GPU
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment, misc]
    return cli.main(arguments)
