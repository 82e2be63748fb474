"""A program that the server that ASYNCRL_TEST_FORKS names forks (forks.py), for shell scripts and torchrun.

    python -m tests.harness.fork_client ARGUMENTS                     asyncrl ARGUMENTS
    python -m tests.harness.fork_client --module MODULE ARGUMENTS     MODULE.main(ARGUMENTS)

Stands in for the program: the fork writes to this process's output, and this process ends with the fork's exit code.
It imports almost nothing, so that it costs less than it saves.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> int:
    module, arguments = "", sys.argv[1:]
    if arguments[:1] == ["--module"]:
        module, arguments = arguments[1], arguments[2:]
    if "ASYNCRL_PARENT_PID" in os.environ:  # it is this process that ends with its parent, and the fork with it
        from asyncrl import os_process

        os_process.end_with_parent()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["ASYNCRL_TEST_FORKS"])
    request = {
        "name": module,
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "output": [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)],
    }
    with connection, connection.makefile("rwb") as lines:
        lines.write(json.dumps(request).encode() + b"\n")
        lines.flush()
        while "code" not in (said := json.loads(lines.readline())):
            pass
    code = int(said["code"])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
