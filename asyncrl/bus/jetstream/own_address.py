"""Where others on the bus find this machine."""

from __future__ import annotations

import socket


def address_towards(peer: str) -> str:
    """This machine's address as seen by ``peer``: that of the interface that routes there; loopback if none does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
