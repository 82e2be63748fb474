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


def serve(*, is_silent: bool = False) -> None:
    """Start the server. It ends with this process and all that it forked.

    is_silent   it and its forks write nowhere, otherwise to this process's output
    """
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"\0multiprocessing-of-{os.getpid()}"  # abstract: nothing is left of it
        listener.bind(address)
        listener.listen()
        is_needed, need = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(need)
            if is_silent:
                for number in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as ChildRanks starts it
            try:
                forkserver.main(listener.fileno(), is_needed, [])  # type: ignore[attr-defined]
            finally:
                os._exit(0)
    os.close(is_needed)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, need, pid
