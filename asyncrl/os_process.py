"""This process: ending with its parent (even after SIGKILL), and its age. Linux only.

Also whether another process is alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shlex
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

PARENT = "ASYNCRL_PARENT_PID"
"""Environment variable of a child that should end with its parent: the parent's process id."""

PYTHON_PATH = "PYTHONPATH"

_PR_SET_PDEATHSIG = 1


def import_path() -> list[str]:
    """Return folders that this process imports from but another Python would not: the script's and prepended ones.

    Folders in PYTHONPATH are left out, because children inherit it.
    """
    own = itertools.takewhile(lambda folder: folder != sysconfig.get_path("stdlib"), sys.path)
    inherited = os.environ.get(PYTHON_PATH, "").split(os.pathsep)
    return [os.path.abspath(folder) for folder in own if os.path.isdir(folder or ".") and folder not in inherited]


def environment_of_child(added: Mapping[str, str]) -> dict[str, str]:
    """Return our environment updated with ``added``; the PYTHONPATH of ``added`` comes before ours."""
    paths = [added.get(PYTHON_PATH, ""), os.environ.get(PYTHON_PATH, "")]
    path = os.pathsep.join(filter(None, paths))
    return os.environ | dict(added) | ({PYTHON_PATH: path} if path else {})


def module_command(module: str) -> list[str]:
    """Return the command of ``python -m module`` for a child that does not import from the working directory.

    A user's http.py there would replace Python's. It does import from there where asyncrl itself is not installed.
    """
    is_installed = bool(list(metadata.distributions(name="asyncrl")))
    is_here = Path(__file__).parents[1] == Path.cwd()
    return [sys.executable, *(["-P"] if is_installed or not is_here else []), "-m", module]


def own_command() -> str:
    """Return the ``asyncrl`` command of this Python as it works where the user stands: often ".venv/bin/asyncrl"."""
    beside = Path(sys.executable).with_name("asyncrl")
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m asyncrl"
    on_path = shutil.which("asyncrl")
    if on_path is not None and os.path.samefile(on_path, beside):
        return "asyncrl"
    return shlex.quote(str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside))


def end_with_parent() -> bool:
    """End at once when our parent is gone, if the environment asks for it. Return whether it does (launchers ask).

    The signal is SIGKILL: a drain could wait forever for a bus that ended with the same parent. Being killed loses
    nothing.
    """
    parent = os.environ.pop(PARENT, "")
    if parent:
        signal_on_parent_death(signal.SIGKILL)
        if os.getppid() != int(parent):  # the parent died before the prctl call
            os.kill(os.getpid(), signal.SIGKILL)
    return bool(parent)


def signal_on_parent_death(number: int) -> None:
    """Have the kernel send us signal ``number`` when the thread that started us ends."""
    asks_for_signal_on_parent_death(number)()


def asks_for_signal_on_parent_death(number: int) -> Callable[[], object]:
    """Return ``signal_on_parent_death`` as a ``preexec_fn`` for subprocess.Popen.

    The C function is looked up here because the child of a fork should do as little as possible.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def process_space() -> str:
    """Identify the PID namespace: host, boot id, container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def state_letter(pid: int) -> str:
    """Return the state of a process on this machine as in proc(5); "" if it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def process_state(pid: int) -> Literal["", "running", "stopped", "gone"]:
    """Return the state of a process on this machine; "" for pid 0."""
    if not pid:
        return ""
    letter = state_letter(pid)
    return "stopped" if letter in ("T", "t") else "gone" if letter in ("", "Z", "X") else "running"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this id and has not ended. One that its parent has not reaped has ended."""
    if pid <= 0:  # those are no processes, but groups of them
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process exists and belongs to another user
        pass
    return state_letter(pid) not in ("Z", "X")


@contextlib.contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP inside the block, so that unfinished files are removed.

    In the main thread only.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_within(seconds: float, code: int) -> None:
    """Exit with ``code`` if this process still runs after ``seconds``, for example in a call that never returns."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def age_seconds() -> float:
    """Return seconds since this process was started, imports included."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
