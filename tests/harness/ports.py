"""Ports for servers that come back to the same port after they were killed."""

from __future__ import annotations

import random
import socket
from typing import Final

_PORTS: Final = range(10_000, 30_000)
"""Below those that the system hands out, so that no connection takes the port of a server that is down."""


def free_ports(count: int, *, seed: int | None = None) -> list[int]:
    """``count`` different ports that nobody listens on, drawn at random."""
    found: list[int] = []
    for port in random.Random(seed).sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found
