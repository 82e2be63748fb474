"""Sandboxes for untrusted programs, such as those that models write. Only a program's output leaves its sandbox.

``run`` runs one program with limits in a temporary folder with files, may be called from many threads at once, blocks
for at most limits.seconds, and raises OSError if the command cannot be started. ``check`` starts the sandbox once, and
raises ConfigError if it is missing or cannot start: it is never replaced by a weaker one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.sandboxed_program import ENVIRONMENT, MIB, Outcome, run_program, wrap_with_limits
from asyncrl.rewards.sandboxed_program import Limits as Limits

_NO_FILES: Final[Mapping[str, bytes]] = {}

FOLDER: Final = "/work"
"""The program's working directory. It can write only here and to /dev/shm."""
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_NOBODY: Final = "65534"
_INSTALL: Final = "install bubblewrap (apt install bubblewrap; the `bubblewrap` of PyPI is something else)"


class Bubblewrap:
    """sandbox = "bwrap": separate namespaces for every program (bubblewrap, https://github.com/containers/bubblewrap).

    A program sees the system's programs and the folders in ``readable``, all read-only, and an empty folder of limited
    size. It has no network unless ``network`` is true, sees no other processes, inherits no environment variables and
    has no privileges. When its first process ends, or when the worker ends, all its processes end. Calls that make
    memory which belongs to no process are refused (_filter_of_calls). The sandbox does not protect against kernel bugs;
    for that, use a separate machine.
    """

    def __init__(self, *, readable: Sequence[str], network: bool) -> None:
        self._readable = tuple(path for path in dict.fromkeys([*_SYSTEM, *readable]) if os.path.exists(path))
        self._network = network

    def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b"", files: Mapping[str, bytes] = _NO_FILES
    ) -> Outcome:
        with contextlib.ExitStack() as stack:
            opened = {name: stack.enter_context(_in_memory(data)) for name, data in files.items()}
            rules = _filter_of_calls(platform.machine())
            inherited = [stack.enter_context(_in_memory(rules))] if rules else []
            seccomp = [word for file in inherited for word in ("--seccomp", str(file))]
            return run_program(
                self._command(command, limits, opened, seccomp),
                limits=limits,
                stdin=stdin,
                environment={**ENVIRONMENT, "HOME": FOLDER, "TMPDIR": FOLDER},
                inherited=[*opened.values(), *inherited],
            )

    def check(self) -> None:
        if shutil.which("bwrap") is None:
            raise ConfigError(f'sandbox = "bwrap": there is no bwrap on PATH; {_INSTALL}, or choose another sandbox')
        outcome = self.run(["true"], limits=Limits())
        if outcome.code or outcome.stopped:
            said = outcome.stderr.decode(errors="replace").strip().splitlines()
            problem = said[-1] if said else outcome.stopped or f"exit code {outcome.code}"
            raise ConfigError(
                f'sandbox = "bwrap": cannot start here: {problem}; a container may forbid user namespaces: allow them, '
                "or choose another sandbox"
            )

    def _command(
        self, command: Sequence[str], limits: Limits, files: Mapping[str, int], seccomp: Sequence[str]
    ) -> list[str]:
        size = ["--size", str(limits.disk_mib * MIB)]
        return [
            shutil.which("bwrap") or "bwrap",
            *("--unshare-all", "--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"),
            *("--share-net",) * self._network,
            *("--die-with-parent", "--new-session", *seccomp),
            *self._mounts(),
            *("--proc", "/proc", *self._settings(), "--dev", "/dev", "--remount-ro", "/dev"),
            *(*size, "--tmpfs", "/dev/shm", *size, "--tmpfs", FOLDER, "--symlink", FOLDER, "/tmp"),
            *(word for name, file in files.items() for word in ("--file", str(file), f"{FOLDER}/{name}")),
            *("--remount-ro", "/"),  # else the root would be writable memory without a size limit
            *("--chdir", FOLDER, "--"),
            *wrap_with_limits(command, limits),
        ]

    def _mounts(self) -> Iterator[str]:
        """Mount the readable paths. Symlinks of the system's root, such as /lib to usr/lib, stay symlinks."""
        for path in self._readable:
            if os.path.islink(path) and path in _SYSTEM:
                yield from ("--symlink", os.readlink(path), path)
            else:
                yield from ("--ro-bind", path, path)
        if self._network:
            for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs"):
                yield from ("--ro-bind-try", str(Path(path).resolve()), path)

    def _settings(self) -> Iterator[str]:
        """Mount the machine's settings in /proc read-only.

        Otherwise a program could change them if the worker runs as root.
        """
        with os.scandir("/proc") as entries:
            for entry in entries:
                if entry.name.isdecimal() or entry.is_symlink():  # processes: the sandbox has its own
                    continue
                if entry.is_dir() or entry.stat().st_mode & 0o222 or entry.name == "kcore":
                    yield from ("--ro-bind", entry.path, entry.path)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """Yield a file descriptor to read ``data`` from."""
    descriptor = os.memfd_create("asyncrl-sandbox")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


