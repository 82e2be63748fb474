"""A weight channel whose versions reach the engines late: the lag of a run, forced instead of hoped for.

    weights.channel = "benchmarks.delayed_channel:DelayedChannel"
    weights.keep = 20                                              16 versions late

Version v is announced when the learner has published version v + delay, delay = ``keep`` - SPARE. Kept are the version
announced, all newer ones, and some older for engines that still load them.

How much of a lag that is. A group published at version v is sampled by v or newer weights (min_policy_version) and,
with the window full, trained max_staleness versions later. Engines have v from when the learner is at v + delay. So

    min(versions made, delay) <= staleness of every token <= max_staleness

and delay = max_staleness leaves one value: the run is in lockstep at that lag, however fast its parts are. A longer
delay cannot work: the learner would wait for groups that wait for weights.
Tests: benchmarks/tests/test_staleness_bus.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.messages import WeightVersion
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel

SPARE: Final = 4
"""As many as a channel without a delay keeps by default."""


class DelayedChannel(FilesChannel):
    """FilesChannel, announcing another version than the one it writes."""

    def __init__(self, directory: Path, *, keep: int, model_path: Path) -> None:
        """Raises ValueError when ``keep`` is below SPARE."""
        super().__init__(directory, keep=keep, model_path=model_path)
        if keep < SPARE:
            raise ValueError(f"weights.keep must be the delay + {SPARE}, got {keep}")
        self._delay = keep - SPARE
        self._written: list[WeightVersion] = []

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Write this version and give back the one whose time has come; version 0, which engines have, before any."""
        self._written.append(super().publish(snapshot, incarnation=incarnation, policy_version=policy_version))
        due = policy_version - self._delay
        # A learner faster than the disk passes over versions (WeightPublisher), so ``due`` may be missing: the one
        # after it is what its groups wait for.
        self._written = [weights for weights in self._written if weights.policy_version >= due]
        return self._written[0] if due > 0 else WeightVersion(incarnation=incarnation, policy_version=0)
