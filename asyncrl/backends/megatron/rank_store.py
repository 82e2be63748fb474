"""The store by which ranks find each other. The leader serves it; torch.distributed asks it.

It has no authentication, so it listens on this machine alone if all ranks are here.
Test: tests/unit/backends/megatron/test_ranks.py.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

HOST: Final = "127.0.0.1"


def serve(*, is_local: bool, timeout_seconds: float) -> Any:
    """Return a dist.TCPStore that listens at a free port, its ``port``.  is_local: on this machine alone"""
    port, descriptor = 0, None
    if is_local:  # torch itself would listen on all interfaces
        listener = socket.create_server((HOST, 0), backlog=socket.SOMAXCONN)
        port, descriptor = listener.getsockname()[1], listener.detach()  # the store closes it
    return dist.TCPStore(  # type: ignore[attr-defined]
        HOST,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
