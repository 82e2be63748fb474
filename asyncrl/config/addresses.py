"""What ``bus.url`` holds: the address of one nats-server, or those of a cluster's. Pure."""

from __future__ import annotations

import re


def servers(url: str) -> list[str]:
    """The addresses of ``bus.url``, which may be those of a cluster: nats://A:4222,nats://B:4222.

    A comma that no scheme follows is part of an address: it may be in a password, and half of one is a secret too.
    """
    return re.split(r",\s*(?=(?:nats|tls)://)", url)


def without_secrets(url: str) -> str:
    """The url without users, passwords or tokens: all that is left of it in messages."""
    parts = [address.partition("://") for address in servers(url)]
    return ",".join(scheme + separator + rest.rpartition("@")[2] for scheme, separator, rest in parts)
