"""Files with a secret, which only their owner can read: that of a run's tickets, the key of `asyncrl serve`."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import Final

from asyncrl.config import RunConfig
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
                _write(path, secrets.token_hex(32))
        return path.read_text(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read or made: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all; it is on disk on return. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