_REFUSED_CALLS: Final[Mapping[str, tuple[int, tuple[int, ...]]]] = {
    # memfd_create, shmget, msgget, semget, mount; then, with one number everywhere, fsopen and memfd_secret
    "x86_64": (0xC000003E, (319, 29, 68, 64, 165, 430, 447)),
    "aarch64": (0xC00000B7, (279, 194, 186, 190, 40, 430, 447)),
    "riscv64": (0xC00000F3, (279, 194, 186, 190, 40, 430, 447)),
}
"""By machine: its number in audit.h, and the numbers of calls that make memory which belongs to no process.

Pages of a file in memory, a shared segment or a tmpfs in a user namespace of the program's own stay when no process
maps them, so that no limit on processes counts them.
"""


def _filter_of_calls(machine: str) -> bytes:
    """Return a seccomp filter in classic BPF under which these calls do not exist (ENOSYS). Empty: unknown machine."""
    if machine not in _REFUSED_CALLS:
        return b""
    audit, calls = _REFUSED_CALLS[machine]
    load, is_equal, is_at_least, give, allow, refuse = 0x20, 0x15, 0x35, 0x06, 0x7FFF0000, 0x50000 | errno.ENOSYS
    left = len(calls)
    made = [
        (load, 0, 0, 4),  # the convention of the call
        (is_equal, 0, left + 3, audit),  # another one, such as 32 bits, numbers calls in other ways
        (load, 0, 0, 0),  # its number
        (is_at_least, left + 1, 0, 1 << 30),  # x32
        *((is_equal, left - place, 0, call) for place, call in enumerate(calls)),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
    # A jump skips so many rules: to the last one, which refuses.
    return b"".join(struct.pack("=HBBI", *rule) for rule in made)


class Bare:
    """sandbox = "none": limits without isolation. For trusted programs, or a worker that itself runs in a sandbox.

    A program can read and write all files that the worker can, and can use its network. Only time, output, memory, file
    size and the number of processes are limited. A process that leaves the program's session can outlive the program.
    """

    def __init__(self, *, readable: Sequence[str], network: bool) -> None:
        pass

    def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b"", files: Mapping[str, bytes] = _NO_FILES
    ) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True) as folder:
            for name, data in files.items():
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(data)
            environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
            return run_program(
                wrap_with_limits(command, limits), limits=limits, stdin=stdin, environment=environment, folder=folder
            )

    def check(self) -> None:
        """Always succeeds."""


Sandbox = Bubblewrap | Bare
SANDBOXES: Final[Mapping[str, type[Bubblewrap] | type[Bare]]] = {"bwrap": Bubblewrap, "none": Bare}


def open_sandbox(name: str, *, readable: Sequence[str] = (), network: bool = False) -> Sandbox:
    """Return the sandbox of this name. Starts no process. Raises ConfigError.

    readable  folders of the machine that programs may read, besides those of the system's programs
    network   whether programs may use the network, including servers on this machine
    """
    if name not in SANDBOXES:
        raise ConfigError(f"sandbox: {name!r} is unknown; known: {', '.join(SANDBOXES)}")
    return SANDBOXES[name](readable=readable, network=network)
