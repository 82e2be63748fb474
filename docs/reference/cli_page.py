"""docs/reference/cli.md: every verb of the asyncrl command with its arguments, as its parser prints them."""

from __future__ import annotations

import argparse
import os
from typing import Final

from asyncrl.cli import main

HEAD: Final = """# Command line

Generated from the parsers by `python docs/reference/make.py`; `asyncrl VERB --help` prints the same. Commands write
results to stdout and everything else to stderr.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed; `doctor` and `audit`: found something |
| 2 | a wrong configuration, or a failure that a restart would repeat: one line says where, what, and how to fix it |
| 130 | interrupted: Ctrl-C |

| environment variable | meaning |
|---|---|
| `ASYNCRL_BUS_TOKEN` | token of the bus, or USER:PASSWORD; takes precedence over `bus.token` |
| `ASYNCRL_BOARD_TOKEN` | token of `asyncrl board`; random by default ([board](../guides/operate.md)) |
| `ASYNCRL_BUS_URL` | address of the bus that `asyncrl run` started; set for its processes |
| `ASYNCRL_PARENT_PID` | set by `asyncrl run` for its processes |
| `ASYNCRL_VENV` | where `bin/install` makes its environment (default: `.venv`) |
| `ASYNCRL_TORCH` | requirement that `bin/install` installs for torch |

`bin/demo`, `bin/test`, `bin/chaos`, and `bin/nats-config` explain themselves with `--help` or in their
first lines.
"""


def page() -> str:
    os.environ["COLUMNS"] = "100"  # the width that argparse wraps its help at
    (verbs,) = (action for action in main.parser()._actions if isinstance(action, argparse._SubParsersAction))
    return HEAD + "".join(
        f"\n## asyncrl {name}\n\n```text\n{_help(verb)}\n```\n" for name, verb in verbs.choices.items()
    )


def _help(verb: argparse.ArgumentParser) -> str:
    """What the verb prints, without what every verb has."""
    lines = verb.format_help().rstrip().replace("[-h] ", "").splitlines()
    return "\n".join(line for line in lines if not line.startswith("  -h, --help")).removesuffix("\n\noptions:")
