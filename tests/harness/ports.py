"""Ports for servers that a test kills and restarts on the same port."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

_PORTS: Final = range(10_000, 30_000)
"""Ports below the ephemeral range, so that no connection takes the port of a stopped server."""


_SHARES: Final = 16


def free_ports(count: int, *, seed: int | None = None) -> list[int]:
    """Return ``count`` different free ports, drawn at random.

    Each pytest-xdist process draws from its own share. A port may be bound long after it was drawn, or again after its
    server was killed; without shares, another process's server could answer there.
    """
    found: list[int] = []
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = _PORTS[number % _SHARES :: _SHARES]
    for port in random.Random(seed).sample(own, len(own)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found
