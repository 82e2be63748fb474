"""A weight channel that delays versions on their way to the engines, to force the lag of a run.

    weights.channel = "benchmarks.delayed_channel:DelayedChannel"
    weights.keep = 20                                              16 versions late

Version v is announced when the learner has published version v + delay, with delay = ``keep`` - SPARE. The channel
keeps the announced version, all newer ones, and some older ones for engines that are still loading them.

The resulting lag: A group published at version v is sampled with weights of version v or newer (min_policy_version).
With a full window, it is trained max_staleness versions later. Engines have version v once the learner is at v + delay.
Therefore

    min(versions made, delay) <= staleness of every token <= max_staleness

With delay = max_staleness only one value is possible, so the run is in lockstep at that lag, however fast its parts
are. A longer delay cannot work, because the learner would wait for groups that wait for weights. Tests:
benchmarks/tests/test_staleness_bus.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.messages import WeightVersion
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel

SPARE: Final = 4
"""Number of versions that a channel without delay keeps by default."""


class DelayedChannel(FilesChannel):
    """A FilesChannel that announces an older version than it writes."""

    def __init__(self, directory: Path, *, keep: int, model_path: Path) -> None:
        """Raises ValueError when ``keep`` is below SPARE."""
        super().__init__(directory, keep=keep, model_path=model_path)
        if keep < SPARE:
            raise ValueError(f"weights.keep must be the delay + {SPARE}, got {keep}")
        self._delay = keep - SPARE
        self._written: list[WeightVersion] = []

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Write this version and return the version that is due; before any is due, 0, which engines already have."""
        self._written.append(super().publish(snapshot, incarnation=incarnation, policy_version=policy_version))
        due = policy_version - self._delay
        # A learner faster than the disk skips versions (WeightPublisher), so ``due`` may be missing. Its groups then
        # wait for the next version.
        self._written = [weights for weights in self._written if weights.policy_version >= due]
        return self._written[0] if due > 0 else WeightVersion(incarnation=incarnation, policy_version=0)
