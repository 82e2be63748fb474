"""Helpers of connection.py for connecting: readable errors, the oldest supported server, TCP timeouts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Final

from asyncrl.errors import ConfigError

_OLDEST: Final = (2, 10)
_DEAD_SECONDS: Final = 15
"""TCP_USER_TIMEOUT: the kernel drops a connection if data or pings stay unacknowledged for this long."""


def connect_error(name: str, error: Exception) -> ConfigError:
    """Explain why connecting failed. ``name``: the server's address, without secrets."""
    if isinstance(error, ssl.SSLError):
        return ConfigError(f"bus.url {name}: TLS: {error.reason or error}; see bus.tls_ca")
    if isinstance(error, ValueError) or isinstance(error.__context__, ValueError):  # may quote a password
        return ConfigError(
            f"bus.url {name}: not an address; write nats://HOST:PORT, for a cluster nats://A:PORT,nats://B:PORT"
        )
    return ConfigError(f"bus.url {name}: {error}")


def require_version(name: str, version: Any) -> None:
    """Raise ConfigError if the server is too old."""
    if (version.major, version.minor) < _OLDEST:
        raise ConfigError(f"bus.url {name}: nats-server {version} is too old; asyncrl needs 2.10")


def expect_signs_of_life(client: Any) -> None:
    """Set TCP timeouts, because a dead host sends no error. Linux only; elsewhere pings detect a dead host, later."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    writer = getattr(client._transport, "_io_writer", None)
    way = writer.get_extra_info("socket") if writer is not None else None
    if option is not None and way is not None:
        way.setsockopt(socket.IPPROTO_TCP, option, _DEAD_SECONDS * 1000)


def end_attempt(client: Any) -> None:
    """Close the connection of an attempt to reconnect that failed. nats-py only forgets it. Errors of other tasks have
    nothing to do with an attempt, and change nothing."""
    if client._reconnection_task is not None and asyncio.current_task() is client._reconnection_task:
        client._transport.close()


async def drained(client: Any, subscription: Any) -> None:
    """Drain a subscription. Raises the errors of nats-py, which waits ten seconds for the server.

    If a flush times out, nats-py keeps the cancelled future. When a frozen server resumes and sends the late PONG, that
    future would end nats-py's read loop permanently. So a new future takes its place: PONGs come in the order of PINGs.
    """
    try:
        await subscription.drain()
    finally:
        loop = asyncio.get_running_loop()
        client._pongs[:] = [loop.create_future() if pong.cancelled() else pong for pong in client._pongs]
