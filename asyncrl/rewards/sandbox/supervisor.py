"""A script, run by sandlock.py in a process of its own: RULES COMMAND..., with the command under the rules.

It imports nothing of asyncrl: it is started for every program. What the program leaves without a parent comes to this
process, so that whoever ends us finds it.
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
        raise OSError("prctl: cannot take in what programs leave behind")
    code = int(importlib.import_module("sandlock").Sandbox(**json.loads(rules)).run_interactive(command))
    if code < 0:  # a signal ended it; which one nobody tells
        os.kill(os.getpid(), signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
