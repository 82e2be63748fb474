"""What connection.py needs to know of connecting: errors for a person, the oldest server, TCP timeouts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Final

from asyncrl.errors import ConfigError

_OLDEST: Final = (2, 10)
_DEAD_SECONDS: Final = 15
"""TCP_USER_TIMEOUT: the kernel drops a connection if nothing, pings included, is acknowledged for this long."""


def connect_error(name: str, error: Exception) -> ConfigError:
    """Why a server could not be connected to. ``name``: its address, without secrets."""
    if isinstance(error, ssl.SSLError):
        return ConfigError(f"bus.url {name}: TLS: {error.reason or error}; see bus.tls_ca")
    if isinstance(error, ValueError) or isinstance(error.__context__, ValueError):  # may quote a password
        return ConfigError(
            f"bus.url {name}: not an address; write nats://HOST:PORT, for a cluster nats://A:PORT,nats://B:PORT"
        )
    return ConfigError(f"bus.url {name}: {error}")


def require_version(name: str, version: Any) -> None:
    """Raise ConfigError for a server that is too old."""
    if (version.major, version.minor) < _OLDEST:
        raise ConfigError(f"bus.url {name}: nats-server {version} is too old; asyncrl needs 2.10")


def expect_signs_of_life(client: Any) -> None:
    """Set TCP timeouts, as a dead host just goes silent (Linux; elsewhere pings detect it, later)."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    writer = getattr(client._transport, "_io_writer", None)
    way = writer.get_extra_info("socket") if writer is not None else None
    if option is not None and way is not None:
        way.setsockopt(socket.IPPROTO_TCP, option, _DEAD_SECONDS * 1000)


async def drained(client: Any, subscription: Any) -> None:
    """Drain it. Raises what nats-py does, which waits ten seconds for the server.

    Of a flush that timed out it keeps the cancelled future, and the PONG that comes after all, from a server that was
    frozen, would end its read loop for good. Another takes its place, as PONGs come in the order of PINGs.
    """
    try:
        await subscription.drain()
    finally:
        loop = asyncio.get_running_loop()
        client._pongs[:] = [loop.create_future() if pong.cancelled() else pong for pong in client._pongs]
