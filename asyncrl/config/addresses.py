"""Parses ``bus.url`` (the address of one nats-server, or the addresses of a cluster) and HOST:PORT. Pure."""

from __future__ import annotations

import re

from asyncrl.errors import ConfigError


def host_and_port(address: str) -> tuple[str, int]:
    """Parse "HOST:PORT" or "[IPV6]:PORT". Raises ConfigError."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]\s/]+):(\d{1,5})", address)
    if found is None or not 1 <= int(found[2]) <= 65_535:
        raise ConfigError(f"must be HOST:PORT, such as 127.0.0.1:9400, got {address!r}")
    return found[1].strip("[]"), int(found[2])


def servers(url: str) -> list[str]:
    """Split ``bus.url`` into its addresses; a cluster has several: nats://A:4222,nats://B:4222.

    A comma that is not followed by a scheme is part of an address. It may be in a password, half of which is still a
    secret.
    """
    return re.split(r",\s*(?=(?:nats|tls)://)", url)


def without_secrets(url: str) -> str:
    """Return the url without users, passwords and tokens, for messages."""
    parts = [address.partition("://") for address in servers(url)]
    return ",".join(scheme + separator + rest.rpartition("@")[2] for scheme, separator, rest in parts)
