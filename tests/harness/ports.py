"""Ports for servers that come back to the same port after they were killed."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

_PORTS: Final = range(10_000, 30_000)
"""Below those that the system hands out, so that no connection takes the port of a server that is down."""


_SHARES: Final = 16


def free_ports(count: int, *, seed: int | None = None) -> list[int]:
    """``count`` different ports that nobody listens on, drawn at random.

    Each process of pytest-xdist draws from its own: a port may be taken long after it was drawn, or again after its
    server was killed, and another's server would answer there.
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
