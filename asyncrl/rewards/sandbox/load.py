"""The sandboxes by their names in the run file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.sandbox.bubblewrap import Bubblewrap
from asyncrl.rewards.sandbox.program import ENVIRONMENT, limited, run_program
from asyncrl.rewards.sandbox.sandbox import NO_FILES, Limits, Outcome, Sandbox


class Bare:
    """sandbox = "none": limits without isolation. For trusted programs, or a worker that itself runs in a sandbox.

    A program can read and write all files that the worker can, and can use its network. Only time, output, memory, file
    size and the number of processes are limited. A process that leaves the program's session can outlive the program.
    """

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


SANDBOXES: Final[Mapping[str, type[Sandbox]]] = {"bwrap": Bubblewrap, "none": Bare}


def open_sandbox(name: str, *, readable: Sequence[str] = (), network: bool = False) -> Sandbox:
    """Return the sandbox of this name. Starts no process. Raises ConfigError.

    readable  folders of the machine that programs may read, besides those of the system's programs
    network   whether programs may use the network, including servers on this machine
    """
    if name not in SANDBOXES:
        raise ConfigError(f"sandbox: {name!r} is unknown; known: {', '.join(SANDBOXES)}")
    return SANDBOXES[name](readable=readable, network=network)
