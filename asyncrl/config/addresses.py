"""What ``bus.url`` holds: the address of one nats-server, or those of a cluster's; and HOST:PORT. Pure."""

from __future__ import annotations

import re

from asyncrl.errors import ConfigError


def host_and_port(address: str) -> tuple[str, int]:
    """Of "HOST:PORT" or "[IPV6]:PORT". Raises ConfigError."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]\s/]+):(\d{1,5})", address)
    if found is None or not 1 <= int(found[2]) <= 65_535:
        raise ConfigError(f"must be HOST:PORT, such as 127.0.0.1:9400, got {address!r}")
    return found[1].strip("[]"), int(found[2])


def servers(url: str) -> list[str]:
    """The addresses of ``bus.url``, which may be those of a cluster: nats://A:4222,nats://B:4222.

    A comma that no scheme follows is part of an address: it may be in a password, and half of one is a secret too.
    """
    return re.split(r",\s*(?=(?:nats|tls)://)", url)


def without_secrets(url: str) -> str:
    """The url without users, passwords or tokens: all that is left of it in messages."""
    parts = [address.partition("://") for address in servers(url)]
    return ",".join(scheme + separator + rest.rpartition("@")[2] for scheme, separator, rest in parts)
