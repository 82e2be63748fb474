"""SGLang servers that are forked from a process that has imported SGLang: imports are most of what a start costs.

The engine starts a client of the fork server (fork_client.py) below its keeper, in the place of the server: when the
client ends, so does the server. tests/integration/test_whole_system.py starts a server as a user does.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from asyncrl.engines.sglang import server
from tests.harness import fork_client
from tests.harness.forked import SOCKET, ForkServer

_PROGRAM: Final = "sglang.launch_server"


def start(folder: Path, *, owner: int) -> ForkServer:
    """Start what forks SGLang servers; ``owner`` as for ForkServer."""
    environment = server.server_environment({}, device="cpu")
    return ForkServer(folder, imported=["tests.harness.imported_sglang"], owner=owner, environment=environment)


@contextlib.contextmanager
def forking(forks: ForkServer) -> Iterator[None]:
    """Within it, every engine's server on this machine is forked. Waits until SGLang is imported."""
    forks.connect().close()
    make = server.server_command

    def command(*arguments: Any, **options: Any) -> list[str]:
        made = make(*arguments, **options)
        client = [sys.executable, "-S", str(Path(fork_client.__file__)), "--module", __name__]
        return ["env", f"{SOCKET}={forks.path}", *client, *made[made.index(_PROGRAM) + 1 :]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "server_command", command)
        yield


def main(arguments: list[str]) -> int:
    """The server, in the fork."""
    sys.argv = [_PROGRAM, *arguments]
    runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True)
    return 0
