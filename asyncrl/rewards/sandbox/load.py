"""The sandboxes by their names in the run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.sandbox.bare import Bare
from asyncrl.rewards.sandbox.bubblewrap import Bubblewrap
from asyncrl.rewards.sandbox.sandbox import Sandbox
from asyncrl.rewards.sandbox.sandlock import Sandlock

SANDBOXES: Final[Mapping[str, type[Sandbox]]] = {"bwrap": Bubblewrap, "sandlock": Sandlock, "none": Bare}


def open_sandbox(name: str, *, readable: Sequence[str] = (), network: bool = False) -> Sandbox:
    """The sandbox of this name; starts nothing. Raises ConfigError.

    readable  folders of the machine that its programs may read, besides those of the system's own programs
    network   whether they may use the network, this machine's own servers included
    """
    if name not in SANDBOXES:
        raise ConfigError(f"sandbox: {name!r} is unknown; known: {', '.join(SANDBOXES)}")
    return SANDBOXES[name](readable=readable, network=network)
