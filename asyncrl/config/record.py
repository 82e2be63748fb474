"""Convert a run's settings to a table for its history, and back.

The table has everything that defines the run, without secrets (secret_values.py). Paths are absolute, so that the
folder can be read from anywhere. Left out are [launcher] and the bus's token. Files with secrets are recorded by name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.config import RunConfig, run_file
from asyncrl.config.addresses import without_secrets
from asyncrl.config.secret_values import hide_secrets
from asyncrl.config.servers import ServerSection

_LEFT_OUT: Final = ("launcher",)
_BRIEF: Final = ("reward", "engine", "metrics", "weights")
_WITH_PATH: Final = ("model", "data", "critic", "reference", "teacher")
BUS_PATHS: Final = ("credentials", "tls_ca", "tls_certificate", "tls_key")
BUS_STORE: Final = ("store", "max_message_bytes", "max_group_bytes", "max_log_bytes", "ack_seconds")
_BUS_KEYS: Final = ("kind", "url", *BUS_STORE, *BUS_PATHS)


def as_table(run: RunConfig, *, has_defaults: bool = False) -> dict[str, Any]:
    """Return the recorded sections as JSON values. Some are recorded without the keys that have their defaults, unless
    ``has_defaults``."""
    table: dict[str, Any] = {}
    for name in RunConfig.__dataclass_fields__:
        if name not in (*_LEFT_OUT, "servers") and (section := getattr(run, name)) is not None:
            table[name] = json.loads(json.dumps(dataclasses.asdict(section)))
            for key in ("options", "parts", "pools"):
                if isinstance(table[name].get(key), dict):
                    table[name][key] = hide_secrets(table[name][key])
    if run.servers:
        table["servers"] = {name: _server(section) for name, section in run.servers.items()}
    table["staleness"]["max_staleness"] = run.staleness_bound  # another release may choose another
    for name in _WITH_PATH:
        if table.get(name, {}).get("path"):
            table[name]["path"] = str(Path(table[name]["path"]).absolute())
    for name in () if has_defaults else _BRIEF:
        defaults = json.loads(json.dumps(dataclasses.asdict(type(getattr(run, name))())))
        table[name] = {key: value for key, value in table[name].items() if key == "kind" or value != defaults[key]}
    table["evaluation"]["datasets"] = [_dataset(one) for one in table["evaluation"]["datasets"]]
    for file in table["data"]["files"]:
        file["path"] = str(Path(file["path"]).absolute())
    table["bus"] = {key: table["bus"][key] for key in _BUS_KEYS}
    for key in BUS_PATHS:
        if table["bus"][key]:
            table["bus"][key] = str(Path(table["bus"][key]).absolute())
    table["bus"]["url"] = without_secrets(table["bus"]["url"])
    return table


def _server(section: ServerSection) -> dict[str, Any]:
    """Return a server's section without its secrets, and without the keys that have their defaults."""
    table = json.loads(json.dumps(dataclasses.asdict(section)))
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    kept = {key: value for key, value in table.items() if key != "api_key" and value and value != defaults[key]}
    if section.is_ours:
        kept["path"] = str(Path(section.path).absolute())
    return dict(hide_secrets(kept))


def _dataset(table: dict[str, Any]) -> dict[str, Any]:
    reward = {"reward": hide_secrets(table["reward"])} if table["reward"] is not None else {}
    kept = {key: value for key, value in table.items() if key != "reward"}
    return kept | reward | {"path": str(Path(table["path"]).absolute())}


def from_table(table: Mapping[str, Any], *, where: str) -> RunConfig:
    """Inverse of ``as_table``; missing sections get their defaults. Raises ConfigError naming ``where``."""
    return run_file.from_table(table, where=where)
