"""Renamed keys of the run file, and keys of other frameworks that asyncrl refuses. Pure.

A run file with an old key is refused in one line that names the new key. Settings recorded by an older version of
asyncrl (history.jsonl, the bus) are translated silently.

To rename a key: add a row. Tests: tests/unit/config/test_renamed.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.errors import ConfigError

RENAMED: Final[Mapping[str, str]] = {
    "rollout.salvage_seconds": "rollout.partial_save_seconds",
    "weights.bucket_megabytes": "weights.options.bucket_megabytes",
    "weights.delta_share": "weights.options.delta_share",
    "weights.full_every": "weights.options.full_every",
    "weights.host": "weights.options.host",
}
"""Old section.key -> new section.key, which may be deeper: "weights.host" -> "weights.options.host"."""

_CHANNEL: Final[Mapping[str, str]] = {
    "weights.bucket_megabytes": "nccl",
    "weights.delta_share": "objects",
    "weights.full_every": "objects",
    "weights.host": "nccl",
}
"""Old key -> the weights.channel that has the new option. Other channels never used the key, so it is dropped for
them."""


_PENALTY: Final = (
    "changes the distribution that answers are sampled from, by tokens that the trainer cannot see, so every behavior "
    "logprob would be wrong; remove it (an evaluation may set it)"
)
REFUSED: Final[Mapping[str, str]] = {
    f"rollout.{name}_penalty": _PENALTY for name in ("repetition", "presence", "frequency")
}
"""section.key -> why asyncrl has no such key."""


def refuse(table: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a key of a user's run file that was renamed or is refused."""
    for key, reason in REFUSED.items():
        section, name = key.split(".")
        if isinstance(found := table.get(section), Mapping) and name in found:
            raise ConfigError(f"{where}: {key} {reason}")
    for old, new in RENAMED.items():
        section, key = old.split(".")
        if isinstance(found := table.get(section), Mapping) and key in found:
            channel = f', for weights.channel = "{_CHANNEL[old]}"' if old in _CHANNEL else ""
            raise ConfigError(f"{where}: {old} is now {new}{channel}")


def translated(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Move old keys of recorded settings to their new places. An existing value at the new place wins."""
    table = copy.deepcopy(dict(sections))
    for old, new in RENAMED.items():
        section, key = old.split(".")
        if isinstance(found := table.get(section), dict) and key in found:
            value = found.pop(key)
            if _CHANNEL.get(old) in (None, found.get("channel")):
                _set_default(table, new.split("."), value)
    return table


def _set_default(table: Any, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return
    table.setdefault(path[-1], value)
