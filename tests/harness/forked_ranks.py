"""Makes multiprocessing's fork server a fork of this process, which has imported what a learner's ranks need.

By default it is a new Python, which imports for six seconds of CPU. This process must have one thread. What the server
does is multiprocessing's; test_ranks.py starts it as a user's learner does.
"""

from __future__ import annotations

import os
import signal
import socket
from multiprocessing import forkserver
from typing import Any


def serve() -> None:
    """Start the server. It ends with this process and all that it forked."""
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"\0multiprocessing-of-{os.getpid()}"  # abstract: nothing is left of it
        listener.bind(address)
        listener.listen()
        is_needed, need = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(need)
            os.dup2(2, 1)  # pytest-xdist speaks through the other one
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as ChildRanks starts it
            try:
                forkserver.main(listener.fileno(), is_needed, [])  # type: ignore[attr-defined]
            finally:
                os._exit(0)
    os.close(is_needed)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, need, pid
