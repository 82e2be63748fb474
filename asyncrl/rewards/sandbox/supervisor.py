"""Run a command under sandlock's rules: a script that sandlock.py starts with the arguments RULES COMMAND...

It imports nothing from asyncrl, because it starts for every program. This process adopts the program's orphans (as a
subreaper), so that the worker finds and ends them with it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys

_SET_CHILD_SUBREAPER = 36


def main(rules: str, command: list[str]) -> int:
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl: cannot adopt orphaned processes")
    code = int(importlib.import_module("sandlock").Sandbox(**json.loads(rules)).run_interactive(command))
    if code < 0:  # a signal ended it; sandlock does not say which
        os.kill(os.getpid(), signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
