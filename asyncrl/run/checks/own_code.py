"""Checksums in heartbeats that reveal a process running different code than the learner.

Tests: tests/unit/run/checks/test_own_code.py.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.policies.health.fleet import CODE, FUNCTIONS


def checksums(run: RunConfig, *, package: Path | None = None) -> dict[str, float]:
    """Return checksums of the installed asyncrl code, and of the names of the run's functions.

    Options are not included, because machines may have their own keys, addresses and paths.  package: None is asyncrl's
    folder. Blocks for about ten milliseconds.
    """
    parts = {name: [part.kind, part.weight] for name, part in sorted(run.reward.parts.items())}
    names = [run.reward.kind, dict(sorted(run.reward.rows.items())), parts, run.data.reward_key, run.rollout.function]
    found = {FUNCTIONS: float(zlib.crc32(json.dumps(names).encode()))}
    folder = package or Path(__file__).parents[1]
    code = 0
    try:
        for path in sorted(folder.rglob("*.py")):
            code = zlib.crc32(path.read_bytes(), zlib.crc32(path.relative_to(folder).as_posix().encode(), code))
    except OSError:  # code that cannot be read gets no checksum
        return found
    return {**found, CODE: float(code)}
