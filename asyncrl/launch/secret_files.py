"""Files with a secret, which only their owner can read: that of a run's tickets, the key of `asyncrl serve`."""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path
from typing import Final

from asyncrl.config import RunConfig
from asyncrl.durable_files import write_whole
from asyncrl.errors import ConfigError

TICKETS_FILE: Final = "tickets"


def ticket_secret(run: RunConfig) -> bytes:
    """Return the secret with which the learner makes its tickets (policies/groups/tickets.py). Raises ConfigError.

    It is created with the run. A run whose file is lost gets a new one: groups answered under old tickets are asked for
    again.
    """
    path = run.run_directory / TICKETS_FILE
    secret = read_or_create(path)
    if not re.fullmatch("[0-9a-f]{64}", secret):
        raise ConfigError(f"{path}: is not a secret of 64 hexadecimal digits; remove it, and another one is made")
    return secret.encode()


def read_or_create(path: Path) -> str:
    """Read the secret in a file. If there is no file, create one with a new secret. Raises ConfigError."""
    try:
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                write_whole(path, f"{secrets.token_hex(32)}\n", mode=0o600)
        return path.read_text(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read or made: {error.strerror}") from None
