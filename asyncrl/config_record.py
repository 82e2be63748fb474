"""A run's settings as a table for its history, and back: what a later reader of the run's folder needs to know.

Paths are absolute, so that it does not matter from where they are read. Sections that may hold secrets and that nobody
needs afterwards ([reward], [engine], [metrics], [weights]) are left out, and so is the bus's token. Files with
secrets are named.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.addresses import without_secrets
from asyncrl.config import RunConfig
from asyncrl.tables import build

_SECTIONS: Final = (
    *("run", "model", "data", "rollout", "learner", "algorithm", "critic", "reference", "teacher"),
    *("staleness", "checkpoint", "bus"),
)
_WITH_PATH: Final = ("model", "data", "critic", "reference", "teacher")
_BUS_PATHS: Final = ("credentials", "tls_ca", "tls_certificate", "tls_key")
_BUS_KEYS: Final = ("url", "store", "max_message_bytes", "max_log_bytes", "ack_seconds", *_BUS_PATHS)


def as_table(run: RunConfig) -> dict[str, Any]:
    """What JSON can carry, of ``_SECTIONS``."""
    table: dict[str, Any] = {}
    for name in _SECTIONS:
        if (section := getattr(run, name)) is not None:
            table[name] = json.loads(json.dumps(dataclasses.asdict(section)))
    for name in _WITH_PATH:
        if table.get(name, {}).get("path"):
            table[name]["path"] = str(Path(table[name]["path"]).absolute())
    table["bus"] = {key: table["bus"][key] for key in _BUS_KEYS}
    for key in _BUS_PATHS:
        if table["bus"][key]:
            table["bus"][key] = str(Path(table["bus"][key]).absolute())
    table["bus"]["url"] = without_secrets(table["bus"]["url"])
    return table


def from_table(table: Mapping[str, Any], *, where: str) -> RunConfig:
    """The settings again; sections left out have their defaults. Raises ConfigError naming ``where``."""
    return build(RunConfig, table, where)
