"""sandbox = "none": limits without isolation. For trusted programs, or a worker that itself runs in a sandbox.

A program can read and write all files that the worker can, and can use its network. Only time, output, memory, file
size and the number of processes are limited. A process that leaves the program's session can outlive the program.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence

from asyncrl.rewards.sandbox.program import ENVIRONMENT, limited, run_program
from asyncrl.rewards.sandbox.sandbox import NO_FILES, Limits, Outcome


class Bare:
    """A Sandbox (sandbox.py) without isolation."""

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
        """Always succeeds."""
