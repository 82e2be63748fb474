"""sandbox = "none": limits and no walls. For programs that are trusted, or a worker that is a sandbox itself.

A program reads what the worker can read, writes where the worker can write, and reaches its network; only time, output,
memory, the size of a file and the number of processes are limited, and a process that leaves its session outlives it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence

from asyncrl.rewards.sandbox.program import ENVIRONMENT, limited, run_program
from asyncrl.rewards.sandbox.sandbox import NO_FILES, Limits, Outcome


class Bare:
    """A Sandbox (sandbox.py) in name."""

    def __init__(self, *, readable: Sequence[str], network: bool) -> None:
        pass

    def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b"", files: Mapping[str, bytes] = NO_FILES
    ) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True) as folder:
            for name, data in files.items():
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(data)
            environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
            return run_program(
                limited(command, limits), limits=limits, stdin=stdin, environment=environment, folder=folder
            )

    def check(self) -> None:
        """Nothing can be missing."""
