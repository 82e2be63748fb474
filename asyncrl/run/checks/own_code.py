"""What tells a process that runs other code than the learner: checksums that its heartbeats carry.

Tests: tests/unit/run/checks/test_own_code.py.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.policies.health.fleet import CODE, FUNCTIONS


def checksums(run: RunConfig, *, package: Path | None = None) -> dict[str, float]:
    """Of asyncrl's own code as it is installed here, and of the names of the run's functions.

    Options are none of it: a machine may have its own keys, addresses and paths.  package: asyncrl's, if None. Blocks
    for some ten milliseconds.
    """
    parts = {name: [part.kind, part.weight] for name, part in sorted(run.reward.parts.items())}
    names = [run.reward.kind, dict(sorted(run.reward.rows.items())), parts, run.data.reward_key, run.rollout.function]
    found = {FUNCTIONS: float(zlib.crc32(json.dumps(names).encode()))}
    folder = package or Path(__file__).parents[1]
    code = 0
    try:
        for path in sorted(folder.rglob("*.py")):
            code = zlib.crc32(path.read_bytes(), zlib.crc32(path.relative_to(folder).as_posix().encode(), code))
    except OSError:  # nothing is said of what cannot be read
        return found
    return {**found, CODE: float(code)}
