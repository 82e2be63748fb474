"""sandbox = "sandlock": Landlock and seccomp rules for every program, from PyPI (https://github.com/multikernel/sandlock).

For machines without bubblewrap. It needs Linux 6.7, but no system package and no namespaces. A program can read the
system's programs and the folders in ``readable``, and can write to its own folder. It has no network unless ``network``
is true, and cannot signal other processes. This sandbox is weaker than "bwrap" and slower to start (0.1 s of CPU). The
program's folder is on the machine's disk, where only the size of each file is limited, and the program can reach most
system calls of the machine's kernel. Therefore it is used only where a setting names it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.sandbox.program import ENVIRONMENT, limited, run_program
from asyncrl.rewards.sandbox.sandbox import NO_FILES, Limits, Outcome

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_NETWORK_FILES: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/etc/nsswitch.conf")
_SUPERVISOR: Final = Path(__file__).with_name("supervisor.py")


class Sandlock:
    """A Sandbox (sandbox.py)."""

    def __init__(self, *, readable: Sequence[str], network: bool) -> None:
        paths = [*_SYSTEM, *_DEVICES, *readable, *(_NETWORK_FILES if network else ())]
        self._readable = [path for path in dict.fromkeys(paths) if os.path.exists(path)]
        self._network = network

    def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b"", files: Mapping[str, bytes] = NO_FILES
    ) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True) as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            rules = {
                "fs_readable": self._readable,
                "fs_writable": [folder, "/dev/null"],
                "cwd": folder,
                "net_allow": ["*:*", "udp://*:*"] if self._network else [],
                "net_allow_bind": ["*"] if self._network else [],
            }
            return run_program(
                [sys.executable, "-I", str(_SUPERVISOR), json.dumps(rules), *limited(command, limits)],
                limits=limits,
                stdin=stdin,
                environment={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
                folder=folder,
            )

    def check(self) -> None:
        if importlib.util.find_spec("sandlock") is None:
            raise ConfigError(
                "sandbox = \"sandlock\": the package is missing; install it (pip install 'asyncrl[sandlock]'), or "
                "choose another sandbox"
            )
        outcome = self.run(["true"], limits=Limits())
        if outcome.code or outcome.stopped:
            said = outcome.stderr.decode(errors="replace").strip().splitlines()
            problem = said[-1] if said else outcome.stopped or f"exit code {outcome.code}"
            raise ConfigError(
                f'sandbox = "sandlock": cannot start here: {problem}; it needs Linux 6.7 with Landlock; choose '
                "another sandbox"
            )
