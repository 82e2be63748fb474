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
    """Return the sandbox of this name. Starts no process. Raises ConfigError.

    readable  folders of the machine that programs may read, besides those of the system's programs
    network   whether programs may use the network, including servers on this machine
    """
    if name not in SANDBOXES:
        raise ConfigError(f"sandbox: {name!r} is unknown; known: {', '.join(SANDBOXES)}")
    return SANDBOXES[name](readable=readable, network=network)
