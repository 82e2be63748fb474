"""The settings and the user's code that all processes of a run must share, as one number in each heartbeat."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.config import RunConfig
from asyncrl.launch.checks.signal_files import digest_code
from asyncrl.policies.health.faults import SETTINGS
from asyncrl.version import VERSION

_KEYS: Final = {
    "model": ("dtype",),
    "data": ("reward_key",),
    "reward": ("kind", "rows", "parts", "keep_special_tokens"),
    "rollout": ("function", "min_group", "extra_samples", "group_seconds", "max_parts", "max_attempts"),
    "staleness": ("eviction", "discard"),
    "weights": ("channel",),
    "bus": ("ack_seconds",),
}
"""Options are left out: machines may have their own addresses, keys and paths."""


def settings_checksum(run: RunConfig) -> Mapping[str, float]:
    """Return the checksum as a number of the heartbeat; two processes with the same settings have the same."""
    values: list[Any] = [VERSION, run.max_staleness]  # the number: "auto" depends on the learning rate
    for section, keys in _KEYS.items():
        values += [getattr(getattr(run, section), key) for key in keys]
    parts = {name: [part.kind, part.weight] for name, part in run.reward.parts.items()}
    values += [digest_code(name) for name in (run.rollout.function, *run.reward.kinds)]
    text = json.dumps([parts if value is run.reward.parts else value for value in values], sort_keys=True)
    return {SETTINGS: float(zlib.crc32(text.encode()))}
