"""bus.json in a run's folder: the address of the nats-server that `asyncrl run` has started for the run.

It is readable only by its owner, and removed when the run ends. A killed `asyncrl run` leaves it behind.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from asyncrl.errors import NoSuchRun
from asyncrl.os_process import is_alive, process_space

BUS_FILE: Final = "bus.json"


def write_address(directory: Path, *, url: str, token: str, worker_token: str) -> Path:
    """Write the address of a server that this process has started, and return the file. Raises OSError.

    worker_token  for workers that join
    """
    path = directory / BUS_FILE
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        tokens = {"token": token, "worker_token": worker_token}
        json.dump({"url": url, **tokens, "pid": os.getpid(), "host": process_space()}, file)
    return path


def read_address(directory: Path, *, is_worker: bool = False) -> tuple[str, str]:
    """Return (url, token) of the server that `asyncrl run` started for ``directory``. Raises NoSuchRun."""
    path = directory / BUS_FILE
    remedy = "start that first, or give the address of a nats-server with --set bus.url=nats://HOST:PORT"
    try:
        table = json.loads(path.read_bytes())
        url, token = table["url"], table["worker_token" if is_worker else "token"]
        if not (isinstance(url, str) and isinstance(token, str)):
            raise ValueError("no url and token")
        if not _is_killed(url, pid=table.get("pid"), host=table.get("host")):
            return url, token
        problem = f"{path}: `asyncrl run` (process {table['pid']}) was killed, and its nats-server is gone"
        remedy = (
            "continue with `asyncrl run FILE --resume` (until then `asyncrl audit`, `samples` and `board` read its "
            "folder)"
        )
    except FileNotFoundError:
        problem = f"no `asyncrl run` is up in {directory}"
        if (directory / "history.jsonl").exists() and not is_worker:
            here = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
            problem, folder = f"{here}: the run is over, or was stopped", shlex.quote(str(here))
            remedy = (
                f"`asyncrl samples {folder}`, `asyncrl board {folder}` and `asyncrl audit {folder}` show what it did, "
                "and `asyncrl run FILE --resume` continues it"
            )
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        problem = f"{path}: is damaged"
        remedy = "end the run that is up there with Ctrl-C, and continue it with `asyncrl run FILE --resume`"
    raise NoSuchRun(f"{problem}; {remedy}")


def launcher_pid(directory: Path) -> int:
    """Return the process id of the `asyncrl run` that is up in ``directory``, as recorded there; 0 if there is none."""
    try:
        pid = int(json.loads((directory / BUS_FILE).read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return pid if is_alive(pid) else 0


def may_be_up(directory: Path) -> bool:
    """Return whether `asyncrl run` may be up in ``directory``, here or where else the folder is.

    Of one that was killed only its own machine can tell.
    """
    try:
        host = json.loads((directory / BUS_FILE).read_text())["host"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged
        return True
    return bool(host != process_space() or launcher_pid(directory))


def answers(url: str) -> bool:
    """Whether a server accepts connections at ``url``. Blocks for at most two seconds."""
    try:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=2.0):
            return True
    except (OSError, ValueError):  # no server there, or not an address
        return False


def _is_killed(url: str, *, pid: Any, host: Any) -> bool:
    """Whether the `asyncrl run` that wrote the file was killed, and its server with it.

    Only known of one on this machine and in this container: process ids of others mean nothing here.
    """
    return host == process_space() and isinstance(pid, int) and not is_alive(pid) and not answers(url)
