"""pytest-xdist starts this instead of Python; it asks collected.py for a fork that does the work.

    python collected_client.py SOCKET -u -c PROGRAM

It lives as long as the fork, which uses its stdin, stdout and stderr. If no fork can be made, it becomes a Python
itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys


def main() -> None:
    path, *arguments = sys.argv[1:]
    request = {"directory": os.getcwd(), "program": arguments[-1]}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
            fork = int(connection.makefile().readline())
    except (OSError, ValueError):
        os.execv(sys.executable, [sys.executable, *arguments])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the fork
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # a reader of the fork's output must see its end
        os.dup2(nowhere, number)
    try:
        end = os.pidfd_open(fork)
    except ProcessLookupError:
        return
    select.select([end], [], [])


if __name__ == "__main__":
    main()
